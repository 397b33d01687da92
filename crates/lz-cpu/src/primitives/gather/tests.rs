//! Elements and rows by their indices, against index arithmetic.

use lz_abi::{DType, Param, Tensor, TensorView, indices};
use proptest::prelude::*;

use super::super::Primitive;
use super::super::checking::{agree, drawn, fails, results};

const DTYPES: [DType; 4] = [DType::F32, DType::Bf16, DType::I64, DType::U8];

fn some(dtype: DType, shape: &[i64], seed: u64) -> Tensor {
    drawn(dtype, shape, 100.0, seed)
}

/// Indices of an axis, some of them counted from the end.
fn named(wide: bool, shape: &[i64], size: i64, seed: u64) -> Tensor {
    let numbers = drawn(DType::F64, shape, 1.0, seed).to_f64();
    let of = |x: f64| ((x * size as f64) as i64).clamp(-size, size - 1);
    Tensor::from_ints(
        if wide { DType::I64 } else { DType::I32 },
        shape,
        &numbers.into_iter().map(of).collect::<Vec<_>>(),
    )
}

fn from_start(index: f64, size: i64) -> i64 {
    if index < 0.0 { index as i64 + size } else { index as i64 }
}

fn same(primitive: Primitive, inputs: &[Option<TensorView<'_>>], params: &[Param], to: &Tensor, wanted: &[f64]) {
    for (set, got) in results(primitive, inputs, params, to) {
        agree(&format!("{} {set:?}", primitive.name()), &got, wanted, 0.0, 0.0);
    }
}

fn sizes(rank: std::ops::Range<usize>) -> impl Strategy<Value = Vec<i64>> {
    proptest::collection::vec(1i64..6, rank)
}

proptest! {
    #[test]
    fn slices_are_selected_and_put_back(
        (shape, axis, count) in (sizes(1..4), 0usize..3, 0i64..7),
        (dtype, wide, own, seed) in (proptest::sample::select(&DTYPES[..]), any::<bool>(), any::<bool>(), any::<u32>()),
    ) {
        let axis = axis % shape.len();
        let (x, index) = (some(dtype, &shape, 1), named(wide, &[count], shape[axis], seed.into()));
        let at = |j: i64| from_start(index.view().get(&[j]), shape[axis]);
        let mut small = shape.clone();
        small[axis] = count;
        let with = |i: &[i64], at: i64| { let mut i = i.to_vec(); i[axis] = at; i };
        let wanted: Vec<f64> = indices(&small).map(|i| x.view().get(&with(&i, at(i[axis])))).collect();
        let params = [Param::Int(axis as i64 - if own { shape.len() as i64 } else { 0 })];
        same(Primitive::IndexSelect, &[Some(x.view()), Some(index.view())], &params, &some(dtype, &small, 2), &wanted);

        let source = some(dtype, &small, 3);
        let mut all = Tensor::from_f64(dtype, &shape, &x.to_f64());
        indices(&small).for_each(|i| all.view_mut().set(&with(&i, at(i[axis])), source.view().get(&i)));
        // A place that is named twice has what comes last along the axis.
        for j in 0..count {
            indices(&small).filter(|i| i[axis] == j).for_each(|i| all.view_mut().set(&with(&i, at(j)), source.view().get(&i)));
        }
        let (input, to) = if own { (None, x.clone()) } else { (Some(x.view()), some(dtype, &shape, 4)) };
        same(Primitive::IndexCopy, &[input, Some(index.view()), Some(source.view())], &params, &to, &all.to_f64());
    }

    #[test]
    fn elements_are_gathered_and_scattered(
        (shape, axis, less) in (sizes(1..4), 0usize..3, any::<[u8; 3]>()),
        (dtype, wide, own, seed) in (proptest::sample::select(&DTYPES[..]), any::<bool>(), any::<bool>(), any::<u32>()),
    ) {
        let axis = axis % shape.len();
        let small: Vec<i64> = shape.iter().zip(less).map(|(&n, less)| n - i64::from(less) % n).collect();
        let (x, index) = (some(dtype, &shape, 1), named(wide, &small, shape[axis], seed.into()));
        let there = |i: &[i64]| { let mut to = i.to_vec(); to[axis] = from_start(index.view().get(i), shape[axis]); to };
        let wanted: Vec<f64> = indices(&small).map(|i| x.view().get(&there(&i))).collect();
        let params = [Param::Int(axis as i64)];
        same(Primitive::Gather, &[Some(x.view()), Some(index.view())], &params, &some(dtype, &small, 2), &wanted);

        let source = some(dtype, &small, 3);
        let mut all = [x.clone(), x.clone()];
        indices(&small).for_each(|i| all[0].view_mut().set(&there(&i), source.view().get(&i)));
        indices(&small).for_each(|i| all[1].view_mut().set(&there(&i), 7.0));
        let (input, to) = if own { (None, x.clone()) } else { (Some(x.view()), some(dtype, &shape, 4)) };
        let inputs = [input, Some(index.view()), Some(source.view())];
        same(Primitive::Scatter, &inputs, &params, &to, &all[0].to_f64());
        same(Primitive::Scatter, &inputs[..2], &[params[0], Param::Int(7)], &to, &all[1].to_f64());
    }

    #[test]
    fn rows_are_named_by_several_indices(
        (shape, front) in (sizes(1..4), sizes(1..3)),
        (count, ones, wide, own, add) in (1usize..4, any::<[u8; 3]>(), any::<bool>(), any::<bool>(), any::<bool>()),
        (dtype, short) in (proptest::sample::select(&DTYPES[..]), any::<bool>()),
    ) {
        let count = count.min(shape.len());
        let x = some(dtype, &shape, 1);
        let names: Vec<Tensor> = (0..count)
            .map(|n| {
                // The first one has all axes.
                let ones = if n == 0 { 0 } else { ones[n] };
                let of: Vec<i64> = front.iter().enumerate().map(|(i, &n)| if ones >> i & 1 == 1 { 1 } else { n }).collect();
                named(wide, &of, shape[n], n as u64 + 5)
            })
            .collect();
        let there = |i: &[i64]| -> Vec<i64> {
            let named = names.iter().zip(&shape).map(|(n, &size)| from_start(super::super::checking::at(&n.view(), &i[..front.len()]), size));
            named.chain(i[front.len()..].iter().copied()).collect()
        };
        let all: Vec<i64> = front.iter().chain(&shape[count..]).copied().collect();
        let wanted: Vec<f64> = indices(&all).map(|i| x.view().get(&there(&i))).collect();
        let views: Vec<_> = names.iter().map(|n| Some(n.view())).collect();
        let inputs: Vec<_> = std::iter::once(Some(x.view())).chain(views.iter().cloned()).collect();
        same(Primitive::Index, &inputs, &[], &some(dtype, &all, 2), &wanted);

        let values = some(dtype, if short { &all[1..] } else { &all }, 3);
        let mut put = x.clone();
        for i in indices(&all) {
            let (to, value) = (there(&i), super::super::checking::at(&values.view(), &i));
            let old = put.view().get(&to);
            put.view_mut().set(&to, if add { old + value } else { value });
        }
        // Unsigned bytes end at 255.
        let (input, to) = if own { (None, x.clone()) } else { (Some(x.view()), some(dtype, &shape, 4)) };
        let inputs: Vec<_> = [input, Some(values.view())].into_iter().chain(views).collect();
        same(Primitive::IndexPut, &inputs, &[Param::Bool(add)], &to, &put.to_f64());
    }
}

#[test]
fn indices_outside_are_bad_data_and_nothing_is_written() {
    let x = some(DType::F32, &[4, 3], 1);
    let index = Tensor::from_ints(DType::I64, &[3], &[0, -4, 4]);
    let other = Tensor::from_ints(DType::I64, &[1, 3], &[0, 2, -5]);
    let rows = some(DType::F32, &[3, 3], 2);
    let row = some(DType::F32, &[1, 3], 2);
    let axis = [Param::Int(0)];
    let (x, rows, row) = (Some(x.view()), Some(rows.view()), Some(row.view()));
    let (index, other) = (Some(index.view()), Some(other.view()));
    let to = |shape: &[i64]| Tensor::zeros(DType::F32, shape);
    fails(Primitive::IndexSelect, &[x.clone(), index.clone()], &axis, &to(&[3, 3]), "index[2] is 4, an index of 4");
    fails(Primitive::IndexCopy, &[x.clone(), index.clone(), rows.clone()], &axis, &to(&[4, 3]), "index[2] is 4");
    fails(Primitive::Gather, &[x.clone(), other.clone()], &axis, &to(&[1, 3]), "index[0, 2] is -5");
    fails(Primitive::Scatter, &[x.clone(), other, row], &axis, &to(&[4, 3]), "index[0, 2] is -5");
    fails(Primitive::Index, &[x.clone(), index.clone()], &[], &to(&[3, 3]), "index[2] is 4");
    fails(Primitive::IndexPut, &[x, rows, index], &[], &to(&[4, 3]), "index[2] is 4");
}

#[test]
fn calls_that_make_no_sense_are_refused() {
    let x = some(DType::F32, &[4, 3], 1);
    let index = Tensor::from_ints(DType::I64, &[2], &[0, 1]);
    let (inputs, to) = ([Some(x.view()), Some(index.view())], Tensor::zeros(DType::F32, &[4, 3]));
    fails(Primitive::IndexSelect, &inputs, &[Param::Int(0)], &to, "are not");
    fails(Primitive::IndexSelect, &inputs, &[Param::Int(2)], &to, "is no axis");
    fails(Primitive::IndexSelect, &[Some(x.view()), Some(x.view())], &[Param::Int(0)], &to, "neither int64 nor int32");
    fails(Primitive::Gather, &inputs, &[Param::Int(0)], &to, "is not");
    fails(Primitive::Index, &inputs, &[], &to, "is not");
    fails(
        Primitive::IndexPut,
        &[Some(x.view()), Some(x.view()), Some(index.view())],
        &[],
        &to,
        "do not have the shape",
    );
    fails(Primitive::IndexCopy, &inputs, &[Param::Int(0)], &to, "needs a source");
}
