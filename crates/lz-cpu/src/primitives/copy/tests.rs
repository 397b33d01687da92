//! Copies against index arithmetic.

use lz_abi::{DType, Param, Tensor, TensorView, indices};
use proptest::prelude::*;

use super::super::Primitive;
use super::super::checking::{agree, drawn, fails, results};

const DTYPES: [DType; 5] = [DType::F32, DType::Bf16, DType::I64, DType::U8, DType::Bool];

fn some(dtype: DType, shape: &[i64], seed: u64) -> Tensor {
    drawn(dtype, shape, if dtype == DType::Bool { 0.7 } else { 100.0 }, seed)
}

fn sizes(rank: std::ops::Range<usize>) -> impl Strategy<Value = Vec<i64>> {
    proptest::collection::vec(prop_oneof![4 => 1i64..5, 2 => 15i64..20, 1 => 31i64..35, 1 => Just(0i64)], rank)
}

fn same(primitive: Primitive, inputs: &[Option<TensorView<'_>>], params: &[Param], to: &Tensor, wanted: &[f64]) {
    for (set, got) in results(primitive, inputs, params, to) {
        agree(&format!("{} {set:?}", primitive.name()), &got, wanted, 0.0, 0.0);
    }
}

proptest! {
    #[test]
    fn axes_are_put_in_order(
        shape in sizes(1..5), dtype in proptest::sample::select(&DTYPES[..]), order in any::<[u64; 4]>(), seed in any::<u32>(),
    ) {
        let mut axes: Vec<usize> = (0..shape.len()).collect();
        axes.sort_by_key(|&axis| order[axis]);
        let x = some(dtype, &shape, seed.into());
        let wanted = x.view().permuted(&axes);
        let to = some(dtype, wanted.shape(), 1);
        let params: Vec<Param> = axes.iter().map(|&axis| Param::Int(axis as i64)).collect();
        same(Primitive::Permute, &[Some(x.view())], &params, &to, &wanted.to_f64());
        same(Primitive::Copy, &[Some(wanted.clone())], &[], &to, &wanted.to_f64());
    }

    #[test]
    fn tensors_are_expanded(shape in sizes(1..4), ones in any::<u8>(), dtype in proptest::sample::select(&DTYPES[..])) {
        let small: Vec<i64> = shape.iter().enumerate().map(|(i, &n)| if ones >> i & 1 == 1 { 1 } else { n }).collect();
        let x = some(dtype, &small, 3);
        let wanted: Vec<f64> = indices(&shape).map(|i| super::super::checking::at(&x.view(), &i)).collect();
        same(Primitive::Copy, &[Some(x.view())], &[], &some(dtype, &shape, 1), &wanted);
    }

    #[test]
    fn parts_of_axes_are_taken(
        shape in sizes(1..4), dtype in proptest::sample::select(&DTYPES[..]), cuts in any::<[(u8, u8, i8); 3]>(),
    ) {
        let x = some(dtype, &shape, 4);
        let (mut to, mut params, mut from) = (vec![], vec![], vec![]);
        for (&n, (start, count, step)) in shape.iter().zip(cuts) {
            let step = if step % 3 == 0 { 1 } else { i64::from(step % 3) };
            let start = if n == 0 { 0 } else { i64::from(start) % n };
            let most = if n == 0 { 0 } else if step > 0 { (n - 1 - start) / step + 1 } else { start / -step + 1 };
            to.push(if most == 0 { 0 } else { i64::from(count) % (most + 1) });
            params.extend([Param::Int(start), Param::Int(step)]);
            from.push((start, step));
        }
        let wanted: Vec<f64> = indices(&to)
            .map(|i| x.view().get(&i.iter().zip(&from).map(|(i, (start, step))| start + i * step).collect::<Vec<_>>()))
            .collect();
        same(Primitive::Slice, &[Some(x.view())], &params, &some(dtype, &to, 1), &wanted);
    }

    #[test]
    fn tensors_are_joined(
        shape in sizes(1..4), axis in 0usize..3, lens in proptest::collection::vec(0i64..5, 1..4),
        dtype in proptest::sample::select(&DTYPES[..]),
    ) {
        let axis = axis % shape.len();
        let of = |len: i64| { let mut shape = shape.clone(); shape[axis] = len; shape };
        let parts: Vec<Tensor> = lens.iter().map(|&len| some(dtype, &of(len), len as u64)).collect();
        let to = some(dtype, &of(lens.iter().sum()), 1);
        let wanted: Vec<f64> = indices(to.shape())
            .map(|index| {
                let (mut part, mut index) = (0, index.to_vec());
                while index[axis] >= lens[part] {
                    index[axis] -= lens[part];
                    part += 1;
                }
                parts[part].view().get(&index)
            })
            .collect();
        let inputs: Vec<_> = parts.iter().map(|part| Some(part.view())).collect();
        for axis in [axis as i64, axis as i64 - shape.len() as i64] {
            same(Primitive::Concat, &inputs, &[Param::Int(axis)], &to, &wanted);
        }
    }

    #[test]
    fn tensors_get_a_margin(shape in sizes(1..4), margins in any::<[(u8, u8); 3]>(), dtype in proptest::sample::select(&DTYPES[..])) {
        let x = some(dtype, &shape, 4);
        let of = |n: u8| i64::from(n % 4);
        let to: Vec<i64> = shape.iter().zip(margins).map(|(n, (before, after))| n + of(before) + of(after)).collect();
        let params: Vec<Param> =
            std::iter::once(Param::Int(1)).chain(margins[..shape.len()].iter().map(|(before, _)| Param::Int(of(*before)))).collect();
        let wanted: Vec<f64> = indices(&to)
            .map(|i| {
                let from: Vec<i64> = i.iter().zip(margins).map(|(i, (before, _))| i - of(before)).collect();
                if from.iter().zip(&shape).all(|(i, n)| (0..*n).contains(i)) { x.view().get(&from) } else { 1.0 }
            })
            .collect();
        same(Primitive::Pad, &[Some(x.view())], &params, &some(dtype, &to, 1), &wanted);
    }

    #[test]
    fn triangles_are_cut(
        (batch, m, n) in (1i64..3, 0i64..40, 0i64..40), (upper, diagonal, own) in (any::<bool>(), -45i64..45, any::<bool>()),
        dtype in proptest::sample::select(&DTYPES[..]),
    ) {
        let shape = [batch, m, n];
        let x = some(dtype, &shape, 9);
        let wanted: Vec<f64> = indices(&shape)
            .map(|i| (x.view().get(&i), if upper { i[2] - i[1] >= diagonal } else { i[2] - i[1] <= diagonal }))
            .map(|(x, inside)| if inside { x } else { 1.0 })
            .collect();
        let params = [Param::Bool(upper), Param::Int(diagonal), Param::Float(1.0)];
        match own {
            true => same(Primitive::Triangle, &[None], &params, &x, &wanted),
            false => same(Primitive::Triangle, &[Some(x.view())], &params, &some(dtype, &shape, 1), &wanted),
        }
    }
}

#[test]
fn large_tensors_are_copied_on_several_threads() {
    let x = some(DType::F32, &[3, 130, 257], 1);
    let turned = x.view().permuted(&[0, 2, 1]);
    same(Primitive::Copy, &[Some(turned.clone())], &[], &some(DType::F32, turned.shape(), 2), &turned.to_f64());
    let heads = x.view().permuted(&[1, 0, 2]);
    same(Primitive::Copy, &[Some(heads.clone())], &[], &some(DType::F32, heads.shape(), 2), &heads.to_f64());
}

#[test]
fn numbers_are_evenly_apart() {
    for dtype in [DType::I64, DType::I32, DType::F32, DType::F64, DType::F16, DType::Bf16] {
        let to = Tensor::zeros(dtype, &[5]);
        same(Primitive::Iota, &[], &[], &to, &[0.0, 1.0, 2.0, 3.0, 4.0]);
        same(Primitive::Iota, &[], &[Param::Int(7), Param::Int(-2)], &to, &[7.0, 5.0, 3.0, 1.0, -1.0]);
    }
    let half = [Param::Float(0.5), Param::Float(0.25)];
    same(Primitive::Iota, &[], &half, &Tensor::zeros(DType::F32, &[3]), &[0.5, 0.75, 1.0]);
}

#[test]
fn calls_that_make_no_sense_are_refused() {
    let x = some(DType::F32, &[2, 3], 1);
    let (same, other) = (Tensor::zeros(DType::F32, &[2, 3]), Tensor::zeros(DType::F64, &[2, 3]));
    let inputs = [Some(x.view())];
    fails(Primitive::Copy, &inputs, &[], &other, "does not give");
    fails(Primitive::Permute, &inputs, &[Param::Int(0), Param::Int(0)], &same, "is no order");
    fails(Primitive::Permute, &inputs, &[Param::Int(1), Param::Int(0)], &same, "has the shape");
    fails(Primitive::Slice, &inputs, &[Param::Int(1)], &same, "has no 2 elements from 1");
    fails(Primitive::Slice, &inputs, &[Param::Int(0), Param::Int(i64::MAX)], &same, "has no 2 elements");
    fails(Primitive::Concat, &inputs, &[Param::Int(2)], &same, "is no axis");
    fails(Primitive::Concat, &inputs, &[Param::Int(0)], &Tensor::zeros(DType::F32, &[3, 3]), "have 2 elements");
    fails(Primitive::Pad, &inputs, &[Param::Int(0), Param::Int(-1)], &same, "is not");
    fails(Primitive::Triangle, &inputs, &[], &same, "no side");
}
