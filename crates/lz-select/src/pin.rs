//! Decisions that were made before: those of a lockfile or a dispatch table.

use std::collections::HashMap;
use std::sync::Arc;

use lz_model::{KernelDescriptor, MAX_DIMS, OpIx, Query};

/// One decision: calls of a class, within ranges of sizes, go to a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Pin {
    /// The class of the calls, as [`Query::class`] gives it.
    pub class: Query,
    /// The least size of each dimension.
    pub low: [i64; MAX_DIMS],
    /// The largest size of each dimension, itself included.
    pub high: [i64; MAX_DIMS],
    /// The kernel's id.
    pub kernel: String,
    /// Its version, where only that one is meant.
    pub version: Option<String>,
    /// Who says so, for people: `lockfile layerzero.lock`.
    pub origin: Arc<str>,
}

impl Pin {
    /// A pin for calls of just these sizes.
    pub fn exact(query: &Query, kernel: &str, version: Option<&str>, origin: Arc<str>) -> Pin {
        let (low, high) = (*query.dims(), *query.dims());
        Pin { class: query.class(), low, high, kernel: kernel.to_owned(), version: version.map(str::to_owned), origin }
    }

    /// Whether it is about a call.
    pub fn covers(&self, query: &Query) -> bool {
        self.class == query.class()
            && query
                .dims()
                .iter()
                .zip(self.low.iter().zip(&self.high))
                .all(|(d, (low, high))| (low..=high).contains(&d))
    }

    /// Whether a kernel is the one it names.
    pub fn names(&self, kernel: &KernelDescriptor) -> bool {
        self.kernel == kernel.id && self.version.as_ref().is_none_or(|version| *version == kernel.version)
    }
}

/// All decisions that were made before. Of several that cover a call the first counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pins {
    by_class: HashMap<u64, Vec<Pin>>,
    count: usize,
}

impl Pins {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The one that covers a call.
    pub fn find(&self, query: &Query) -> Option<&Pin> {
        if self.is_empty() {
            return None;
        }
        self.by_class.get(&query.class().fingerprint())?.iter().find(|pin| pin.covers(query))
    }

    /// Every one of them.
    pub fn iter(&self) -> impl Iterator<Item = &Pin> {
        self.by_class.values().flatten()
    }

    /// Sizes of an operation at which another pin may begin to count: dimension, first size that is different.
    pub(crate) fn edges(&self, op: OpIx) -> impl Iterator<Item = (usize, i64)> + '_ {
        let of_op = self.iter().filter(move |pin| pin.class.op() == op);
        of_op.flat_map(|pin| (0..MAX_DIMS).flat_map(|d| [(d, pin.low[d]), (d, pin.high[d].saturating_add(1))]))
    }
}

impl FromIterator<Pin> for Pins {
    fn from_iter<I: IntoIterator<Item = Pin>>(pins: I) -> Pins {
        let mut all = Pins::default();
        for pin in pins {
            all.count += 1;
            all.by_class.entry(pin.class.fingerprint()).or_default().push(pin);
        }
        all
    }
}
