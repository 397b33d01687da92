//! Decisions that were made before: those of a lockfile or a dispatch table.

use std::collections::HashMap;
use std::sync::Arc;

use lz_model::{Catalog, DeviceIx, KernelDescriptor, MAX_DIMS, OpIx, ParamValue, Query};

/// Which calls a pin is about, their sizes aside.
#[derive(Clone, Debug, PartialEq)]
// There are few of them, and a query is compared where it lies.
#[allow(clippy::large_enum_variant)]
pub enum About {
    /// Those of a class, as [`Query::pinned_class`] gives it.
    Class(Query),
    /// Those of an operation on a device, whatever their dtype and layout.
    Named {
        /// The operation.
        op: OpIx,
        /// The device.
        device: DeviceIx,
        /// Only those under graph capture.
        graph: bool,
        /// Parameters that must have these values.
        fixes: &'static [(&'static str, bool)],
    },
}

impl About {
    /// The operation.
    pub fn op(&self) -> OpIx {
        match self {
            About::Class(class) => class.op(),
            About::Named { op, .. } => *op,
        }
    }

    fn covers(&self, query: &Query) -> bool {
        match self {
            About::Class(class) => *class == query.pinned_class(),
            About::Named { op, device, graph, fixes } => {
                let schema = Catalog::get().op(*op);
                let has = |&(name, value): &(&str, bool)| {
                    let index = schema.param_index(name);
                    index.is_some_and(|i| query.param(i, &schema.schema().params[i]) == ParamValue::Bool(value))
                };
                *op == query.op()
                    && *device == query.device()
                    && (!graph || query.context().capturing)
                    && fixes.iter().all(has)
            }
        }
    }
}

/// One decision: calls of a class, or of an operation, within ranges of sizes, go to a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Pin {
    /// Which calls.
    pub about: About,
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
        let (about, kernel) = (About::Class(query.pinned_class()), kernel.to_owned());
        Pin { about, low, high, kernel, version: version.map(str::to_owned), origin }
    }

    /// Whether it is about a call.
    pub fn covers(&self, query: &Query) -> bool {
        self.about.covers(query)
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

/// All decisions that were made before. Of several that cover a call the first counts; those for its class come before
/// those for its operation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pins {
    by_class: HashMap<u64, Vec<Pin>>,
    by_op: HashMap<OpIx, Vec<Pin>>,
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
        let of_class = self.by_class.get(&query.pinned_class().fingerprint()).into_iter().flatten();
        let of_op = self.by_op.get(&query.op()).into_iter().flatten();
        of_class.chain(of_op).find(|pin| pin.covers(query))
    }

    /// Every one of them.
    pub fn iter(&self) -> impl Iterator<Item = &Pin> {
        self.by_class.values().chain(self.by_op.values()).flatten()
    }

    /// Sizes of an operation at which another pin may begin to count: dimension, first size that is different.
    pub(crate) fn edges(&self, op: OpIx) -> impl Iterator<Item = (usize, i64)> + '_ {
        let of_op = self.iter().filter(move |pin| pin.about.op() == op);
        let ends =
            of_op.flat_map(|pin| (0..MAX_DIMS).flat_map(|d| [(d, pin.low[d]), (d, pin.high[d].saturating_add(1))]));
        ends.filter(|(_, end)| (1..i64::MAX).contains(end))
    }
}

impl FromIterator<Pin> for Pins {
    fn from_iter<I: IntoIterator<Item = Pin>>(pins: I) -> Pins {
        let mut all = Pins::default();
        for pin in pins {
            all.count += 1;
            let list = match &pin.about {
                About::Class(class) => all.by_class.entry(class.fingerprint()).or_default(),
                About::Named { op, .. } => all.by_op.entry(*op).or_default(),
            };
            list.push(pin);
        }
        all
    }
}
