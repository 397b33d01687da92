//! Which kernels are proven inside CUDA graphs, and at which sizes.
//!
//! A proof is a capture and a replay of one call. It covers the calls of the same class whose sizes lie in the same *proof
//! cell*: between the same thresholds of the schema's buckets and of every constraint, with the same divisibility. Kernels
//! choose tiles, splits and workspaces by size, so that a replay at one size says nothing of another cell. The cells of
//! decisions are finer: there a measured size is a cell of its own, which says something of its time and not of its safety.

use std::collections::{BTreeSet, HashMap};

use lz_model::{Catalog, Facts, GraphDoubt, KernelDescriptor, MAX_DIMS, Query};

use crate::proof::KernelVersion;
use crate::snapshot::Snapshot;

/// Whether sizes lie in the proof cell of the call that is asked about.
pub type Covers<'a> = &'a dyn Fn(&[i64; MAX_DIMS]) -> bool;

/// How one capture of this process came out.
#[derive(Clone, Debug, PartialEq)]
struct Capture {
    /// The class of the call, with its sizes.
    call: Query,
    outcome: Result<(), GraphDoubt>,
}

/// What captures of this process showed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Captures(HashMap<KernelVersion, Vec<Capture>>);

/// The key a capture is stored under: the call's class inside a graph, and its sizes.
fn key(query: &Query) -> Query {
    query.captured().class().with_threads(0).with_dims(*query.dims())
}

impl Captures {
    /// A kernel was captured and replayed for a call. The last outcome at a size counts.
    pub fn note(&mut self, kernel: &KernelDescriptor, query: &Query, outcome: Result<(), GraphDoubt>) {
        let known = self.0.entry((kernel.id.clone(), kernel.version.clone())).or_default();
        let call = key(query);
        known.retain(|capture| capture.call != call);
        known.push(Capture { call, outcome });
    }

    /// Forgets what went wrong: those kernels are captured again.
    pub fn forget_failures(&mut self) {
        self.0.values_mut().for_each(|known| known.retain(|capture| capture.outcome.is_ok()));
    }

    /// Forgets a kernel whose code is removed.
    pub fn forget(&mut self, kernel: &KernelVersion) {
        self.0.remove(kernel);
    }

    /// What is known of a kernel for a call. A failure anywhere in the cell counts more than a success elsewhere in it.
    fn outcome(&self, kernel: &KernelDescriptor, query: &Query, covers: Covers<'_>) -> Option<Result<(), &GraphDoubt>> {
        if self.0.is_empty() {
            return None;
        }
        let class = key(query).class();
        let known = self.0.get(&(kernel.id.clone(), kernel.version.clone()))?;
        let mut here = known.iter().filter(|c| c.call.class() == class && covers(c.call.dims()));
        let first = here.next()?;
        let failed = std::iter::once(first).chain(here).find_map(|c| c.outcome.as_ref().err());
        Some(failed.map_or(Ok(()), Err))
    }

    fn proven(&self) -> impl Iterator<Item = &KernelVersion> {
        self.0.iter().filter(|(_, known)| known.iter().any(|c| c.outcome.is_ok())).map(|(kernel, _)| kernel)
    }
}

impl Snapshot {
    /// Why a kernel is not taken for safe in a graph, for a call that is captured; `None` when it is, and outside of
    /// captures. `strict`: only a proof counts. One that is not declared safe has that reason, and no other.
    pub fn graph_doubt(&self, kernel: &KernelDescriptor, query: &Query, strict: bool) -> Option<GraphDoubt> {
        if !query.context().capturing || !kernel.graph_safe {
            return None;
        }
        let (cells, device) = (&self.proof_cells[query.op().0 as usize], self.device(query.device())?);
        let here = cells.key(query);
        let covers = |dims: &[i64; MAX_DIMS]| cells.key(&query.with_dims(*dims)).dims() == here.dims();
        let facts = Facts { op: Catalog::get().op(query.op()), query, device };
        match self.spec.proofs.captures().outcome(kernel, query, &covers) {
            Some(Err(doubt)) => Some(doubt.clone()),
            Some(Ok(())) => None,
            None if strict && !self.spec.perf.proven_in_graphs(kernel, &facts, &covers) => Some(GraphDoubt::Unproven),
            None => None,
        }
    }

    /// How many kernels are proven in graphs, at some size: by captures of this process, and by measurements.
    pub fn proven_in_graphs(&self) -> usize {
        let measured = self.spec.perf.graph_proofs();
        let captured = self.spec.proofs.captures().proven();
        captured.chain(&measured).collect::<BTreeSet<_>>().len()
    }
}
