//! Pools against float64.

use lz_abi::{DType, Param, Tensor, indices};
use proptest::prelude::*;

use super::super::Primitive;
use super::super::checking::{agree, drawn, fails, results};
use super::PoolOp;

/// One call: size, kernel, stride and padding of each axis.
fn check(op: PoolOp, counts: bool, ceil: bool, dtype: DType, (images, channels): (i64, i64), axes: &[[i64; 4]]) {
    let shape: Vec<i64> = [images, channels].into_iter().chain(axes.iter().map(|axis| axis[0])).collect();
    let x = drawn(dtype, &shape, 1.0, 5);
    let windows = axes.iter().map(|&[n, k, s, p]| {
        let room = n + 2 * p - k + if ceil { s - 1 } else { 0 };
        (room.div_euclid(s) + 1).min((n + p - 1).div_euclid(s) + 1)
    });
    let size: Vec<i64> = [images, channels].into_iter().chain(windows).collect();
    let wanted: Vec<f64> = indices(&size)
        .map(|index| {
            let (mut elements, mut counted) = (Vec::new(), 1);
            for (i, &[n, k, s, p]) in axes.iter().enumerate() {
                let first = index[i + 2] * s - p;
                counted *= (first + k).min(n + p) - first;
            }
            for tap in indices(&axes.iter().map(|axis| axis[1]).collect::<Vec<_>>()) {
                let mut place = index[..2].to_vec();
                place.extend(axes.iter().enumerate().map(|(i, &[_, _, s, p])| index[i + 2] * s - p + tap[i]));
                if place[2..].iter().zip(axes).all(|(at, axis)| (0..axis[0]).contains(at)) {
                    elements.push(x.view().get(&place));
                }
            }
            let divisor = if counts { counted as f64 } else { elements.len() as f64 };
            match op {
                PoolOp::Max => elements.into_iter().fold(f64::NEG_INFINITY, f64::max),
                PoolOp::Avg => elements.iter().sum::<f64>() / divisor,
            }
        })
        .collect();
    let numbers = (1..4).flat_map(|of| axes.iter().map(move |axis| Param::Int(axis[of])));
    let params: Vec<Param> = [op.param(), Param::Bool(counts)].into_iter().chain(numbers).collect();
    let blank = Tensor::from_f64(dtype, &size, &vec![7.0; wanted.len()]);
    for (set, got) in results(Primitive::Pool, &[Some(x.view())], &params, &blank) {
        agree(&format!("{set:?} {op:?} {axes:?} {counts} {ceil}"), &got, &wanted, 1e-6, 1e-7);
    }
}

proptest! {
    #[test]
    fn pools_are_those_of_float64(
        axes in proptest::collection::vec((1i64..20, 1i64..6, 1i64..5, 0i64..3), 1..3),
        (images, channels) in (0i64..3, 1i64..4),
        dtype in prop_oneof![3 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::Bf16), 1 => Just(DType::F64)],
        (max, counts, ceil) in (any::<bool>(), any::<bool>(), any::<bool>()),
    ) {
        let axes: Vec<[i64; 4]> =
            axes.into_iter().map(|(n, k, s, p)| [n.max(k), k, s, p.min(k / 2)]).collect();
        check(if max { PoolOp::Max } else { PoolOp::Avg }, counts, ceil, dtype, (images, channels), &axes);
    }
}

#[test]
fn the_pool_of_a_stem_is_right() {
    check(PoolOp::Max, true, false, DType::F32, (2, 5), &[[57, 3, 2, 1]; 2]);
    check(PoolOp::Avg, true, false, DType::F32, (1, 3), &[[49, 7, 7, 0]; 2]);
}

#[test]
fn a_window_with_a_nan_is_nan() {
    let x = Tensor::from_f64(DType::F32, &[1, 1, 4], &[1.0, f64::NAN, -2.0, f64::NEG_INFINITY]);
    let params = [PoolOp::Max.param(), Param::None, Param::Int(2), Param::Int(1), Param::Int(0)];
    for (_, got) in results(Primitive::Pool, &[Some(x.view())], &params, &Tensor::zeros(DType::F32, &[1, 1, 3])) {
        let got = got.to_f64();
        assert!(got[0].is_nan() && got[1].is_nan() && got[2] == -2.0, "{got:?}");
    }
}

#[test]
fn calls_that_make_no_sense_are_refused() {
    let x = drawn(DType::F32, &[1, 1, 4], 1.0, 1);
    let of = |k, s, p| [PoolOp::Avg.param(), Param::None, Param::Int(k), Param::Int(s), Param::Int(p)];
    let to = Tensor::zeros(DType::F32, &[1, 1, 5]);
    fails(Primitive::Pool, &[Some(x.view())], &of(2, 1, 2), &to, "has no windows");
    fails(Primitive::Pool, &[Some(x.view())], &of(2, 0, 0), &to, "has no windows");
    fails(Primitive::Pool, &[Some(x.view())], &of(2, 1, 0), &to, "are not");
    fails(Primitive::Pool, &[None], &of(2, 1, 0), &to, "needs an input");
}
