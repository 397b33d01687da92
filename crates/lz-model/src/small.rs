//! A small call of the same kind: what a kernel is compared with the reference on.

use crate::catalog::{Catalog, Op};
use crate::param::{ParamRole, ParamType};
use crate::query::{MAX_DIMS, Query};
use crate::schema::{Dim, DimKey, DimKind};
use crate::shape::{Axis, ShapePattern};
use crate::spec::{CallSpec, ParamSpec, TensorSpec};

/// Sizes kernels are compiled for are left alone up to this.
const SMALL_ENOUGH: i64 = 128;
/// What whole numbers that are not at their default become: a window of 1000 keys does nothing to 6 keys.
const NUMBER: i64 = 2;

impl CallSpec {
    /// The call with every size as small as `accepts` allows, one dimension after the other. Lengths and batches of one
    /// grow, so that a kernel that mixes up rows is seen; equal lengths stay equal. `query` is the call, bound.
    ///
    /// Gives the call as it is where nothing smaller is accepted.
    pub fn small(&self, query: &Query, accepts: impl Fn(&CallSpec) -> bool) -> CallSpec {
        let op = Catalog::get().op(query.op());
        let mut shapes = Shapes { op, call: self, query, dims: *query.dims() };
        let mut best = self.clone();
        for together in shapes.moves() {
            for size in sizes(&op.schema().dims[together[0]], together[0], query.dim(together[0])) {
                let before = shapes.dims;
                together.iter().for_each(|&dim| shapes.dims[dim] = size);
                match shapes.call(&best).filter(|call| accepts(call)) {
                    Some(call) => {
                        best = call;
                        break;
                    }
                    None => shapes.dims = before,
                }
            }
        }
        for param in op.schema().params.iter().filter(|p| p.ty == ParamType::Int && p.role == ParamRole::Exact) {
            let mut call = best.clone();
            if let Some(value) =
                call.params.get_mut(param.name).filter(|v| matches!(v, ParamSpec::Int(n) if *n > NUMBER))
            {
                *value = ParamSpec::Int(NUMBER);
                best = if accepts(&call) { call } else { best };
            }
        }
        best
    }
}

/// The sizes to try for a dimension, the smallest first. Different dimensions get different ones, so that a kernel that
/// mixes up two of them is seen.
fn sizes(dim: &Dim, index: usize, now: i64) -> impl Iterator<Item = i64> {
    let first = match (dim.key, dim.kind) {
        (DimKey::Exact, DimKind::Heads | DimKind::KvHeads) => now,
        (DimKey::Exact, _) if now <= SMALL_ENOUGH => now,
        (DimKey::Exact, _) => 32 * (2 + index as i64 % 2),
        (_, DimKind::Batch) if dim.name == "rows" => 6,
        (_, DimKind::Batch) => 3,
        (_, DimKind::Seq) => 6,
        _ => 7 + index as i64,
    };
    let larger = (3..31).map(|power| 1i64 << power).filter(move |&size| size > first && size < now);
    std::iter::once(first).chain(larger).filter(move |&size| size != now)
}

/// A call whose dimensions are set anew.
struct Shapes<'a> {
    op: &'static Op,
    call: &'a CallSpec,
    query: &'a Query,
    dims: [i64; MAX_DIMS],
}

impl Shapes<'_> {
    /// The dimensions that may be set, in the order to do so: equal lengths together, shorter ones before longer ones.
    fn moves(&self) -> Vec<Vec<usize>> {
        let dims = self.op.schema().dims;
        let is_free = |&d: &usize| dims[d].derived.is_none() && self.op.dim_params[d].is_none();
        let (mut lengths, others): (Vec<usize>, Vec<usize>) =
            (0..dims.len()).filter(is_free).partition(|&d| dims[d].kind == DimKind::Seq);
        lengths.sort_by_key(|&d| self.query.dim(d));
        let equal = lengths.chunk_by(|&a, &b| self.query.dim(a) == self.query.dim(b)).map(<[usize]>::to_vec);
        equal.chain(others.into_iter().map(|d| vec![d])).collect()
    }

    /// The call with these dimensions; `None` where a tensor cannot have them.
    fn call(&self, best: &CallSpec) -> Option<CallSpec> {
        let mut call = best.clone();
        for (name, tensor) in &mut call.tensors {
            let index = self.op.input_index(name)?;
            let old = &self.call.tensors[name];
            let shape = self.shape(index, old)?;
            let strides = old.strides.as_ref().map(|strides| restrided(&old.shape, strides, &shape));
            *tensor = TensorSpec { dtype: old.dtype, shape, strides };
        }
        Some(call)
    }

    fn shape(&self, index: usize, old: &TensorSpec) -> Option<Vec<i64>> {
        let pattern = self.op.inputs[index].iter().find(|pattern| self.is_of(pattern, index, &old.shape))?;
        let rest = (old.shape.len() + 1).checked_sub(pattern.axes.len().max(1))?;
        let mut shape = Vec::with_capacity(old.shape.len());
        for axis in &pattern.axes {
            let size = old.shape.get(shape.len()).copied();
            match *axis {
                Axis::Dim(d) => shape.push(self.dims[d]),
                // An axis that is broadcast stays so.
                Axis::Broadcast(d) => {
                    shape.push(if size == Some(1) && self.query.dim(d) != 1 { 1 } else { self.dims[d] })
                }
                Axis::PlusOne(d) => shape.push(self.dims[d] + 1),
                Axis::Fixed(n) => shape.push(n),
                Axis::Rest(d) => shape.extend(leading(rest, self.dims[d])?),
            }
        }
        Some(shape)
    }

    /// Whether a tensor of the call has its shape by this alternative.
    fn is_of(&self, pattern: &ShapePattern, index: usize, shape: &[i64]) -> bool {
        let layout = self.query.tensor(index).layout();
        if pattern.layout.is_some_and(|tag| tag != layout) || !pattern.fits_rank(shape.len()) {
            return false;
        }
        let rest = shape.len() + 1 - pattern.axes.len().max(1);
        let mut at = 0;
        pattern.axes.iter().all(|axis| {
            let size = shape.get(at).copied();
            at += if matches!(axis, Axis::Rest(_)) { rest } else { 1 };
            match *axis {
                Axis::Dim(d) => size == Some(self.query.dim(d)),
                Axis::Broadcast(d) => size == Some(1) || size == Some(self.query.dim(d)),
                Axis::PlusOne(d) => size == Some(self.query.dim(d) + 1),
                Axis::Fixed(n) => size == Some(n),
                Axis::Rest(_) => true,
            }
        })
    }
}

/// So many leading axes whose product is a size.
fn leading(axes: usize, size: i64) -> Option<Vec<i64>> {
    match axes {
        0 => (size == 1).then(Vec::new),
        1 => Some(vec![size]),
        _ => {
            let outer = if size % 2 == 0 { 2 } else { 1 };
            let mut shape = vec![1; axes];
            (shape[0], shape[axes - 1]) = (outer, size / outer);
            Some(shape)
        }
    }
}

/// Strides for another shape that look like these: the same order of axes, gaps where there were some, the same axes
/// repeated.
fn restrided(shape: &[i64], strides: &[i64], new: &[i64]) -> Vec<i64> {
    let mut axes: Vec<usize> = (0..shape.len()).collect();
    axes.sort_by_key(|&axis| (strides[axis], std::cmp::Reverse(axis)));
    let mut restrided = vec![0; new.len()];
    let (mut dense, mut reach) = (1, 1);
    for axis in axes.into_iter().filter(|&axis| strides[axis] != 0) {
        // A gap is a gap at any size; what follows it begins behind it.
        let gap = if strides[axis] > dense { reach.max(1) } else { 0 };
        restrided[axis] = reach + gap;
        reach = restrided[axis] * new[axis].max(1);
        dense = strides[axis] * shape[axis].max(1);
    }
    restrided
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::BindRules;
    use crate::context::Context;
    use crate::ids::DeviceIx;
    use lz_abi::DType;

    fn bound(call: &CallSpec) -> Option<Query> {
        let named = call.named(DeviceIx(0), Context::default());
        Catalog::get().resolve(&call.op, &named, &BindRules::default(), |_| None).ok().map(|(_, bound)| bound.query)
    }

    fn small(call: &CallSpec) -> CallSpec {
        let query = bound(call).expect("a valid call");
        let class = query.proof_class();
        call.small(&query, |call| bound(call).is_some_and(|q| q.proof_class() == class))
    }

    #[test]
    fn every_size_shrinks_and_the_class_stays() {
        let call = CallSpec::new("norm.rms").tensor("input", DType::F32, &[4, 2048, 4096]).tensor(
            "weight",
            DType::F32,
            &[4096],
        );
        let small = small(&call);
        assert_eq!(small.tensors["input"].shape, [2, 3, 96]);
        assert_eq!(small.tensors["weight"].shape, [96]);
        assert_eq!(bound(&small).unwrap().proof_class(), bound(&call).unwrap().proof_class());
    }

    #[test]
    fn one_row_becomes_several() {
        let call = CallSpec::new("norm.rms").tensor("input", DType::F32, &[1, 64]);
        assert_eq!(small(&call).tensors["input"].shape, [6, 64]);
    }

    #[test]
    fn equal_lengths_stay_equal_and_windows_stay_felt() {
        let attention = |seq_q: i64, seq_k: i64| {
            CallSpec::new("attention.standard.prefill")
                .tensor("query", DType::Bf16, &[2, seq_q, 8, 64])
                .tensor("key", DType::Bf16, &[2, seq_k, 8, 64])
                .tensor("value", DType::Bf16, &[2, seq_k, 8, 64])
                .param("window_left", 1000)
                .layout(crate::layout::Layout::Bshd)
        };
        let equal = small(&attention(4096, 4096));
        assert_eq!(equal.tensors["query"].shape, [3, 6, 8, 64]);
        assert_eq!(equal.tensors["key"].shape, [3, 6, 8, 64]);
        assert_eq!(equal.params["window_left"], ParamSpec::Int(2));
        let longer = small(&attention(512, 4096));
        assert_eq!(longer.tensors["query"].shape[1], 6);
        assert!(longer.tensors["key"].shape[1] > 6);
    }

    #[test]
    fn what_is_not_accepted_stays() {
        let call = CallSpec::new("norm.rms").tensor("input", DType::F32, &[512, 4096]);
        let query = bound(&call).unwrap();
        let multiple = |call: &CallSpec| bound(call).is_some_and(|q| q.dim(0) % 4 == 0 && q.dim(1) >= 1000);
        assert_eq!(call.small(&query, multiple).tensors["input"].shape, [8, 1024]);
        assert_eq!(call.small(&query, |_| false), call);
    }

    #[test]
    fn strides_keep_their_looks() {
        // Transposed, with gaps, and repeated.
        assert_eq!(restrided(&[64, 32], &[1, 64], &[6, 4]), [1, 6]);
        assert_eq!(restrided(&[64, 32], &[128, 1], &[6, 4]), [8, 1]);
        assert_eq!(restrided(&[64, 32], &[0, 1], &[6, 4]), [0, 1]);
        assert_eq!(restrided(&[64, 32], &[64, 2], &[6, 4]), [8, 2]);
    }
}
