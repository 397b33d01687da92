//! A graph for any sizes: compiled for each exact shape at its first use.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use lz_abi::DType;
use lz_abi::program::{Arenas, External};

use super::binding::Packs;
use super::compiled::{Compiled, ExecError, Options};
use super::interpreted::bind;
use super::kernel::Host;
use crate::ir::Graph;

/// A graph compiled for some shapes.
struct Entry {
    /// The sizes of all inputs, one after the other. Ranks are the graph's.
    sizes: Box<[i64]>,
    compiled: Arc<Compiled>,
    used: AtomicU64,
}

/// A graph, and what it was compiled to for the shapes seen last.
///
/// Plans of all shapes share packed weights and arenas, so their memory is that of the largest.
pub struct Session {
    graph: Graph,
    options: Options,
    entries: RwLock<Vec<Entry>>,
    /// Held while a plan is made, so that two callers do not make the same.
    making: Mutex<()>,
    most: usize,
    clock: AtomicU64,
}

/// Plans that are kept.
const MOST_PLANS: usize = 32;

impl Session {
    /// Of a graph that is optimised already.
    pub fn new(graph: Graph, options: Options) -> Session {
        Session::keeping(graph, options, MOST_PLANS)
    }

    /// Keeps so many plans: those used last.
    pub fn keeping(graph: Graph, options: Options, most: usize) -> Session {
        let (entries, making, clock) = (RwLock::default(), Mutex::default(), AtomicU64::new(0));
        Session { graph, options, entries, making, most: most.max(1), clock }
    }

    /// The graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The packed weights its plans share.
    pub fn packs(&self) -> &Arc<Packs> {
        &self.options.packs
    }

    /// Bytes of packed weights.
    pub fn packed_bytes(&self) -> usize {
        self.options.packs.bytes()
    }

    /// The arenas its plans share.
    pub fn arenas(&self) -> &Arc<Arenas> {
        &self.options.arenas
    }

    /// How many plans there are.
    pub fn plans(&self) -> usize {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The plan for inputs of these element types and sizes. It is made where there is none.
    pub fn compiled(&self, inputs: &[(DType, &[i64])]) -> Result<Arc<Compiled>, ExecError> {
        if let Some(found) = self.find(inputs) {
            return Ok(found);
        }
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = self.find(inputs) {
            return Ok(found);
        }
        let symbols = bind(&self.graph, inputs)?;
        let compiled = Arc::new(Compiled::new(&self.graph, &symbols, &self.options)?);
        let sizes = inputs.iter().flat_map(|(_, shape)| shape.iter().copied()).collect();
        let entry = Entry { sizes, compiled: compiled.clone(), used: AtomicU64::new(self.now()) };
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= self.most {
            let oldest = (0..entries.len()).min_by_key(|&at| entries[at].used.load(Ordering::Relaxed));
            oldest.map(|at| entries.swap_remove(at));
        }
        entries.push(entry);
        Ok(compiled)
    }

    /// The plan for inputs of these element types and sizes, if there is one.
    pub fn planned(&self, inputs: &[(DType, &[i64])]) -> Option<Arc<Compiled>> {
        self.find(inputs)
    }

    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    fn find(&self, inputs: &[(DType, &[i64])]) -> Option<Arc<Compiled>> {
        let graph = &self.graph;
        let known = inputs.len() == graph.inputs.len()
            && inputs.iter().zip(&graph.inputs).all(|((dtype, shape), &input)| {
                let meta = graph.meta(input);
                meta.dtype == *dtype && meta.rank() == shape.len()
            });
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let sizes = || inputs.iter().flat_map(|(_, shape)| shape.iter());
        let found = entries.iter().find(|entry| known && entry.sizes.iter().eq(sizes()))?;
        found.used.store(self.now(), Ordering::Relaxed);
        Some(found.compiled.clone())
    }

    /// Runs the graph. `externals` are its inputs, to be written where the graph updates them, then memory for its outputs;
    /// the sizes of these are [`Compiled::slots`] of [`Session::compiled`].
    pub fn run(&self, externals: &mut [External<'_>], host: &dyn Host) -> Result<(), ExecError> {
        let count = self.graph.inputs.len().min(externals.len());
        let inputs: smallvec::SmallVec<[(DType, &[i64]); 8]> =
            externals[..count].iter().map(|one| (one.dtype(), one.shape())).collect();
        let compiled = self.compiled(&inputs)?;
        drop(inputs);
        compiled.run_with(externals, host)
    }
}
