//! Kernels of the catalog's operations: legal or not, and in which order, is what selection says.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use lz_abi::{DType, Param};
use lz_cpu::Builtin;
use lz_cpu::primitives::Primitive;
use lz_model::{BindRules, Catalog, Layout, NamedCall, ParamValue};
use lz_select::{Snapshot, SnapshotSpec};

use super::sequence::Sequence;
use super::{Arg, Bound, Candidate, Site, doubles};
use crate::exec::kernel::Kernel;
use crate::ops::elements::axis_of;
use crate::ops::gated::{Gated, GatedKind};
use crate::ops::layer_norm::LayerNorm;
use crate::ops::rms_norm::RmsNorm;
use crate::ops::softmax::Softmax;

/// Operations whose native kernels have conditions on sizes that only say where torch's kernels are faster.
const BEHIND_TORCH: [&str; 2] = ["norm.layer", "activation.silu_mul"];

/// The native kernels on this processor.
struct Bench {
    snapshot: Snapshot,
    /// By id and operation.
    kernels: HashMap<(String, String), Builtin>,
}

static BENCH: LazyLock<Bench> = LazyLock::new(|| {
    let mut spec = SnapshotSpec { devices: vec![lz_hardware::detect_cpu()], ..SnapshotSpec::default() };
    spec.backend(lz_cpu::backend());
    let mut kernels = HashMap::new();
    for (kernel, mut descriptor) in lz_cpu::descriptors() {
        // Sizes for which torch's kernels are ahead: a graph does not have those.
        if BEHIND_TORCH.contains(&descriptor.operation.as_str()) {
            descriptor.conditions.clear();
        }
        kernels.insert((descriptor.id.clone(), descriptor.operation.clone()), kernel);
        spec.kernels.push(Arc::new(descriptor));
    }
    let snapshot = spec.build(0).expect("the built-in kernels make a snapshot: lz-cpu's tests hold that");
    Bench { snapshot, kernels }
});

/// A call of an operation of the catalog.
pub struct Call<'a> {
    /// The operation, or an alias.
    pub op: &'static str,
    /// What it reads, by name.
    pub inputs: &'a [(&'static str, Option<&'a Arg>)],
    /// Parameters by name.
    pub params: &'a [(&'static str, ParamValue)],
    /// The layout of its tensors, where the operation has named ones.
    pub layout: Option<Layout>,
    /// What it makes, row-major.
    pub output: &'a Arg,
}

impl Call<'_> {
    /// The kernels that take it, in the order selection ranks them.
    pub fn candidates(&self, site: &Site<'_>) -> Vec<Candidate> {
        let given = self.inputs.iter().filter_map(|&(name, arg)| Some((name, arg?)));
        let named = NamedCall {
            inputs: given.clone().map(|(name, arg)| (name, arg.meta())).collect(),
            params: self.params.to_vec(),
            layout: self.layout,
            ..NamedCall::new()
        };
        if !self.output.is_row_major() {
            return Vec::new();
        }
        let bench = &*BENCH;
        let device = |ix| bench.snapshot.device(ix);
        let Ok((ordered, bound)) = Catalog::get().resolve(self.op, &named, &BindRules::default(), device) else {
            return Vec::new();
        };
        let op = Catalog::get().op(bound.query.op());
        let Ok((params, made)) = op.settled(&named, &ordered, &bound.query) else { return Vec::new() };
        let fits = made.first().is_some_and(|one| one.dtype == self.output.dtype && one.shape == self.output.shape);
        if !fits || made.len() > 1 {
            return Vec::new();
        }
        let mut inputs = vec![None; op.schema().inputs.len()];
        for (name, arg) in given {
            inputs[op.input_index(name).expect("the call was resolved")] = Some(arg.clone());
        }
        let decision = bench.snapshot.select(&bound.query);
        let mut legal: Vec<_> =
            decision.ranked().filter(|candidate| candidate.accepted() && candidate.transforms.is_empty()).collect();
        let within = |set: &String| site.terms.level.allows(set);
        legal.retain(|candidate| bench.snapshot.kernel(candidate.kernel).instruction_sets.iter().all(within));
        if let Some(ranked) = site.terms.ranking.ranked(self.op, &named) {
            let place = |id: &str| ranked.iter().position(|one| one.split('@').next() == Some(id));
            legal.retain(|candidate| place(&bench.snapshot.kernel(candidate.kernel).id).is_some());
            legal.sort_by_key(|candidate| place(&bench.snapshot.kernel(candidate.kernel).id));
        }
        legal
            .into_iter()
            .map(|candidate| {
                let descriptor = bench.snapshot.kernel(candidate.kernel);
                let kernel = bench.kernels[&(descriptor.id.clone(), descriptor.operation.clone())];
                Candidate {
                    name: descriptor.id.clone(),
                    calls: vec![Bound {
                        kernel: Kernel::Builtin(kernel, Box::new(bound.query)),
                        inputs: inputs.clone(),
                        outputs: vec![self.output.clone()],
                        params: params.iter().map(|&value| value.into()).collect(),
                        dims: bound.query.dims().to_vec(),
                        scratch: bench.snapshot.workspace(candidate.kernel, &bound.query).max(0) as usize,
                        reserved: 0,
                    }],
                    in_place: &[],
                }
            })
            .collect()
    }
}

/// Softmax: over another axis than the last one of a copy with that axis last, of halves of a copy in float32.
pub(super) fn softmax(site: &Site<'_>, op: &Softmax) -> Vec<Candidate> {
    let rank = site.output.shape.len();
    let axis = axis_of(op.axis, rank);
    let axes: Vec<usize> = (0..rank).filter(|&other| other != axis).chain([axis]).collect();
    let (x, y) = (site.need(0).permuted(&axes), site.output.permuted(&axes));
    // Native kernels compute halves as float32.
    let narrow = matches!(x.dtype, DType::F16 | DType::Bf16);
    if axis + 1 == rank && !narrow {
        return rows_softmax(site, &x, &y);
    }
    // Axes of one element may go anywhere.
    let plain = |arg: &Arg| Arg { strides: lz_abi::row_major(&arg.shape), ..arg.clone() };
    if x.is_row_major() && y.is_row_major() && !narrow {
        return rows_softmax(site, &plain(&x), &plain(&y));
    }
    let (dtype, copy) = if narrow { (DType::F32, Primitive::Cast) } else { (x.dtype, Primitive::Copy) };
    let mut sequence = Sequence::new(site.terms);
    let (from, to) = (sequence.scratch(dtype, &x.shape), sequence.scratch(dtype, &x.shape));
    sequence.before(copy, vec![Some(x)], &from, Vec::new());
    sequence.after(copy, vec![Some(to.clone())], &y, Vec::new());
    sequence.around(rows_softmax(site, &from, &to), if narrow { "cast" } else { "permuted" })
}

/// Softmax over the last axis.
fn rows_softmax(site: &Site<'_>, input: &Arg, output: &Arg) -> Vec<Candidate> {
    if output.dtype == DType::F64 {
        return doubles::rows(site, Primitive::Softmax, &[Some(input)], output, Vec::new());
    }
    let inputs = [("input", Some(input))];
    Call { op: "activation.softmax", inputs: &inputs, params: &[], layout: None, output }.candidates(site)
}

/// A normalization of the last axis.
pub(super) fn layer_norm(site: &Site<'_>, op: &LayerNorm) -> Vec<Candidate> {
    if site.output.dtype == DType::F64 {
        let inputs = [0, 1, 2].map(|at| site.get(at));
        return doubles::rows(site, Primitive::LayerNorm, &inputs, site.output, vec![Param::Float(op.eps)]);
    }
    let inputs = [("input", site.get(0)), ("weight", site.get(1)), ("bias", site.get(2))];
    let params = [("eps", ParamValue::Float(op.eps))];
    Call { op: "norm.layer", inputs: &inputs, params: &params, layout: None, output: site.output }.candidates(site)
}

/// A normalization by the root mean square.
pub(super) fn rms_norm(site: &Site<'_>, op: &RmsNorm) -> Vec<Candidate> {
    if site.output.dtype == DType::F64 {
        let inputs = [0, 1].map(|at| site.get(at));
        return doubles::rows(site, Primitive::RmsNorm, &inputs, site.output, vec![Param::Float(op.eps)]);
    }
    let inputs = [("input", site.get(0)), ("weight", site.get(1))];
    let params = [("eps", ParamValue::Float(op.eps))];
    Call { op: "norm.rms", inputs: &inputs, params: &params, layout: None, output: site.output }.candidates(site)
}

/// SiLU of a gate times another tensor. Other gates are made of primitives.
pub(super) fn gated(site: &Site<'_>, op: &Gated) -> Vec<Candidate> {
    // Of float64 the catalog has only a reference.
    if op.kind != GatedKind::SiluMul || site.output.dtype == DType::F64 {
        return Vec::new();
    }
    let inputs = [("gate", site.get(0)), ("up", site.get(1))];
    Call { op: "activation.silu_mul", inputs: &inputs, params: &[], layout: None, output: site.output }.candidates(site)
}

/// Rows of a table.
pub(super) fn embedding(site: &Site<'_>) -> Vec<Candidate> {
    let inputs = [("weight", site.get(0)), ("indices", site.get(1))];
    Call { op: "embedding.lookup", inputs: &inputs, params: &[], layout: None, output: site.output }.candidates(site)
}
