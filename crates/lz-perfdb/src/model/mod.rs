//! What the measurements say about calls, measured or not: the knowledge selection ranks by.
//!
//! Calls that differ only in their sizes are one *class*, and one kernel of it, the fastest of those measured most
//! often, is its *yardstick*. The yardstick's time at a size that was not measured is predicted in two steps: a trend (a
//! fixed cost, a cost per operation, a cost per byte, fitted to all its points), and how far its nearest points were from
//! that trend, interpolated in log space. How other kernels compare with it, plainly or beyond what the two trends say, is
//! interpolated directly: candidates are timed side by side, so that their ratios hold where their times do not, on a machine that is
//! busy now and idle then.
//!
//! How far a time may be off is found by leaving each point out in turn; how far a ratio may be, by how much it differs
//! between the neighbours. Beyond the measured sizes there is only a guess, which is said to be one and never trusted.

mod ratio;
mod trend;

use std::collections::HashMap;

use lz_model::schema::DimKey;
use lz_model::{Catalog, DeviceSpec, Facts, KernelDescriptor, MAX_DIMS, OpIx, Query, Reason};
use lz_select::{Estimate, EstimateKind, PerfSource};

use self::ratio::Ratios;
use self::trend::{Trend, Work};

/// How far, in doublings of sizes, the nearest measured point may be for a prediction between points.
const REACH: f64 = 2.5;
/// What predictions are taken to be off by when there are too few points to find out.
const UNTESTED: f64 = 0.15;
/// A kernel this many times slower than the fastest may still turn out to be the choice.
const RIVAL: f64 = 1.25;
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
    /// What became of it.
    pub seen: Seen,
}

/// Read-only knowledge made of observations.
#[derive(Clone, Debug, Default)]
pub struct Model {
    classes: HashMap<u64, Vec<Class>>,
    edges: HashMap<OpIx, Vec<(usize, i64)>>,
    observations: usize,
}

/// Calls that are alike but for their sizes.
#[derive(Clone, Debug)]
struct Class {
    class: Query,
    kernels: HashMap<Id, Kernel>,
    yardstick: Option<Id>,
}

/// A kernel's id and version.
type Id = (String, String);

/// What is known of one kernel in one class.
#[derive(Clone, Debug, Default)]
struct Kernel {
    points: Vec<Point>,
    trend: Trend,
    /// How far predictions between points are off, relative.
    error: f64,
    /// How it compares with the yardstick.
    ratios: Ratios,
    wrong: Option<String>,
    failed: Vec<([i64; MAX_DIMS], String)>,
}

#[derive(Clone, Debug)]
struct Point {
    dims: [i64; MAX_DIMS],
    work: Work,
    median_us: f64,
    spread_us: f64,
    samples: u32,
    /// How far it is from the trend, in log space.
    residual: f64,
}

impl Model {
    /// The knowledge in these observations. Those of devices or operations that are not here are left out.
    pub fn new(observations: impl IntoIterator<Item = Observation>, devices: &[DeviceSpec]) -> Model {
        let mut model = Model::default();
        for observation in observations {
            model.add(observation, devices);
        }
        for class in model.classes.values_mut().flatten() {
            class.fit();
        }
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
        self.class(query).map_or(0.0, |class| class.doubt(query.dims()))
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
            known.push(Class { class, kernels: HashMap::new(), yardstick: None });
            known.len() - 1
        });
        let kernel = known[at].kernels.entry((observation.kernel, observation.version)).or_default();
        self.observations += 1;
        let dims = *query.dims();
        match observation.seen {
            Seen::Wrong(error) => kernel.wrong = Some(error),
            Seen::Failed(error) => kernel.failed.push((dims, error)),
            Seen::Took { median_us, spread_us, samples } => {
                let sound = median_us.is_finite() && median_us > 0.0 && spread_us.is_finite() && spread_us >= 0.0;
                if sound && !kernel.points.iter().any(|p| p.dims == dims) {
                    let work = Work::of(&facts);
                    kernel.points.push(Point { dims, work, median_us, spread_us, samples, residual: 0.0 });
                }
            }
        }
    }

    fn class(&self, query: &Query) -> Option<&Class> {
        let class = query.class();
        self.classes.get(&class.fingerprint())?.iter().find(|c| c.class == class)
    }

    fn kernel(&self, kernel: &KernelDescriptor, query: &Query) -> Option<&Kernel> {
        self.class(query)?.kernels.get(&(kernel.id.clone(), kernel.version.clone()))
    }
}

impl PerfSource for Model {
    fn estimate(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Estimate> {
        self.class(facts.query)?.estimate(&(kernel.id.clone(), kernel.version.clone()), facts)
    }

    fn verdict(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Reason> {
        let known = self.kernel(kernel, facts.query)?;
        if let Some(error) = &known.wrong {
            return Some(Reason::NumericalMismatch { error: error.clone() });
        }
        let failed = known.failed.iter().find(|(dims, _)| dims == facts.query.dims());
        failed.map(|(_, error)| Reason::BackendError { error: error.clone() })
    }

    fn proven_in_graphs(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> bool {
        facts.query.context().capturing && self.kernel(kernel, facts.query).is_some_and(Kernel::is_proven)
    }

    fn graph_proofs(&self) -> usize {
        let captured = self.classes.values().flatten().filter(|class| class.class.context().capturing);
        let proven = captured.flat_map(|class| class.kernels.iter().filter(|(_, k)| k.is_proven()).map(|(id, _)| id));
        proven.collect::<std::collections::HashSet<_>>().len()
    }

    fn edges(&self, op: OpIx) -> Vec<(usize, i64)> {
        self.edges.get(&op).cloned().unwrap_or_default()
    }
}

impl Class {
    fn fit(&mut self) {
        for kernel in self.kernels.values_mut() {
            kernel.fit();
        }
        // What all kernels share at a point (a busy machine) is not an error of any.
        let mut shared: HashMap<[i64; MAX_DIMS], Vec<f64>> = HashMap::new();
        let errors: Vec<_> = self.kernels.iter().map(|(id, kernel)| (id.clone(), kernel.errors())).collect();
        for (dims, error) in errors.iter().flat_map(|(_, errors)| errors) {
            shared.entry(*dims).or_default().push(*error);
        }
        let shared: HashMap<_, f64> = shared.into_iter().map(|(dims, errors)| (dims, median(errors))).collect();
        for (id, errors) in errors {
            let alone = |(dims, error): &([i64; MAX_DIMS], f64)| error - shared.get(dims).copied().unwrap_or(0.0);
            let own: Vec<f64> = errors.iter().map(|e| alone(e).powi(2)).collect();
            if let Some(kernel) = self.kernels.get_mut(&id) {
                let rms = (own.iter().sum::<f64>() / own.len().max(1) as f64).sqrt();
                kernel.error = if own.len() < 3 { UNTESTED } else { rms.max(LEAST_ERROR) };
            }
        }
        self.compare();
    }

    /// Chooses the yardstick, and compares every other kernel with it.
    fn compare(&mut self) {
        let speed = |k: &Kernel| k.points.iter().map(|p| p.median_us.ln()).sum::<f64>();
        let timed = self.kernels.iter().filter(|(_, kernel)| kernel.is_proven());
        let first = timed.min_by(|(a, x), (b, y)| {
            y.points.len().cmp(&x.points.len()).then(speed(x).total_cmp(&speed(y))).then(a.cmp(b))
        });
        let Some((id, yardstick)) = first.map(|(id, kernel)| (id.clone(), kernel.points.clone())) else { return };
        for (_, kernel) in self.kernels.iter_mut().filter(|(other, _)| **other != id) {
            kernel.ratios = Ratios::new(&kernel.points, &yardstick);
        }
        self.yardstick = Some(id);
    }

    /// By the yardstick where that is known around here and was timed beside the kernel nearby; else by itself alone.
    fn estimate(&self, id: &Id, facts: &Facts<'_>) -> Option<Estimate> {
        let kernel = self.kernels.get(id)?;
        let own = kernel.estimate(facts)?;
        if own.kind != EstimateKind::Predicted {
            return Some(own);
        }
        let Some(yardstick) = self.yardstick.as_ref() else { return Some(own) };
        if yardstick == id {
            return Some(Estimate { apart_us: Some(own.median_us * LEAST_ERROR), ..own });
        }
        let (yardstick, work) = (self.kernels.get(yardstick)?, Work::of(facts));
        let by = yardstick.estimate(facts).filter(|by| by.kind != EstimateKind::Extrapolated);
        let trends = kernel.trend.time_us(&work) / yardstick.trend.time_us(&work);
        let (Some(by), Some((ratio, off))) = (by, kernel.ratios.at(facts.query.dims(), trends)) else {
            return Some(own);
        };
        let median_us = by.median_us * ratio;
        let spread_us = median_us * (by.spread_us / by.median_us).hypot(off);
        Some(Estimate { median_us, spread_us, apart_us: Some(median_us * off.max(LEAST_ERROR)), ..own })
    }

    fn doubt(&self, dims: &[i64; MAX_DIMS]) -> f64 {
        let here = |kernel: &Kernel| kernel.points.iter().find(|p| p.dims == *dims).map(|p| p.median_us);
        let best = self.kernels.values().filter_map(here).fold(f64::INFINITY, f64::min);
        let doubted = self.kernels.values().filter_map(|kernel| {
            let (measured_us, doubt) = (here(kernel)?, kernel.ratios.doubt(dims)?);
            // Even as fast as the neighbours say it would not be the choice.
            (measured_us / doubt.exp() <= RIVAL * best).then_some(doubt)
        });
        doubted.fold(0.0, f64::max)
    }

    /// A measured size has a cell of its own; between two, the nearer one counts.
    fn edges(&self) -> Vec<(usize, i64)> {
        let schema = Catalog::get().op(self.class.op()).schema();
        let mut edges = Vec::new();
        for d in (0..schema.dims.len()).filter(|&d| schema.dims[d].key != DimKey::Exact) {
            let points = self.kernels.values().flat_map(|k| k.points.iter().map(|p| p.dims[d]));
            let failed = self.kernels.values().flat_map(|k| k.failed.iter().map(|(dims, _)| dims[d]));
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

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

impl Kernel {
    /// Whether it ran and was right.
    fn is_proven(&self) -> bool {
        self.wrong.is_none() && !self.points.is_empty()
    }

    fn fit(&mut self) {
        self.trend = Trend::fit(self.points.iter().map(|p| (p.work, p.median_us)));
        for point in &mut self.points {
            point.residual = (point.median_us / self.trend.time_us(&point.work)).ln();
        }
    }

    fn estimate(&self, facts: &Facts<'_>) -> Option<Estimate> {
        let dims = facts.query.dims();
        if let Some(point) = self.points.iter().find(|p| p.dims == *dims) {
            return Some(Estimate {
                median_us: point.median_us,
                spread_us: point.spread_us,
                apart_us: None,
                samples: point.samples,
                kind: EstimateKind::Measured,
                trusted: true,
            });
        }
        let trend = self.trend.time_us(&Work::of(facts));
        let nearest = self.points.iter().map(|p| distance(&p.dims, dims)).fold(f64::INFINITY, f64::min);
        let inside = nearest <= REACH && self.is_between(dims);
        let residual = self.interpolate(dims, None)?;
        let median_us = trend * residual.exp();
        let spread_us = median_us * if inside { self.error } else { self.error.max(UNTESTED) * (1.0 + nearest) };
        Some(Estimate {
            median_us,
            spread_us,
            apart_us: None,
            samples: self.points.iter().map(|p| p.samples).sum(),
            kind: if inside { EstimateKind::Predicted } else { EstimateKind::Extrapolated },
            trusted: inside,
        })
    }

    /// Whether every size lies between the least and the largest that were measured.
    fn is_between(&self, dims: &[i64; MAX_DIMS]) -> bool {
        (0..MAX_DIMS).all(|d| {
            let sizes = || self.points.iter().map(|p| p.dims[d]);
            sizes().min().is_some_and(|low| low <= dims[d]) && sizes().max().is_some_and(|high| dims[d] <= high)
        })
    }

    /// The residual of the neighbours, the nearer the heavier; without one of the points when that is being tested.
    fn interpolate(&self, dims: &[i64; MAX_DIMS], without: Option<usize>) -> Option<f64> {
        let (mut sum, mut weights) = (0.0, 0.0);
        for (_, point) in self.points.iter().enumerate().filter(|(i, _)| Some(*i) != without) {
            let weight = nearness(&point.dims, dims);
            sum += weight * point.residual;
            weights += weight;
        }
        (weights > 0.0).then(|| sum / weights)
    }

    /// For every point, how far its time is from what the others would have predicted, in log space.
    fn errors(&self) -> Vec<([i64; MAX_DIMS], f64)> {
        let error = |(i, p): (usize, &Point)| Some((p.dims, p.residual - self.interpolate(&p.dims, Some(i))?));
        self.points.iter().enumerate().filter_map(error).collect()
    }
}

/// How much a point counts for a shape: the nearer, the heavier.
fn nearness(point: &[i64; MAX_DIMS], dims: &[i64; MAX_DIMS]) -> f64 {
    (distance(point, dims).powi(3) + 1e-6).recip()
}

/// How far two shapes are apart, in doublings.
fn distance(a: &[i64; MAX_DIMS], b: &[i64; MAX_DIMS]) -> f64 {
    let log = |size: i64| (size.max(0) as f64 + 1.0).log2();
    a.iter().zip(b).map(|(&a, &b)| (log(a) - log(b)).powi(2)).sum::<f64>().sqrt()
}
