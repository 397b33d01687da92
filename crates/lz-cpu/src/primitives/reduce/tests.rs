//! Sums and the like against float64.

use lz_abi::{DType, Param, Tensor, TensorView, indices};
use proptest::prelude::*;

use super::super::Primitive;
use super::super::checking::{agree, drawn, fails, results};
use super::ReduceOp;

fn exact(op: ReduceOp, numbers: &[f64]) -> f64 {
    let nan = numbers.iter().any(|x| x.is_nan());
    match op {
        ReduceOp::Sum => numbers.iter().sum(),
        ReduceOp::Mean => numbers.iter().sum::<f64>() / numbers.len() as f64,
        ReduceOp::Prod => numbers.iter().product(),
        ReduceOp::Max | ReduceOp::Min if nan => f64::NAN,
        ReduceOp::Max => numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        ReduceOp::Min => numbers.iter().copied().fold(f64::INFINITY, f64::min),
        ReduceOp::Any => f64::from(u8::from(numbers.iter().any(|&x| x != 0.0))),
        ReduceOp::All => f64::from(u8::from(numbers.iter().all(|&x| x != 0.0))),
    }
}

/// The elements of x that become one result, in row-major order.
fn elements(x: &TensorView<'_>, gone: &[bool], at: &[i64]) -> Vec<f64> {
    let inside: Vec<i64> = x.shape().iter().zip(gone).map(|(&n, &gone)| if gone { n } else { 1 }).collect();
    indices(&inside)
        .map(|i| {
            x.get(&i.iter().zip(at).zip(gone).map(|((i, at), gone)| if *gone { *i } else { *at }).collect::<Vec<_>>())
        })
        .collect()
}

fn sizes() -> impl Strategy<Value = Vec<i64>> {
    let n = prop_oneof![6 => 1i64..5, 2 => 15i64..20, 1 => 62i64..67, 1 => 510i64..515, 1 => Just(0i64)];
    proptest::collection::vec(n, 1..4).prop_filter("not too many", |sizes| sizes.iter().product::<i64>() < 40_000)
}

/// x, the result's shape for each index with the axes kept, and the parameters that name the axes.
fn kept(shape: &[i64], gone: &[bool]) -> Vec<i64> {
    shape.iter().zip(gone).map(|(&n, &gone)| if gone { 1 } else { n }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn axes_are_reduced(
        (shape, bits, keep, turned, seed) in (sizes(), 0u8..8, any::<bool>(), any::<bool>(), any::<u32>()),
        op in proptest::sample::select(ReduceOp::ALL),
        dtype in proptest::sample::select(&[DType::F32, DType::F64, DType::Bf16, DType::F16, DType::I64, DType::I32, DType::Bool, DType::U8][..]),
    ) {
        let rank = shape.len();
        let gone: Vec<bool> = (0..rank).map(|i| bits == 0 || bits >> i & 1 == 1).collect();
        prop_assume!(gone.contains(&true));
        let truth = matches!(op, ReduceOp::Any | ReduceOp::All);
        let float = dtype.is_float();
        prop_assume!(op != ReduceOp::Mean || float);
        let size = if dtype == DType::Bool { 0.7 } else if float { 1.0 } else { 3.0 };
        let x = drawn(dtype, &shape, size, seed.into());
        let positive = if dtype == DType::U8 { x.to_f64().iter().map(|x| x.abs()).collect() } else { x.to_f64() };
        let positive = if op == ReduceOp::Prod && !float { vec![1.0; positive.len()] } else { positive };
        let x = Tensor::from_f64(dtype, &shape, &positive);
        let to = if truth { DType::Bool } else if float { dtype } else { DType::I64 };
        let whole = kept(&shape, &gone);
        let lists: Vec<Vec<f64>> = indices(&whole).map(|at| elements(&x.view(), &gone, &at)).collect();
        prop_assume!(!(matches!(op, ReduceOp::Max | ReduceOp::Min) && lists.iter().any(Vec::is_empty)));
        let wanted: Vec<f64> = lists.iter().map(|list| exact(op, list)).collect();
        let out: Vec<i64> = if keep { whole } else {
            shape.iter().zip(&gone).filter(|(_, gone)| !**gone).map(|(&n, _)| n).collect()
        };
        let named = (0..rank).filter(|&i| gone[i]).map(|i| Param::Int(i as i64 - if keep { rank as i64 } else { 0 }));
        let mut params = vec![op.param()];
        if bits != 0 {
            params.extend(named);
        }
        let order: Vec<usize> = (0..rank).rev().collect();
        let copy = x.view().permuted(&order).to_tensor();
        let strides: Vec<i64> = copy.view().strides().iter().rev().copied().collect();
        let view = if turned { TensorView::strided(dtype, &shape, &strides, 0, copy.bytes()).unwrap() } else { x.view() };
        let blank = Tensor::from_f64(to, &out, &vec![1.0; wanted.len()]);
        for (set, got) in results(Primitive::Reduce, &[Some(view)], &params, &blank) {
            let exact = truth || !float || matches!(op, ReduceOp::Max | ReduceOp::Min);
            // A sum near zero is off by what its parts round: 6e-8 of each.
            let parts = lists.iter().map(|list| list.iter().map(|x| x.abs()).sum::<f64>()).fold(0.0, f64::max);
            let (off, beside) = if exact { (0.0, 0.0) } else { (1e-6, 1e-6 + 1.2e-7 * parts) };
            agree(&format!("{} {dtype} {set:?} {shape:?} {gone:?}", op.name()), &got, &wanted, off, beside);
        }
    }

    #[test]
    fn places_are_found(
        (shape, axis, keep, smallest, seed) in (sizes(), proptest::option::of(0usize..3), any::<bool>(), any::<bool>(), any::<u32>()),
        (dtype, nan) in (proptest::sample::select(&[DType::F32, DType::F64, DType::Bf16, DType::I64, DType::I32, DType::U8][..]), any::<bool>()),
    ) {
        prop_assume!(!shape.contains(&0));
        let rank = shape.len();
        let gone: Vec<bool> = (0..rank).map(|i| axis.is_none_or(|axis| axis % rank == i)).collect();
        // Few numbers, so that many are equal.
        let mut numbers: Vec<f64> = drawn(DType::F64, &shape, 4.0, seed.into()).to_f64().iter().map(|x| x.round().abs()).collect();
        if nan && dtype.is_float() {
            let at = seed as usize % numbers.len();
            numbers[at] = f64::NAN;
        }
        let x = Tensor::from_f64(dtype, &shape, &numbers);
        let beats = |x: f64, best: f64| !best.is_nan() && (x.is_nan() || if smallest { x < best } else { x > best });
        let whole = kept(&shape, &gone);
        let wanted: Vec<f64> = indices(&whole)
            .map(|at| {
                let list = elements(&x.view(), &gone, &at);
                (1..list.len()).fold(0, |best, i| if beats(list[i], list[best]) { i } else { best }) as f64
            })
            .collect();
        let out: Vec<i64> = if keep { whole } else {
            shape.iter().zip(&gone).filter(|(_, gone)| !**gone).map(|(&n, _)| n).collect()
        };
        let op = if smallest { ReduceOp::Min } else { ReduceOp::Max };
        let params = [op.param(), axis.map_or(Param::None, |axis| Param::Int((axis % rank) as i64))];
        for to in [DType::I64, DType::I32] {
            for (set, got) in results(Primitive::ArgReduce, &[Some(x.view())], &params, &Tensor::zeros(to, &out)) {
                agree(&format!("{} {dtype} {set:?}", op.name()), &got, &wanted, 0.0, 0.0);
            }
        }
    }

    #[test]
    fn sums_run(
        (shape, axis, own, seed) in (sizes(), 0usize..3, any::<bool>(), any::<u32>()),
        dtype in proptest::sample::select(&[DType::F32, DType::F64, DType::Bf16, DType::I64, DType::Bool][..]),
    ) {
        let axis = axis % shape.len();
        let x = drawn(dtype, &shape, if dtype == DType::Bool { 0.7 } else { 2.0 }, seed.into());
        let to = if dtype == DType::Bool { DType::I64 } else { dtype };
        let wanted: Vec<f64> = indices(&shape)
            .map(|at| (0..=at[axis]).map(|i| { let mut at = at.to_vec(); at[axis] = i; x.view().get(&at) }).sum())
            .collect();
        let own = own && to == dtype;
        let (input, blank) = if own { (None, x.clone()) } else { (Some(x.view()), Tensor::zeros(to, &shape)) };
        for (set, got) in results(Primitive::Cumsum, &[input], &[Param::Int(axis as i64)], &blank) {
            let off = if dtype.is_float() { 1e-7 } else { 0.0 };
            agree(&format!("{dtype} {set:?}"), &got, &wanted, off, off * 1e-3);
        }
    }
}

#[test]
fn long_sums_keep_their_precision() {
    let n = 3_000_000;
    let x = Tensor::from_f64(DType::F32, &[n], &vec![0.1; n as usize]);
    let wanted = f64::from(0.1f32) * n as f64;
    for (set, got) in
        results(Primitive::Reduce, &[Some(x.view())], &[ReduceOp::Sum.param()], &Tensor::zeros(DType::F32, &[]))
    {
        agree(&format!("{set:?}"), &got, &[wanted], 1e-6, 0.0);
    }
}

#[test]
fn calls_that_make_no_sense_are_refused() {
    let (x, none) = (drawn(DType::F32, &[2, 3], 1.0, 1), Tensor::zeros(DType::F32, &[2, 0]));
    let whole = drawn(DType::I64, &[2, 3], 4.0, 1);
    let (row, one) = (Tensor::zeros(DType::F32, &[2]), Tensor::zeros(DType::I64, &[2]));
    let of = |op: ReduceOp, axis: i64| [op.param(), Param::Int(axis)];
    fails(Primitive::Reduce, &[Some(none.view())], &of(ReduceOp::Max, 1), &row, "max of no elements");
    fails(Primitive::ArgReduce, &[Some(none.view())], &of(ReduceOp::Max, 1), &one, "of no elements");
    fails(Primitive::ArgReduce, &[Some(x.view())], &of(ReduceOp::Sum, 1), &one, "does not give");
    fails(Primitive::Reduce, &[Some(x.view())], &of(ReduceOp::Sum, 2), &row, "is no axis");
    fails(Primitive::Reduce, &[Some(x.view())], &of(ReduceOp::Sum, 0), &row, "is not reduced");
    fails(Primitive::Reduce, &[Some(whole.view())], &of(ReduceOp::Mean, 1), &row, "mean of int64");
    fails(Primitive::Cumsum, &[Some(x.view())], &[], &x, "is not added up");
}
