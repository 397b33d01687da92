//! What kernels that are compiled on first use are ready for.

use std::collections::HashMap;

use lz_model::Query;

/// What kernels that are compiled on first use have been compiled for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Warm {
    by_kernel: HashMap<String, Vec<Query>>,
}

impl Warm {
    /// Remembers that a kernel is ready for calls like one.
    pub fn insert(&mut self, kernel: &str, query: &Query) {
        let class = query.compiled_class();
        let known = self.by_kernel.entry(kernel.to_owned()).or_default();
        if !known.contains(&class) {
            known.push(class);
        }
    }

    /// Whether a kernel is ready for a call.
    pub fn contains(&self, kernel: &str, query: &Query) -> bool {
        self.by_kernel.get(kernel).is_some_and(|known| known.contains(&query.compiled_class()))
    }

    /// How many pairs of a kernel and a kind of call there are.
    pub fn len(&self) -> usize {
        self.by_kernel.values().map(Vec::len).sum()
    }

    /// Whether nothing was compiled.
    pub fn is_empty(&self) -> bool {
        self.by_kernel.is_empty()
    }
}
