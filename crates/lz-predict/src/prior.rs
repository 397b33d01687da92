//! What was measured on other machines and ships with LayerZero: what selection goes by before anything is measured here.
//!
//! A [`PriorFile`] holds the medians of one machine: a line per call, with the times of every kernel that was timed there. A
//! [`Prior`] is the model of the files that are about devices like those here. It differs from what is measured here in how far a time may
//! be off, relative. To what the model says are added:
//!
//! | where the call, here, differs from what was measured | added |
//! |---|---|
//! | nothing: the same device, version and call | 5% |
//! | another version of the kernel's library, or another kernel that plain torch runs | 5% |
//! | another layout, strides, or float16 for bfloat16 | 15% |
//! | another device of the family, times scaled by the roofline where its peaks are known | 10% |
//! | a CPU of another family | 30% |
//! | each doubling of the number of threads of a CPU | 10% |
//!
//! Families are GPUs of one compute capability, and CPUs of one vendor whose best instruction set is the same. Nothing is said of
//! other GPUs, nor of CPUs of another architecture; of other CPUs, because there kernels differ most in how much they compute.
//!
//! 15% is what the ratio of two kernels differs by between the two layouts of one call, the median over 72 calls on a CPU. A kernel that has to copy
//! operands which are not as they were measured has no time: the copy is in none.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use lz_model::{BindRules, CallSpec, Catalog, Context, DType, DeviceIx, DeviceSpec, Facts, KernelDescriptor, OpIx};
use lz_model::{Layout, MAX_INPUTS, Platform, Query, TensorFacts};
use lz_select::{Compared, Estimate, EstimateKind, PerfSource, Rival, Side, Sides};
use serde::{Deserialize, Serialize};

use super::{Model, Observation, Parts, Seen, sides};

/// The format this version writes and reads.
const FORMAT: u32 = 1;
/// Another machine of the same kind: what two runs on different days differ by.
const SAME: f64 = 0.05;
const OTHER_VERSION: f64 = 0.05;
const OTHER_FORM: f64 = 0.15;
const OTHER_DEVICE: f64 = 0.1;
const OTHER_FAMILY: f64 = 0.3;
const PER_DOUBLING_OF_THREADS: f64 = 0.1;

/// What plain torch runs, whatever it is called: the kernel that is it may be another one here than where it was measured.
const PLAIN_TORCH: &str = "(what plain torch runs)";

/// The files that ship, by what they are about.
const SHIPPED: &[(&str, &str)] = &[
    ("intel-amx", include_str!("../priors/intel-amx.json")),
    ("nvidia-h200", include_str!("../priors/nvidia-h200.json")),
];

/// Why a prior cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PriorError {
    /// The text is no prior.
    #[error("not a prior of LayerZero: {0}")]
    Parse(#[from] serde_json::Error),
    /// It was written by another version.
    #[error(
        "the prior has format {found}, this version reads {FORMAT}; build it again with 'layerzero perfdb prior build'"
    )]
    Format {
        /// The format it has.
        found: u32,
    },
}

/// What one machine measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PriorFile {
    /// The format of the file.
    pub format: u32,
    /// The device.
    pub device: DeviceSpec,
    /// When it was measured last, in milliseconds since 1970.
    pub measured_at: i64,
    /// How many runs the medians are of.
    pub runs: usize,
    /// The kernels, each an id and the version that was measured.
    pub kernels: Vec<(String, String)>,
    /// The calls.
    pub calls: Vec<PriorTimes>,
}

/// As much of a file as says whether the rest is wanted.
#[derive(Deserialize)]
struct Head {
    format: u32,
    device: DeviceSpec,
}

/// How much less certain a time is on another device than on the one it was measured on, relative; `None` where it says nothing.
fn doubt(there: &DeviceSpec, here: &DeviceSpec) -> Option<f64> {
    let family = match here.platform {
        _ if there.platform != here.platform => return None,
        Platform::Cuda => there.sm == here.sm,
        Platform::Cpu => there.signature() == here.signature(),
        _ => there.name == here.name,
    };
    // Hypervisors give many CPUs one name.
    let alike = there.platform != Platform::Cpu || (there.cores, there.caches) == (here.cores, here.caches);
    let same_architecture = there.supports("neon") == here.supports("neon");
    match (family, here.platform) {
        (true, _) if there.name == here.name && alike => Some(0.0),
        (true, _) => Some(OTHER_DEVICE),
        (false, Platform::Cpu) if same_architecture => Some(OTHER_FAMILY),
        (false, _) => None,
    }
}

/// What kernels take for one call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PriorTimes {
    /// The call.
    pub call: CallSpec,
    /// Whether it was replayed in a CUDA graph.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub graph: bool,
    /// How many threads it had, of a CPU.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub threads: u16,
    /// What plain torch runs for it, as a place in the list of kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub baseline: Option<usize>,
    /// The times.
    pub times: Vec<PriorTime>,
}

impl PriorTimes {
    /// Each kernel's place in the list of kernels, and its median in microseconds.
    pub fn medians(&self) -> impl Iterator<Item = (usize, f64)> + '_ {
        self.times.iter().map(|time| {
            let (kernel, median, ..) = time.parts();
            (kernel, median)
        })
    }
}

fn is_zero(threads: &u16) -> bool {
    *threads == 0
}

/// A kernel's place in the list of kernels; median and spread in microseconds; and, where both were measured, what the host
/// and what the device took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PriorTime {
    /// Host and device were timed each by itself.
    Parts(usize, f64, f64, f64, f64),
    /// They were not.
    Whole(usize, f64, f64),
}

impl PriorTime {
    /// The kernel's place, median, spread, host and device.
    fn parts(&self) -> (usize, f64, f64, Option<Parts>) {
        match *self {
            PriorTime::Parts(kernel, median, spread, host_us, device_us) => {
                (kernel, median, spread, Some(Parts { host_us, device_us }))
            }
            PriorTime::Whole(kernel, median, spread) => (kernel, median, spread, None),
        }
    }
}

impl PriorFile {
    /// A file of this format, without calls.
    pub fn new(device: DeviceSpec, measured_at: i64, runs: usize) -> PriorFile {
        PriorFile { format: FORMAT, device, measured_at, runs, kernels: Vec::new(), calls: Vec::new() }
    }

    /// Reads one.
    pub fn parse(text: &str) -> Result<PriorFile, PriorError> {
        match serde_json::from_str::<Head>(text)?.format {
            FORMAT => Ok(serde_json::from_str(text)?),
            found => Err(PriorError::Format { found }),
        }
    }

    /// The files that ship with LayerZero, by name.
    pub fn shipped() -> impl Iterator<Item = (&'static str, PriorFile)> {
        let read = |(name, text): &(&'static str, &str)| Some((*name, PriorFile::parse(text).ok()?));
        SHIPPED.iter().filter_map(read)
    }

    /// Whether it says anything about a device.
    pub fn is_about(&self, device: &DeviceSpec) -> bool {
        doubt(&self.device, device).is_some()
    }

    /// As JSON, a call in each line, so that versions of a file can be compared.
    pub fn to_text(&self) -> Result<String, PriorError> {
        let head = PriorFile { calls: Vec::new(), ..self.clone() };
        let head = serde_json::to_string(&head)?;
        let head = head.strip_suffix("[]}").unwrap_or(&head);
        let calls: Result<Vec<String>, _> = self.calls.iter().map(serde_json::to_string).collect();
        Ok(format!("{head}[\n{}\n]}}\n", calls?.join(",\n")))
    }

    /// What it is, in words: the device and the version of torch.
    pub fn origin(&self) -> String {
        let torch = self.kernels.iter().find(|(id, _)| id.starts_with("torch."));
        let torch = torch.map(|(_, version)| format!(", torch {}", version.split('+').next().unwrap_or(version)));
        format!("{}{}", self.device.name, torch.unwrap_or_default())
    }

    /// Its times, as they would be on a device of its family: those of calls in their own form, and then the same as those of
    /// calls in the usual form. Of two times of one size the first counts.
    fn observations(&self, here: &DeviceSpec) -> impl Iterator<Item = Observation> {
        let own: Vec<Observation> =
            self.calls.iter().flat_map(|times| self.observed(times, here).unwrap_or_default()).collect();
        let usual = |own: &Observation| {
            let query = own.query.most_usual();
            (query != own.query).then(|| Observation { query, ..own.clone() })
        };
        let usual: Vec<Observation> = own.iter().filter_map(usual).collect();
        own.into_iter().chain(usual)
    }

    fn observed(&self, times: &PriorTimes, here: &DeviceSpec) -> Option<Vec<Observation>> {
        let context = Context { capturing: times.graph, threads: times.threads, ..Context::default() };
        let named = times.call.named(DeviceIx(0), context);
        let resolved = Catalog::get().resolve(&times.call.op, &named, &BindRules::default(), |_| Some(&self.device));
        let query = resolved.ok()?.1.query;
        let scale = self.scale(&query, here);
        let observation = |time: &PriorTime, as_plain: bool| {
            let (kernel, median, spread, parts) = time.parts();
            let baseline = times.baseline == Some(kernel);
            let (id, version) = match as_plain {
                true => (PLAIN_TORCH.to_owned(), String::new()),
                false => self.kernels.get(kernel)?.clone(),
            };
            let parts = parts.map(|p| Parts { device_us: p.device_us * scale, ..p });
            let median_us = match parts {
                Some(_) if scale == 1.0 => median,
                Some(parts) => parts.host_us.max(parts.device_us),
                None => median * scale,
            };
            let spread_us = spread * median_us / median;
            let seen = Seen::Took { median_us, spread_us, samples: 1, parts };
            (baseline || !as_plain).then_some(Observation { query, kernel: id, version, baseline, seen })
        };
        let observed = times.times.iter().flat_map(|time| [observation(time, false), observation(time, true)]);
        Some(observed.flatten().collect())
    }

    /// How many times as long the device here takes for a call, by the roofline: max(operations ÷ peak, bytes ÷ bandwidth), here ÷ there.
    fn scale(&self, query: &Query, here: &DeviceSpec) -> f64 {
        let facts = Facts { op: Catalog::get().op(query.op()), query, device: here };
        let (flops, bytes) = (facts.op.flops(&facts), facts.op.bytes(&facts));
        let dtype = query.tensor(0).dtype().unwrap_or(DType::F32);
        let us = |device: &DeviceSpec| device.roofline_us(dtype, flops, bytes).filter(|us| us.is_finite() && *us > 0.0);
        us(here).zip(us(&self.device)).map_or(1.0, |(here, there)| here / there)
    }
}

/// The model of what was measured elsewhere, of devices like those here.
#[derive(Clone, Debug, Default)]
pub struct Prior {
    /// By the device's place.
    of: Vec<Option<Arc<Told>>>,
}

/// What one file says of one kind of device.
#[derive(Debug)]
struct Told {
    model: Model,
    /// The version that was measured, by kernel.
    versions: HashMap<String, String>,
    /// With how many threads calls were measured, of a CPU.
    threads: Vec<u16>,
    /// How much less certain times are because the device is another one.
    doubt: f64,
    origin: Arc<str>,
}

impl Told {
    fn new(file: &PriorFile, here: &DeviceSpec) -> Told {
        let of = [here.clone()];
        let threads: BTreeSet<u16> = file.calls.iter().map(|call| call.threads).collect();
        Told {
            model: Model::trusted_up_to(f64::INFINITY, file.observations(here), &of),
            versions: file.kernels.iter().cloned().collect(),
            threads: threads.into_iter().collect(),
            doubt: doubt(&file.device, here).unwrap_or(OTHER_FAMILY),
            origin: file.origin().into(),
        }
    }

    fn estimate(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Estimate> {
        let Measured { query, is_own_form, mut off } = self.measured(facts.query)?;
        if !is_own_form && copies(kernel, facts.query) {
            return None;
        }
        let at = Facts { query: &query, ..*facts };
        let version = self.versions.get(&kernel.id);
        let named = version.map(|version| (kernel.id.clone(), version.clone()));
        let plain = kernel.baseline.then(|| (PLAIN_TORCH.to_owned(), String::new()));
        let known = |id: &Option<_>| id.as_ref().and_then(|id| self.model.estimate_of(id, &at));
        let (id, found) = match known(&named) {
            Some(found) => (named?, found),
            None => (plain.clone()?, known(&plain)?),
        };
        if version != Some(&kernel.version) || id.0 == PLAIN_TORCH {
            off += OTHER_VERSION;
        }
        let apart = found.apart_us.unwrap_or(found.spread_us) + off * found.median_us;
        // A tie with plain torch is broken by what each takes the device. A host is another one here: it decides nothing.
        let device = |side: Side| Side { apart_us: side.apart_us.map(|us| us + off * side.median_us), ..side };
        let host = |side: Side| Side { apart_us: None, ..side };
        let sides = self.model.sides_of(&id, &at);
        Some(Estimate {
            spread_us: found.spread_us + off * found.median_us,
            apart_us: Some(apart),
            sides: sides.map(|sides| Sides { host: host(sides.host), device: device(sides.device) }),
            kind: EstimateKind::Prior,
            ..found
        })
    }

    /// The call as it was measured: with the nearest number of threads, in its own form or else in the usual one.
    fn measured(&self, query: &Query) -> Option<Measured> {
        let wanted = query.context().threads;
        let doublings = |threads: u16| (f64::from(threads.max(1)) / f64::from(wanted.max(1))).log2().abs();
        let mut threads = self.threads.clone();
        threads.sort_by(|a, b| doublings(*a).total_cmp(&doublings(*b)));
        threads.into_iter().find_map(|threads| {
            let by_threads = if threads > 0 { PER_DOUBLING_OF_THREADS * doublings(threads) } else { 0.0 };
            let own = query.with_device(DeviceIx(0)).with_threads(threads);
            let form = |query: Query, is_own_form: bool, off: f64| {
                let off = SAME + self.doubt + by_threads + off;
                self.model.class(&query).map(|_| Measured { query, is_own_form, off })
            };
            form(own, true, 0.0).or_else(|| form(own.most_usual(), false, OTHER_FORM))
        })
    }
}

/// A call as it was measured.
struct Measured {
    query: Query,
    /// Whether layout, strides and dtype are those of the call.
    is_own_form: bool,
    /// How much less certain its times are here, relative.
    off: f64,
}

/// Whether a kernel would have to copy an operand of a call that has gaps.
fn copies(kernel: &KernelDescriptor, query: &Query) -> bool {
    let has_gaps = |facts: TensorFacts| facts.is_present() && !facts.is_contiguous();
    (kernel.requires_contiguous || kernel.layouts == [Layout::Contiguous])
        && (0..MAX_INPUTS).any(|i| has_gaps(query.tensor(i)))
}

impl Prior {
    /// What these files say of these devices. Where several are about one, the most certain counts.
    pub fn new(files: &[PriorFile], devices: &[DeviceSpec]) -> Prior {
        let mut of: Vec<Option<Arc<Told>>> = Vec::new();
        for (at, device) in devices.iter().enumerate() {
            // A machine often has several of one kind.
            let product = |device: &DeviceSpec| DeviceSpec { uuid: None, ..device.clone() };
            let same = devices[..at].iter().position(|earlier| product(earlier) == product(device));
            let about = files.iter().filter_map(|file| Some((doubt(&file.device, device)?, file)));
            let file = about.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, file)| file);
            of.push(same.map_or_else(|| file.map(|file| Arc::new(Told::new(file, device))), |same| of[same].clone()));
        }
        Prior { of }
    }

    /// What ships says of these devices.
    pub fn shipped(devices: &[DeviceSpec]) -> Prior {
        let is_about_one = |text: &str| {
            let head: Option<Head> = serde_json::from_str(text).ok();
            head.is_some_and(|head| devices.iter().any(|device| doubt(&head.device, device).is_some()))
        };
        let texts = SHIPPED.iter().map(|(_, text)| *text).filter(|text| is_about_one(text));
        let files: Vec<PriorFile> = texts.filter_map(|text| PriorFile::parse(text).ok()).collect();
        Prior::new(&files, devices)
    }

    fn told(&self, device: DeviceIx) -> Option<&Told> {
        self.of.get(usize::from(device.0))?.as_deref()
    }
}

impl PerfSource for Prior {
    fn estimate(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Estimate> {
        self.told(facts.query.device())?.estimate(kernel, facts)
    }

    fn compare(&self, a: &Rival<'_>, b: &Rival<'_>) -> Compared {
        sides::compare(a, b)
    }

    fn is_empty(&self) -> bool {
        self.of.iter().flatten().all(|told| told.model.is_empty())
    }

    fn edges(&self, op: OpIx) -> Vec<(usize, i64)> {
        let mut edges: Vec<(usize, i64)> = self.of.iter().flatten().flat_map(|told| told.model.edges(op)).collect();
        edges.sort_unstable();
        edges.dedup();
        edges
    }

    fn origin(&self, device: DeviceIx) -> Option<Arc<str>> {
        self.told(device).map(|told| told.origin.clone())
    }
}
