//! The performance model: what kernels take at sizes that were measured or not, and which of two is ahead.
//!
//! A [`Model`] is made of [`Observation`]s and is read-only. Selection asks it through [`PerfSource`]: for a time
//! ([`Estimate`]: median, how far it may be off, how many samples), and which of two is ahead ([`Compared`]). It knows
//! nothing of databases.
//!
//! Calls that differ only in their sizes are one *class*. Within a class:
//!
//! 1. At a measured size the time is what was measured.
//! 2. One kernel is the *yardstick*: of those measured at most sizes what plain torch runs, else the fastest. Its time at another
//!    size is its trend (fixed cost + cost per operation + cost per byte, fitted to all its points) times how far the points
//!    nearby are from that trend, interpolated in log space with weights 1/distance³.
//! 3. Another kernel's time is the yardstick's times their ratio, interpolated in the same way: candidates are timed side by side,
//!    so that their ratios hold where their times do not, on a machine that is busy now and idle then. Ratios are taken plainly or
//!    beyond what the two trends say, whichever differs less among the points nearby.
//! 4. Of a call on a device, host and device are predicted each by itself, and the slower one counts. What the host takes varies
//!    with the moment more than with the size: for it all points count alike, the lower quartile of times, the median of ratios.
//! 5. How far a time may be off is found by leaving each point out in turn; how far a ratio may be, by how much it differs from what
//!    its neighbours say, the less the nearer it is.
//! 6. Beyond the measured sizes, as for another model's heads, the yardstick's time is its trend's, and another kernel's follows by
//!    their ratio, which may be the further off the further away the nearest measured size is. Up to [`TRUSTED_BEYOND`] doublings it
//!    is trusted.
//! 7. What was measured on other machines and ships with LayerZero is a [`Prior`]: the same model, with what another machine and
//!    other versions may change added to what a time may be off by.
//!
//! What each of these, and each constant, is worth in cross-validation is in `bench/results/ablation.md`.
//!
//! ```
//! use lz_model::*;
//! use lz_predict::{Model, Observation, Seen};
//! use lz_select::{EstimateKind, PerfSource};
//!
//! let query = |rows: i64| {
//!     let call = CallSpec::new("norm.rms").tensor("x", DType::F32, &[rows, 1024]);
//!     let named = call.named(DeviceIx(0), Context::default());
//!     Catalog::get().resolve(&call.op, &named, &BindRules::default(), |_| None).unwrap().1.query
//! };
//! let took = |rows: i64| Observation {
//!     query: query(rows),
//!     kernel: "lib.rms".into(),
//!     version: "1".into(),
//!     baseline: false,
//!     seen: Seen::Took { median_us: rows as f64, spread_us: 0.5, samples: 20, parts: None },
//! };
//! let devices = [DeviceSpec::new(Platform::Cpu, "here")];
//! let model = Model::new([64, 128, 512].map(took), &devices);
//!
//! let mut kernel = KernelDescriptor::new("lib.rms", "norm.rms", "lib");
//! kernel.version = "1".into();
//! let between = query(256);
//! let facts = Facts { op: Catalog::get().op(between.op()), query: &between, device: &devices[0] };
//! let estimate = model.estimate(&kernel, &facts).unwrap();
//! assert_eq!(estimate.kind, EstimateKind::Predicted);
//! assert!((estimate.median_us / 256.0 - 1.0).abs() < 0.02);
//! ```
#![forbid(unsafe_code)]

mod prior;
mod ratio;
mod sides;
mod times;
mod trend;

use std::collections::HashMap;

use lz_model::schema::DimKey;
use lz_model::{Catalog, DeviceSpec, Facts, KernelDescriptor, MAX_DIMS, OpIx, Query, Reason};
use lz_select::{Compared, Covers, Estimate, EstimateKind, Evidence, KernelVersion, PerfSource, Rival, Side, Sides};

pub use self::prior::{Prior, PriorError, PriorFile, PriorTime, PriorTimes};

use self::times::{Kernel, Point, Times};
use self::trend::Work;

/// How far, in doublings of sizes, the nearest measured point may be for a prediction between points. It says which calls are
/// predicted at all, so that cross-validation, which is about those, does not judge it.
const REACH: f64 = 2.5;
/// How many doublings beyond the sizes measured here times are still trusted. Further away what was measured elsewhere, at sizes
/// that are nearer, says more.
pub const TRUSTED_BEYOND: f64 = 3.0;
/// What predictions are taken to be off by, relative, where there are too few points to find out: one ratio, or two times. Without it
/// a single point would be certain. Cross-validation is the same with a third of it.
const UNTESTED: f64 = 0.15;

/// What a call took of the host that made it and of the device that carried it out, in microseconds: the medians over samples.
/// Calls follow one another, and the slower of the two sets the pace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parts {
    /// The host, at its best pace and with what it does in its caches.
    pub host_us: f64,
    /// The device.
    pub device_us: f64,
}

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
    pub baseline: bool,
    /// What became of it.
    pub seen: Seen,
}

/// Read-only knowledge made of observations.
#[derive(Clone, Debug)]
pub struct Model {
    classes: HashMap<u64, Vec<Class>>,
    edges: HashMap<OpIx, Vec<(usize, i64)>>,
    /// By operation and kernel: a call it was wrong for, in words, and how.
    wrong: HashMap<(OpIx, Id), (String, String)>,
    observations: usize,
    /// How many doublings beyond the measured sizes times are trusted.
    trusted_beyond: f64,
}

impl Default for Model {
    fn default() -> Model {
        Model {
            classes: HashMap::new(),
            edges: HashMap::new(),
            wrong: HashMap::new(),
            observations: 0,
            trusted_beyond: TRUSTED_BEYOND,
        }
    }
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
        Model::trusted_up_to(TRUSTED_BEYOND, observations, devices)
    }

    /// The knowledge in these observations, trusted so many doublings beyond the measured sizes.
    pub fn trusted_up_to(
        trusted_beyond: f64,
        observations: impl IntoIterator<Item = Observation>,
        devices: &[DeviceSpec],
    ) -> Model {
        let mut model = Model { trusted_beyond, ..Model::default() };
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
            let times = || Times { trusted_beyond: self.trusted_beyond, ..Times::default() };
            let host = Times { says: Says::All, ..times() };
            known.push(Class { class, times: times(), host, device: times() });
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
                let (work, baseline) = (Work::of(&facts), observation.baseline);
                let point = Point { dims, work, baseline, median_us, spread_us, samples, residual: 0.0 };
                let taken = kernel.add(point.clone());
                let Some(Parts { host_us, device_us }) = parts.filter(|_| taken) else { return };
                for (times, us) in [(&mut class.host, host_us), (&mut class.device, device_us)] {
                    let part = Point { median_us: us, spread_us: us * spread_us / median_us, ..point.clone() };
                    times.kernels.entry(id.clone()).or_default().add(part);
                }
            }
        }
    }

    /// The time of a version of a kernel.
    fn estimate_of(&self, id: &Id, facts: &Facts<'_>) -> Option<Estimate> {
        self.class(facts.query)?.estimate(id, facts)
    }

    /// What a kernel takes of the host and of the device, measured or predicted.
    fn sides_of(&self, id: &Id, facts: &Facts<'_>) -> Option<Sides> {
        let class = self.class(facts.query)?;
        let side = |times: &Times| {
            let found = times.estimate(id, facts).filter(|e| e.trusted)?;
            Some(Side { median_us: found.median_us, apart_us: found.apart_us.or(Some(found.spread_us)) })
        };
        Some(Sides { host: side(&class.host)?, device: side(&class.device)? })
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
        self.estimate_of(&(kernel.id.clone(), kernel.version.clone()), facts)
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

    fn compare(&self, a: &Rival<'_>, b: &Rival<'_>) -> Compared {
        sides::compare(a, b)
    }

    fn proven_in_graphs(&self, kernel: &KernelDescriptor, facts: &Facts<'_>, covers: Covers<'_>) -> bool {
        let at_such_sizes = |k: &Kernel| k.is_proven() && k.points.iter().any(|point| covers(&point.dims));
        facts.query.context().capturing && self.kernel(kernel, facts.query).is_some_and(at_such_sizes)
    }

    fn graph_proofs(&self) -> Vec<KernelVersion> {
        let captured = self.classes.values().flatten().filter(|class| class.class.context().capturing);
        let proven = captured.flat_map(|class| class.times.kernels.iter().filter(|(_, k)| k.is_proven()));
        proven.map(|(id, _)| id.clone()).collect()
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
    /// At sizes that were not measured, host and device are predicted each by itself where both are known, and the slower counts: a
    /// time that stays the same as long as the host sets the pace, and grows from then on, is no trend.
    fn estimate(&self, id: &Id, facts: &Facts<'_>) -> Option<Estimate> {
        let estimate = self.times.estimate(id, facts)?;
        let known = self.host.points(id).min(self.device.points(id));
        if estimate.kind == EstimateKind::Measured || known < self.times.points(id) {
            return Some(estimate);
        }
        let predicted = |times: &Times| times.estimate(id, facts).filter(|e| e.kind == estimate.kind && e.trusted);
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
            Says::Near => (distance(point, dims).powi(3) + 1e-6).recip(),
            Says::All => 1.0,
        }
    }
}

/// The median; 0 of nothing.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// How far two shapes are apart, in doublings: √Σ(log₂ a − log₂ b)² over their sizes.
fn distance(a: &[i64; MAX_DIMS], b: &[i64; MAX_DIMS]) -> f64 {
    let log = |size: i64| (size.max(0) as f64 + 1.0).log2();
    let differ = a.iter().zip(b).filter(|(a, b)| a != b);
    differ.map(|(&a, &b)| (log(a) - log(b)).powi(2)).sum::<f64>().sqrt()
}
