//! What sampled calls take in this process, beside what was measured: kernels whose measurements no longer hold.
//!
//! ```text
//! live    the median of 16 sampled calls of a kernel at one size: of what they took the device, where a GPU carried them
//!         out. On the host the lower quartile: a host is often kept from its work, and never helped.
//! stored  the measured median at that size. Predictions are not compared: nobody measured them.
//! drift   live > 2 · stored, three times in a row.
//! ```
//!
//! Why 2: hosts take half as long again for seconds at a time, and the time between two events holds the launch as well
//! where the device had nothing else to do; neither makes a call take twice what was measured, which is the slower of the
//! two. Why only slower: measurements begin with a cold cache, so that a live call is often faster. Why three times: a device
//! that is shared, or hot for a moment, is slow for a moment.
//!
//! A kernel that has drifted goes on being ranked by what was measured, since its rivals were measured beside it; it is
//! said in `explain`, in the health and by the readiness check, and its call is to be measured again.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use lz_model::{CallSpec, Catalog, DeviceIx, Facts, KernelDescriptor, Platform, Query};
use lz_select::{EstimateKind, KernelVersion, Snapshot};
use parking_lot::Mutex;
use serde::Serialize;

/// Sampled calls that are judged together.
const BLOCK: usize = 16;
/// How many times what was measured a block must take to be slow.
const SLOW: f64 = 2.0;
/// Slow blocks in a row that are a drift.
const BLOCKS: u32 = 3;
/// The most kernels and sizes that are followed; beyond that no new ones are.
const MOST: usize = 4096;

/// A kernel whose calls take longer than was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Drifted {
    /// The kernel's id.
    pub kernel: String,
    /// Its version.
    pub version: String,
    /// The call to measure again.
    pub call: CallSpec,
    /// On which device: an index into the engine's.
    #[serde(serialize_with = "number")]
    pub device: DeviceIx,
    /// What its calls take, in microseconds.
    pub live_us: f64,
    /// What was measured, in microseconds.
    pub measured_us: f64,
}

fn number<S: serde::Serializer>(device: &DeviceIx, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u16(device.0)
}

impl Drifted {
    /// How many times longer.
    pub fn ratio(&self) -> f64 {
        self.live_us / self.measured_us
    }
}

impl std::fmt::Display for Drifted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Drifted { kernel, live_us, measured_us, .. } = self;
        write!(f, "{kernel} takes {live_us:.1} µs, {measured_us:.1} µs were measured ({:.1} times)", self.ratio())
    }
}

/// One kernel at one size.
struct Follow {
    kernel: KernelVersion,
    query: Query,
    call: CallSpec,
    block: Vec<f64>,
    /// What was measured when the blocks before were judged. Another measurement begins anew.
    measured_us: f64,
    slow_blocks: u32,
    live_us: f64,
}

/// A kernel and a call, each by a hash: a sampled call allocates nothing. What is followed holds both in full.
type Key = (u64, u64);

/// What sampled calls took.
#[derive(Default)]
pub(crate) struct Live(Mutex<Known>);

struct Known {
    follows: HashMap<Key, Follow>,
    /// Calls that nobody measured, by the epoch in which that was so: finding out takes longer than most kernels.
    unmeasured: HashMap<Key, u64>,
}

impl Default for Known {
    fn default() -> Self {
        // As large as it gets, so that no call has it grow.
        Known { follows: HashMap::new(), unmeasured: HashMap::with_capacity(MOST) }
    }
}

/// A call as it was measured: its class, and its sizes.
fn key(kernel: &KernelDescriptor, query: &Query) -> (Key, Query) {
    let call = query.class().with_dims(*query.dims());
    let mut name = DefaultHasher::new();
    (&kernel.id, &kernel.version).hash(&mut name);
    ((name.finish(), call.fingerprint()), call)
}

/// What was measured of a kernel for just this call.
fn measured_us(snapshot: &Snapshot, kernel: &KernelDescriptor, query: &Query) -> Option<f64> {
    let facts = Facts { op: Catalog::get().op(query.op()), query, device: snapshot.device(query.device())? };
    let estimate = snapshot.spec().perf.estimate(kernel, &facts)?;
    (estimate.kind == EstimateKind::Measured && estimate.median_us > 0.0).then_some(estimate.median_us)
}

/// What a block took: the median, or the lower quartile of times of a host.
fn typical(block: &mut [f64], on_host: bool) -> f64 {
    block.sort_unstable_by(f64::total_cmp);
    if on_host { block[block.len() / 4] } else { (block[(block.len() - 1) / 2] + block[block.len() / 2]) / 2.0 }
}

impl Follow {
    fn is_of(&self, kernel: &KernelDescriptor, query: &Query) -> bool {
        self.query == *query && self.kernel.0 == kernel.id && self.kernel.1 == kernel.version
    }

    fn is_drifted(&self) -> bool {
        self.slow_blocks >= BLOCKS
    }
}

impl Live {
    /// A kernel took so long for a sampled call: the device, where it is a GPU, else the host.
    pub fn took(
        &self,
        snapshot: &Snapshot,
        kernel: &KernelDescriptor,
        query: &Query,
        call: impl FnOnce() -> Option<CallSpec>,
        us: f64,
    ) {
        if !(us.is_finite() && us > 0.0) {
            return;
        }
        let (key, query) = key(kernel, query);
        let mut known = self.0.lock();
        let Known { follows, unmeasured } = &mut *known;
        if !follows.contains_key(&key) {
            let epoch = snapshot.epoch();
            if unmeasured.get(&key) == Some(&epoch) {
                return;
            }
            let measured = measured_us(snapshot, kernel, &query).filter(|_| follows.len() < MOST);
            // Written down only where it is followed.
            let Some((measured_us, call)) = measured.and_then(|us| Some((us, call()?))) else {
                if unmeasured.len() >= MOST {
                    unmeasured.clear();
                }
                unmeasured.insert(key, epoch);
                return;
            };
            let (block, live_us) = (Vec::with_capacity(BLOCK), 0.0);
            let kernel = (kernel.id.clone(), kernel.version.clone());
            follows.insert(key, Follow { kernel, query, call, block, measured_us, slow_blocks: 0, live_us });
        }
        let Some(follow) = follows.get_mut(&key).filter(|follow| follow.is_of(kernel, &query)) else { return };
        follow.block.push(us);
        if follow.block.len() < BLOCK {
            return;
        }
        let on_host = snapshot.device(query.device()).is_none_or(|device| device.platform == Platform::Cpu);
        let Some(measured_us) = measured_us(snapshot, kernel, &query) else {
            follows.remove(&key);
            return;
        };
        if measured_us != follow.measured_us {
            (follow.measured_us, follow.slow_blocks) = (measured_us, 0);
        }
        follow.live_us = typical(&mut follow.block, on_host);
        follow.block.clear();
        follow.slow_blocks = if follow.live_us > SLOW * measured_us { follow.slow_blocks.saturating_add(1) } else { 0 };
    }

    /// The calls to measure again, the one that drifted most first. Whoever measures one need not say so: with another
    /// measurement in force it is off the list.
    pub fn drifted(&self, snapshot: &Snapshot) -> Vec<Drifted> {
        let known = self.0.lock();
        let drifted = known.follows.iter().filter(|(_, follow)| follow.is_drifted());
        let mut all: Vec<Drifted> =
            drifted.filter_map(|(_, follow)| drift(snapshot, &follow.kernel.0, &follow.kernel.1, follow)).collect();
        all.sort_by(|a, b| b.ratio().total_cmp(&a.ratio()).then_with(|| a.kernel.cmp(&b.kernel)));
        all
    }

    /// Whether, and how, a kernel has drifted for a call.
    pub fn of(&self, snapshot: &Snapshot, kernel: &KernelDescriptor, query: &Query) -> Option<Drifted> {
        let (key, query) = key(kernel, query);
        let known = self.0.lock();
        let follow = known.follows.get(&key).filter(|follow| follow.is_of(kernel, &query) && follow.is_drifted())?;
        drift(snapshot, &kernel.id, &kernel.version, follow)
    }
}

/// What drifted, if the measurement it drifted from is still in force.
fn drift(snapshot: &Snapshot, id: &str, version: &str, follow: &Follow) -> Option<Drifted> {
    let (_, kernel) = snapshot.kernels().find(|(_, kernel)| kernel.id == id && kernel.version == version)?;
    let stands = measured_us(snapshot, kernel, &follow.query) == Some(follow.measured_us);
    stands.then(|| Drifted {
        kernel: id.to_owned(),
        version: version.to_owned(),
        call: follow.call.clone(),
        device: follow.query.device(),
        live_us: follow.live_us,
        measured_us: follow.measured_us,
    })
}

#[cfg(test)]
mod tests {
    use super::typical;

    #[test]
    fn a_host_is_judged_by_its_undisturbed_calls() {
        let mut block: Vec<f64> = (1..=16).map(f64::from).collect();
        assert_eq!(typical(&mut block, true), 5.0);
        assert_eq!(typical(&mut block, false), 8.5);
    }
}
