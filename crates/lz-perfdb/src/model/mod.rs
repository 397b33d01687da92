//! What the measurements say about calls, measured or not: the knowledge selection ranks by.
//!
//! Calls that differ only in their sizes are one *class*, and one kernel of it is its *yardstick*: of those measured most
//! often what plain torch runs, since others are chosen when they are clearly ahead of that; or the fastest, where plain
//! torch is far behind at most sizes and the choice is between others. The yardstick's time at a size that was not measured
//! is predicted in two steps: a trend (a fixed cost, a cost per operation, a cost per byte, fitted to all its points), and
//! how far its nearest points were from that trend, interpolated in log space. How other kernels compare with it, plainly or
//! beyond what the two trends say, is interpolated directly: candidates are timed side by side, so that their ratios hold
//! where their times do not, on a machine that is busy now and idle then.
//!
//! Of a call that runs on a device, what it takes the host and what it takes the device are predicted each by itself. What the
//! host does varies with the moment more than with the size: unless the neighbours of a point clearly foretell it better than
//! all points do, all count alike, and of a yardstick the lower quartile, of ratios the median.
//!
//! How far a time may be off is found by leaving each point out in turn; how far a ratio may be, by how much it differs
//! between the neighbours. Beyond the measured sizes there is only a guess, which is said to be one and never trusted.

mod ratio;
mod times;
mod trend;

use std::collections::HashMap;

use lz_model::schema::DimKey;
use lz_model::{Catalog, DeviceSpec, Facts, KernelDescriptor, MAX_DIMS, OpIx, Query, Reason};
use lz_select::{Estimate, EstimateKind, Evidence, KernelVersion, PerfSource, Side, Sides};

use self::times::{Kernel, Point, Times};
use self::trend::Work;
use crate::record::Parts;

/// How far, in doublings of sizes, the nearest measured point may be for a prediction between points.
const REACH: f64 = 2.5;
/// How far a neighbour on the other side of a power of two is at least, in doublings. Kernels work in blocks: what 256 rows
/// take says more about 244 than what 262 take, which need one block more.
const STEP: f64 = 1.0;
/// What predictions are taken to be off by when there are too few points to find out.
const UNTESTED: f64 = 0.15;
/// A kernel this many times slower than the fastest may still turn out to be the choice.
const RIVAL: f64 = 1.25;
/// What a device's own times differ by from call to call, whatever the host does meanwhile: as much as those of graphs do.
const STEADY: f64 = 0.02;
/// How far off predictions by the neighbours must be at most, to those by all, for sizes to matter where they need not.
const CLEARLY: f64 = 0.7;
/// Predictions are never better than this.
const LEAST_ERROR: f64 = 0.01;

/// What became of one kernel at one call.
#[derive(Clone, Debug, PartialEq)]
pub enum Seen {
    /// It took this long.
    Took {
        /// Median, in microseconds.
        median_us: f64,
        /// Differences below this are noise.
        spread_us: f64,
        /// How many measurements stand behind it.
        samples: u32,
        /// What it took whom.
        parts: Option<Parts>,
    },
    /// Its results were wrong.
    Wrong(String),
    /// It failed.
    Failed(String),
}

/// One kernel at one call, as it was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Observation {
    /// The call.
    pub query: Query,
    /// The kernel's id.
    pub kernel: String,
    /// Its version.
    pub version: String,
    /// Whether it is what plain torch runs there.
    pub default: bool,
    /// What became of it.
    pub seen: Seen,
}

/// Read-only knowledge made of observations.
#[derive(Clone, Debug, Default)]
pub struct Model {
    classes: HashMap<u64, Vec<Class>>,
    edges: HashMap<OpIx, Vec<(usize, i64)>>,
    /// By operation and kernel: a call it was wrong for, in words, and how.
    wrong: HashMap<(OpIx, Id), (String, String)>,
    observations: usize,
}

/// Calls that are alike but for their sizes.
#[derive(Clone, Debug)]
struct Class {
    class: Query,
    times: Times,
    /// Of those times, what they were of the host and of the device; less is known of them where that was not measured.
    host: Times,
    device: Times,
}

/// A kernel's id and version.
type Id = (String, String);

impl Model {
    /// The knowledge in these observations. Those of devices or operations that are not here are left out.
    pub fn new(observations: impl IntoIterator<Item = Observation>, devices: &[DeviceSpec]) -> Model {
        let mut model = Model::default();
        for observation in observations {
            model.add(observation, devices);
        }
        let classes = model.classes.values_mut().flatten();
        classes.flat_map(|c| [&mut c.times, &mut c.host, &mut c.device]).for_each(Times::fit);
        let mut edges: HashMap<OpIx, Vec<(usize, i64)>> = HashMap::new();
        for class in model.classes.values().flatten() {
            edges.entry(class.class.op()).or_default().extend(class.edges());
        }
        for of_op in edges.values_mut() {
            of_op.sort_unstable();
            of_op.dedup();
        }
        model.edges = edges;
        model
    }

    /// How many observations are in it.
    pub fn len(&self) -> usize {
        self.observations
    }

    /// How much may be lost at a call that was measured, relative, if its neighbours are right about it and it is not: how
    /// far the ratio of a kernel that may be the choice is from what theirs are, beyond the noise. Machines have bad
    /// moments, and a call measured in one misleads about all that lie near it.
    pub fn doubt(&self, query: &Query) -> f64 {
        self.class(query).map_or(0.0, |class| class.times.doubt(query.dims()))
    }

    /// Whether it knows nothing.
    pub fn is_empty(&self) -> bool {
        self.observations == 0
    }

    fn add(&mut self, observation: Observation, devices: &[DeviceSpec]) {
        let query = &observation.query;
        let Some(device) = devices.get(query.device().0 as usize) else { return };
        let facts = Facts { op: Catalog::get().op(query.op()), query, device };
        let class = query.class();
        let known = self.classes.entry(class.fingerprint()).or_default();
        let at = known.iter().position(|c| c.class == class).unwrap_or_else(|| {
            known.push(Class {
                class,
                times: Times::default(),
                host: Times { sizes: Sizes::MayMatter, ..Times::default() },
                device: Times::default(),
            });
            known.len() - 1
        });
        let class = &mut known[at];
        self.observations += 1;
        let (id, dims) = ((observation.kernel, observation.version), *query.dims());
        let kernel = class.times.kernels.entry(id.clone()).or_default();
        match observation.seen {
            Seen::Wrong(error) => {
                self.wrong.entry((query.op(), id.clone())).or_insert_with(|| (format!("{query:?}"), error.clone()));
                for times in [&mut class.times, &mut class.host, &mut class.device] {
                    times.kernels.entry(id.clone()).or_default().wrong = Some(error.clone());
                }
            }
            Seen::Failed(error) => kernel.failed.push((dims, error)),
            Seen::Took { median_us, spread_us, samples, parts } => {
                let (work, default) = (Work::of(&facts), observation.default);
                let point = Point { dims, work, default, median_us, spread_us, samples, residual: 0.0 };
                let taken = kernel.add(point.clone());
                let Some(Parts { host_us, device_us }) = parts.filter(|_| taken) else { return };
                let noise = spread_us / median_us;
                // The noise is that of the side that set the pace: what a busy host did to it is not the device's.
                let of_device = if host_us > device_us { noise.min(STEADY) } else { noise };
                for (times, us, noise) in [(&mut class.host, host_us, noise), (&mut class.device, device_us, of_device)]
                {
                    let part = Point { median_us: us, spread_us: us * noise, ..point.clone() };
                    times.kernels.entry(id.clone()).or_default().add(part);
                }
            }
        }
    }

    fn class(&self, query: &Query) -> Option<&Class> {
        let class = query.class();
        self.classes.get(&class.fingerprint())?.iter().find(|c| c.class == class)
    }

    fn kernel(&self, kernel: &KernelDescriptor, query: &Query) -> Option<&Kernel> {
        self.class(query)?.times.kernels.get(&(kernel.id.clone(), kernel.version.clone()))
    }
}

impl PerfSource for Model {
    fn estimate(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Estimate> {
        self.class(facts.query)?.estimate(&(kernel.id.clone(), kernel.version.clone()), facts)
    }

    fn verdict(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Reason> {
        let wrong = || self.wrong.get(&(facts.query.op(), (kernel.id.clone(), kernel.version.clone())));
        let known = self.kernel(kernel, facts.query);
        // One wrong result is held against a kernel for the whole operation; against what plain torch runs only for calls
        // like that one, since often nothing else could serve the others.
        let is_wrong_here = known.is_some_and(|known| known.wrong.is_some());
        if !self.wrong.is_empty()
            && (is_wrong_here || !kernel.baseline)
            && let Some((call, error)) = wrong()
        {
            let (call, error) = (call.clone(), error.clone());
            return Some(Reason::NumericalMismatch { error, call, max_error: None, tolerance: None });
        }
        let known = known?;
        let failed = known.failed.iter().find(|(dims, _)| dims == facts.query.dims());
        failed.map(|(_, error)| Reason::BackendError { error: error.clone() })
    }

    fn proven_in_graphs(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> bool {
        facts.query.context().capturing && self.kernel(kernel, facts.query).is_some_and(Kernel::is_proven)
    }

    fn graph_proofs(&self) -> usize {
        let captured = self.classes.values().flatten().filter(|class| class.class.context().capturing);
        let proven =
            captured.flat_map(|class| class.times.kernels.iter().filter(|(_, k)| k.is_proven()).map(|(id, _)| id));
        proven.collect::<std::collections::HashSet<_>>().len()
    }

    fn mismatches(&self) -> Vec<(KernelVersion, OpIx, Evidence)> {
        let evidence = |(call, error): &(String, String)| {
            let (call, error) = (call.clone(), error.clone());
            Evidence { error, call, max_error: None, tolerance: None }
        };
        let mut all: Vec<_> = self.wrong.iter().map(|((op, id), seen)| (id.clone(), *op, evidence(seen))).collect();
        all.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
        all
    }

    fn edges(&self, op: OpIx) -> Vec<(usize, i64)> {
        self.edges.get(&op).cloned().unwrap_or_default()
    }
}

impl Class {
    /// Between measured sizes, host and device are predicted each by itself where both are known, and the slower counts: a
    /// time that stays the same as long as the host sets the pace, and grows from then on, is no trend.
    fn estimate(&self, id: &Id, facts: &Facts<'_>) -> Option<Estimate> {
        let estimate = self.times.estimate(id, facts)?;
        let known = self.host.points(id).min(self.device.points(id));
        if estimate.kind != EstimateKind::Predicted || known < self.times.points(id) {
            return Some(estimate);
        }
        let predicted = |times: &Times| times.estimate(id, facts).filter(|e| e.kind == EstimateKind::Predicted);
        let (Some(host), Some(device)) = (predicted(&self.host), predicted(&self.device)) else {
            return Some(estimate);
        };
        let side = |e: &Estimate| Side { median_us: e.median_us, apart_us: e.apart_us };
        let sides = Some(Sides { host: side(&host), device: side(&device) });
        Some(Estimate { sides, ..if host.median_us > device.median_us { host } else { device } })
    }

    /// A measured size has a cell of its own; between two, the nearer one counts.
    fn edges(&self) -> Vec<(usize, i64)> {
        let schema = Catalog::get().op(self.class.op()).schema();
        let mut edges = Vec::new();
        for d in (0..schema.dims.len()).filter(|&d| schema.dims[d].key != DimKey::Exact) {
            let points = self.times.kernels.values().flat_map(|k| k.points.iter().map(|p| p.dims[d]));
            let failed = self.times.kernels.values().flat_map(|k| k.failed.iter().map(|(dims, _)| dims[d]));
            let mut sizes: Vec<i64> = points.chain(failed).collect();
            sizes.sort_unstable();
            sizes.dedup();
            edges.extend(sizes.iter().flat_map(|&size| [(d, size), (d, size.saturating_add(1))]));
            edges.extend(sizes.windows(2).map(|pair| (d, middle(pair[0], pair[1]))));
        }
        edges
    }
}

/// The size half way between two in log space, and so nearer to the upper one.
fn middle(low: i64, high: i64) -> i64 {
    ((low.max(1) as f64 * high as f64).sqrt().ceil() as i64).clamp(low, high)
}

/// Whether times differ between sizes, beyond the trend and chance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sizes {
    /// They do.
    #[default]
    Matter,
    /// Only where the points say so: a host that makes two launches from some size on takes longer from there.
    MayMatter,
}

impl Sizes {
    /// Whether they do, if points that are left out are foretold up to so much by those nearby, and by all of them.
    fn matter(self, near: f64, all: f64) -> bool {
        self == Sizes::Matter || near < CLEARLY * all
    }
}

/// Which points say something about a shape, beyond their trend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Says {
    /// Those nearby, the nearer the more.
    #[default]
    Near,
    /// All of them, each as much as any: they differ by chance.
    All,
}

impl Says {
    /// How much a point counts for a shape.
    fn weight(self, point: &[i64; MAX_DIMS], dims: &[i64; MAX_DIMS]) -> f64 {
        match self {
            Says::Near => (apart(point, dims, STEP).powi(3) + 1e-6).recip(),
            Says::All => 1.0,
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// How far two shapes are apart, in doublings.
fn distance(a: &[i64; MAX_DIMS], b: &[i64; MAX_DIMS]) -> f64 {
    apart(a, b, 0.0)
}

/// The same with at least so much for every size on the other side of a power of two.
fn apart(a: &[i64; MAX_DIMS], b: &[i64; MAX_DIMS], step: f64) -> f64 {
    let log = |size: i64| (size.max(0) as f64 + 1.0).log2();
    // The power of two a size just fits into.
    let block = |size: i64| size.max(1).cast_unsigned().next_power_of_two();
    let far = |a: i64, b: i64| (log(a) - log(b)).abs().max(if block(a) == block(b) { 0.0 } else { step });
    a.iter().zip(b).map(|(&a, &b)| far(a, b).powi(2)).sum::<f64>().sqrt()
}
