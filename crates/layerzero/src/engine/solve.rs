//! Making a table: the calls of a workload, decided bucket by bucket.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use lz_model::{CallSpec, Catalog, DeviceIx, Query, Reason};
use lz_select::Snapshot;

use super::Engine;
use super::decide::{DecidedCall, decide_call};
use crate::core::Scope;
use crate::documents::{BucketPlan, Buckets, DispatchTable, Fallback, PlannedOp, Ranges, SCHEMA_VERSION, call_order};
use crate::error::Error;

/// What to make a table of.
#[derive(Clone, Debug, Default)]
pub struct SolveRequest {
    /// What to call the workload.
    pub model_id: String,
    /// The device.
    pub device: DeviceIx,
    /// The buckets.
    pub buckets: Buckets,
    /// The calls of the workload. Of several in one bucket the largest decides for it.
    pub calls: Vec<CallSpec>,
}

/// Calls of one bucket for which different kernels would be best.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Disagreement {
    /// The operation.
    pub op: String,
    /// The bucket.
    pub bucket: BTreeMap<String, i64>,
    /// The kernel that was taken: that of the largest call.
    pub taken: String,
    /// The kernels of the others.
    pub others: Vec<String>,
}

/// A table, and what did not fit into it.
#[derive(Debug)]
pub struct Solved {
    /// The table.
    pub table: DispatchTable,
    /// Calls above the last bucket, by their number: selected for at run time.
    pub outside: Vec<(usize, Reason)>,
    /// Calls that cannot be made or served, by their number.
    pub impossible: Vec<(usize, Error)>,
    /// Buckets that are too wide for one kernel.
    pub disagreements: Vec<Disagreement>,
}

/// The calls that share a bucket and a class.
struct Group {
    class: Query,
    ranges: Ranges,
    calls: Vec<DecidedCall>,
}

impl Engine {
    /// [`Engine::solve_in`], outside of any context.
    pub fn solve(&self, request: &SolveRequest) -> Result<Solved, Error> {
        self.solve_in(&self.process(), request)
    }

    /// Decides for every call of a workload in a scope, and makes a table of it. Lockfiles and tables in force are left
    /// aside.
    pub fn solve_in(&self, scope: &Scope<'_>, request: &SolveRequest) -> Result<Solved, Error> {
        let fresh = self.fresh(scope, true)?;
        let snapshot = fresh.snapshot();
        let device = snapshot.device(request.device).ok_or(Error::UnknownDevice(request.device.0))?;
        let (mut outside, mut impossible) = (Vec::new(), Vec::new());
        let mut groups: HashMap<u64, Vec<Group>> = HashMap::new();
        for (i, call) in request.calls.iter().enumerate() {
            let decided = match decide_call(&fresh, call, request.device) {
                Ok(decided) => decided,
                Err(error) => {
                    impossible.push((i, error));
                    continue;
                }
            };
            match request.buckets.ranges(Catalog::get().op(decided.query.op()), &decided.query) {
                Ok(ranges) => join(&mut groups, ranges, decided),
                Err(above) => {
                    outside.push((i, Reason::PlanBucketMiss { dim: above.dim.to_owned(), found: above.size }));
                }
            }
        }
        let mut table = DispatchTable {
            schema_version: SCHEMA_VERSION.to_owned(),
            model_id: request.model_id.clone(),
            hardware_signature: device.signature(),
            layerzero_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            capabilities: BTreeMap::new(),
            shape_buckets: request.buckets.clone(),
            plans: Vec::new(),
            fallback: Fallback::default(),
        };
        let mut plans: BTreeMap<BTreeMap<String, i64>, BucketDraft> = BTreeMap::new();
        let mut disagreements = Vec::new();
        for mut group in groups.into_values().flatten() {
            group.calls.sort_by_cached_key(|call| (Reverse(*call.query.dims()), call.call.to_string()));
            let first = &group.calls[0];
            let bucket = request.buckets.label(Catalog::get().op(first.query.op()), &first.query);
            disagreements.extend(disagreement(&group.calls, &bucket));
            plans.entry(bucket).or_default().take(&mut table, snapshot, first);
        }
        disagreements.sort_by(|a, b| (&a.op, &a.bucket, &a.taken).cmp(&(&b.op, &b.bucket, &b.taken)));
        table.plans = plans.into_iter().map(|(bucket, plan)| plan.finish(bucket)).collect();
        Ok(Solved { table, outside, impossible, disagreements })
    }
}

fn join(groups: &mut HashMap<u64, Vec<Group>>, ranges: Ranges, decided: DecidedCall) {
    let class = decided.query.pinned_class();
    let alike = groups.entry(class.fingerprint()).or_default();
    match alike.iter_mut().find(|group| group.class == class && group.ranges == ranges) {
        Some(group) => group.calls.push(decided),
        None => alike.push(Group { class, ranges, calls: vec![decided] }),
    }
}

fn disagreement(calls: &[DecidedCall], bucket: &BTreeMap<String, i64>) -> Option<Disagreement> {
    let taken = &calls[0].decided.kernel.id;
    let others: BTreeSet<&String> =
        calls.iter().map(|call| &call.decided.kernel.id).filter(|id| *id != taken).collect();
    (!others.is_empty()).then(|| Disagreement {
        op: calls[0].call.op.clone(),
        bucket: bucket.clone(),
        taken: taken.clone(),
        others: others.into_iter().cloned().collect(),
    })
}

/// The plan of a bucket, in the making.
#[derive(Default)]
struct BucketDraft {
    ops: Vec<PlannedOp>,
    compiled: BTreeSet<String>,
}

impl BucketDraft {
    fn take(&mut self, table: &mut DispatchTable, snapshot: &Snapshot, call: &DecidedCall) {
        let captured = call.captured.as_ref().map(|(_, decided)| (true, decided));
        for (graph, decided) in [(false, &call.decided)].into_iter().chain(captured) {
            let kernel = &decided.kernel;
            let backend = snapshot.spec().backends.get(&kernel.backend).map(|backend| &backend.descriptor);
            if let Some(backend) = backend.filter(|backend| !backend.capabilities_hash.is_empty()) {
                table.capabilities.insert(backend.name.clone(), backend.capabilities_hash.clone());
            }
            if kernel.jit {
                self.compiled.insert(format!("{}@{}", kernel.id, kernel.version));
            }
            self.ops.push(PlannedOp {
                op: call.call.op.clone(),
                kernel_id: kernel.id.clone(),
                version: Some(kernel.version.clone()),
                call: Some(call.call.clone()),
                graph,
                time_us: decided.time_us,
                basis: Some(decided.basis.to_owned()),
            });
        }
    }

    fn finish(mut self, bucket: BTreeMap<String, i64>) -> BucketPlan {
        self.ops.sort_by_cached_key(|planned| (planned.call.as_ref().map(call_order), planned.graph));
        BucketPlan { bucket, ops: self.ops, jit_artifacts: self.compiled.into_iter().collect() }
    }
}
