//! Functions of elements against float64.

use lz_abi::{DType, Param, Tensor, TensorView, indices};
use proptest::prelude::*;

use super::super::Primitive;
use super::super::checking::{agree, at, drawn, fails, results};
use super::{BinaryOp, UnaryOp};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::Bf16];
const INTEGERS: [DType; 5] = [DType::I64, DType::I32, DType::I16, DType::I8, DType::U8];

/// What a function of two numbers is.
fn exact(op: BinaryOp, a: f64, b: f64) -> f64 {
    let truth = |truth: bool| f64::from(u8::from(truth));
    let bits = |f: fn(i64, i64) -> i64| f(a as i64, b as i64) as f64;
    let nan = a.is_nan() || b.is_nan();
    match op {
        BinaryOp::Add => a + b,
        BinaryOp::Sub => a - b,
        BinaryOp::Mul => a * b,
        BinaryOp::Div => a / b,
        BinaryOp::FloorDiv if b == 0.0 => a / b,
        BinaryOp::FloorDiv => (a / b).floor(),
        BinaryOp::TruncDiv => (a / b).trunc(),
        BinaryOp::Mod => {
            if a % b != 0.0 && (b < 0.0) != (a % b < 0.0) {
                a % b + b
            } else {
                a % b
            }
        }
        BinaryOp::Fmod => a % b,
        BinaryOp::Pow => a.powf(b),
        BinaryOp::Max => {
            if nan {
                f64::NAN
            } else {
                a.max(b)
            }
        }
        BinaryOp::Min => {
            if nan {
                f64::NAN
            } else {
                a.min(b)
            }
        }
        BinaryOp::And => bits(|a, b| a & b),
        BinaryOp::Or => bits(|a, b| a | b),
        BinaryOp::Xor => bits(|a, b| a ^ b),
        BinaryOp::Eq => truth(a == b),
        BinaryOp::Ne => truth(a != b),
        BinaryOp::Lt => truth(a < b),
        BinaryOp::Le => truth(a <= b),
        BinaryOp::Gt => truth(a > b),
        BinaryOp::Ge => truth(a >= b),
        BinaryOp::LogicalAnd => truth(a != 0.0 && b != 0.0),
        BinaryOp::LogicalOr => truth(a != 0.0 || b != 0.0),
        BinaryOp::LogicalXor => truth((a != 0.0) != (b != 0.0)),
    }
}

/// A shape, and one that broadcasts to it.
fn broadcast() -> impl Strategy<Value = (Vec<i64>, Vec<i64>, Vec<i64>)> {
    let last = prop_oneof![0i64..4, 15i64..18, 62i64..67, 126i64..130, 510i64..515, 1023i64..1027];
    (proptest::collection::vec(1i64..4, 0..3), last, any::<[u8; 2]>(), 0usize..3, 0usize..3).prop_map(
        |(mut shape, last, ones, short_a, short_b)| {
            shape.push(last);
            let of = |ones: u8, short: usize| {
                let some = shape.iter().enumerate().map(|(i, &n)| if ones >> i & 1 == 1 { 1 } else { n });
                some.skip(short.min(shape.len())).collect::<Vec<_>>()
            };
            let (a, b) = (of(ones[0] & ones[0] >> 4, short_a), of(ones[1] & ones[1] >> 4, short_b));
            (shape, a, b)
        },
    )
}

/// A tensor with other strides: every second element of rows, or columns as rows.
fn odd(tensor: &Tensor, shape: &[i64], kind: u8) -> Option<(Tensor, Vec<i64>)> {
    let rank = shape.len();
    match kind {
        1 if rank > 0 => {
            let mut wide = shape.to_vec();
            wide[rank - 1] *= 2;
            let mut spread = Tensor::zeros(tensor.dtype(), &wide);
            let mut view = spread.view_mut();
            for index in indices(shape) {
                let mut to = index.to_vec();
                to[rank - 1] *= 2;
                view.set(&to, tensor.view().get(&index));
            }
            let mut strides = spread.view().strides().to_vec();
            strides[rank - 1] = 2;
            Some((spread, strides))
        }
        2 if rank > 1 => {
            let turned: Vec<usize> = (0..rank).rev().collect();
            let copy = tensor.view().permuted(&turned).to_tensor();
            let strides = copy.view().strides().iter().rev().copied().collect();
            Some((copy, strides))
        }
        _ => None,
    }
}

fn check_binary(
    op: BinaryOp,
    dtype: DType,
    (shape, a, b): (&[i64], &[i64], &[i64]),
    place: u8,
    odds: [u8; 2],
    seed: u64,
) {
    let size = if dtype.is_float() { 3.0 } else { 100.0 };
    let of = |shape: &[i64], seed| {
        let numbers = drawn(dtype, shape, if dtype == DType::Bool { 0.7 } else { size }, seed);
        // No integer is divided by 0, no unsigned one is negative, and few floats are 0.
        let keep = |x: f64| match dtype {
            _ if dtype.is_float() => x,
            DType::Bool => f64::from(u8::from(x != 0.0)),
            DType::U8 => x.abs().max(1.0),
            _ if x == 0.0 => 1.0,
            _ => x,
        };
        Tensor::from_f64(dtype, shape, &numbers.to_f64().into_iter().map(keep).collect::<Vec<_>>())
    };
    let in_place = place % 4;
    let (a, b) = (of(if in_place == 1 { shape } else { a }, seed), of(if in_place == 2 { shape } else { b }, seed + 1));
    let wanted: Vec<f64> = indices(shape).map(|i| exact(op, at(&a.view(), &i), at(&b.view(), &i))).collect();
    let to = if op.compares() { DType::Bool } else { dtype };
    // Integers wrap, and unsigned ones have no sign: float64 says nothing about them.
    let range =
        |x: f64| to.is_float() || to == DType::Bool || Tensor::from_f64(to, &[1], &[x]).to_f64()[0] == x.round();
    if !wanted.iter().all(|&x| range(x)) {
        return;
    }
    let blank = Tensor::from_f64(to, shape, &vec![1.0; wanted.len()]);
    let spread = [odd(&a, a.shape(), odds[0]), odd(&b, b.shape(), odds[1])];
    let view = |i: usize, whole: &'_ Tensor| -> Option<(Vec<i64>, Vec<i64>)> {
        spread[i].as_ref().map(|(_, strides)| (whole.shape().to_vec(), strides.clone()))
    };
    let layouts = [view(0, &a), view(1, &b)];
    let seen = |i: usize, whole: &'static str| (i, whole);
    let _ = seen;
    let make = |i: usize| match (&spread[i], &layouts[i]) {
        (Some((tensor, _)), Some((shape, strides))) => {
            TensorView::strided(dtype, shape, strides, 0, tensor.bytes()).expect("inside")
        }
        _ => [&a, &b][i].view(),
    };
    let (inputs, output) = match in_place {
        1 if to == dtype => (vec![None, Some(make(1))], a.clone()),
        2 if to == dtype => (vec![Some(make(0)), None], b.clone()),
        _ => (vec![Some(make(0)), Some(make(1))], blank),
    };
    let off =
        if matches!(op, BinaryOp::Mod | BinaryOp::Fmod | BinaryOp::FloorDiv | BinaryOp::TruncDiv) { 0.0 } else { 3e-7 };
    // A remainder of rounded numbers is exact; a quotient that is nearly an integer may be rounded to it.
    let beside = if off == 0.0 && dtype.is_float() { 1.0 } else { 0.0 };
    for (set, got) in results(Primitive::Binary, &inputs, &[op.param()], &output) {
        agree(
            &format!("{op} {dtype} {set:?}"),
            &got,
            &wanted,
            off,
            if off == 0.0 && matches!(op, BinaryOp::FloorDiv | BinaryOp::TruncDiv) { beside } else { 1e-6 * beside },
        );
    }
}

fn binary_ops(dtype: DType) -> Vec<BinaryOp> {
    let of_bits = |op: &BinaryOp| matches!(op, BinaryOp::And | BinaryOp::Or | BinaryOp::Xor);
    BinaryOp::ALL
        .iter()
        .copied()
        .filter(|op| match dtype {
            DType::Bool => of_bits(op) || op.compares(),
            _ if dtype.is_float() => !of_bits(op),
            _ => !matches!(op, BinaryOp::Div | BinaryOp::Pow),
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn functions_of_two_tensors_are_those_of_float64(
        (shape, a, b) in broadcast(),
        (dtype, op) in proptest::sample::select([&FLOATS[..], &INTEGERS, &[DType::Bool]].concat())
            .prop_flat_map(|dtype| (Just(dtype), proptest::sample::select(binary_ops(dtype)))),
        (place, odds, seed) in (any::<u8>(), [0u8..4, 0u8..4], 0u64..1 << 40),
    ) {
        check_binary(op, dtype, (&shape, &a, &b), place, odds, seed);
    }

    #[test]
    fn functions_of_one_tensor_are_those_of_float64(
        (shape, a, _) in broadcast(),
        (op, dtype) in (proptest::sample::select(UnaryOp::ALL), proptest::sample::select(&FLOATS[..])),
        (place, kind, seed, size) in (any::<bool>(), 0u8..4, any::<u32>(), prop_oneof![Just(1.0), Just(8.0), Just(90.0)]),
    ) {
        if op == UnaryOp::Not {
            return Ok(());
        }
        let own = place && !op.tests();
        let x = drawn(dtype, if own { &shape } else { &a }, size, seed.into());
        let positive = matches!(op, UnaryOp::Log | UnaryOp::Log2 | UnaryOp::Log1p | UnaryOp::Sqrt | UnaryOp::Rsqrt);
        let x = if positive { Tensor::from_f64(dtype, x.shape(), &x.to_f64().iter().map(|x| x.abs()).collect::<Vec<_>>()) } else { x };
        check_unary(op, dtype, &shape, &x, own, kind);
    }
}

/// What a function of one number is.
fn exact_one(op: UnaryOp, x: f64) -> f64 {
    match op {
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Sign if x.is_nan() => 0.0,
        UnaryOp::Sign => {
            if x == 0.0 {
                0.0
            } else {
                x.signum()
            }
        }
        UnaryOp::Square => x * x,
        UnaryOp::Relu => {
            if x < 0.0 {
                0.0
            } else {
                x
            }
        }
        UnaryOp::Not => !(x as i64) as f64,
        UnaryOp::Floor => x.floor(),
        UnaryOp::Ceil => x.ceil(),
        UnaryOp::Round => x.round_ties_even(),
        UnaryOp::Trunc => x.trunc(),
        UnaryOp::Exp => x.exp(),
        UnaryOp::Log => x.ln(),
        UnaryOp::Log2 => x.log2(),
        UnaryOp::Log1p => x.ln_1p(),
        UnaryOp::Expm1 => x.exp_m1(),
        UnaryOp::Sqrt => x.sqrt(),
        UnaryOp::Rsqrt => 1.0 / x.sqrt(),
        UnaryOp::Reciprocal => 1.0 / x,
        UnaryOp::Sin => x.sin(),
        UnaryOp::Cos => x.cos(),
        UnaryOp::Tanh => x.tanh(),
        UnaryOp::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        UnaryOp::Silu => crate::reference::activation::silu(x),
        UnaryOp::Erf => libm::erf(x),
        UnaryOp::Gelu => crate::reference::activation::gelu(x),
        UnaryOp::GeluTanh => crate::reference::activation::gelu_tanh(x),
        UnaryOp::Softplus => {
            if x > 50.0 {
                x
            } else {
                x.exp().ln_1p()
            }
        }
        UnaryOp::LogicalNot => f64::from(u8::from(x == 0.0)),
        UnaryOp::IsNan => f64::from(u8::from(x.is_nan())),
        UnaryOp::IsInf => f64::from(u8::from(x.is_infinite())),
    }
}

fn check_unary(op: UnaryOp, dtype: DType, shape: &[i64], x: &Tensor, own: bool, kind: u8) {
    let to = if op.tests() { DType::Bool } else { dtype };
    let wanted: Vec<f64> = indices(shape).map(|i| exact_one(op, at(&x.view(), &i))).collect();
    // What does not fit is infinite.
    let wanted = Tensor::from_f64(if to == DType::F16 { DType::F32 } else { to }, shape, &wanted).to_f64();
    let spread = odd(x, x.shape(), kind);
    let view = match &spread {
        Some((tensor, strides)) => TensorView::strided(dtype, x.shape(), strides, 0, tensor.bytes()).expect("inside"),
        None => x.view(),
    };
    let (inputs, output) = match own {
        true => ([None], x.clone()),
        false => ([Some(view)], Tensor::from_f64(to, shape, &vec![1.0; wanted.len()])),
    };
    for (set, got) in results(Primitive::Unary, &inputs, &[op.param()], &output) {
        // x/2 (1 + erf(x/√2)) loses the digits of the sum: up to |x|/2 units of 1.2e-7 for each rounding of it,
        // where erf is not -1 yet (x > -5.6).
        let beside = if op == UnaryOp::Gelu { 1e-6 } else { 1.5e-7 };
        agree(&format!("{} {dtype} {set:?}", op.name()), &got, &wanted, 1e-6, beside);
    }
}

#[test]
fn the_ends_are_those_of_float64() {
    let inf = f64::INFINITY;
    let x = [inf, -inf, f64::NAN, 0.0, 1e-40, -1e-40, 3e38, 88.0, -88.0, -95.0, -103.0, 1e6, 1e9, 0.5, 1.5, 2.5, -0.5];
    for dtype in [DType::F32, DType::F64] {
        let x = Tensor::from_f64(dtype, &[17], &x);
        for &op in UnaryOp::ALL.iter().filter(|&&op| op != UnaryOp::Not) {
            check_unary(op, dtype, &[17], &x, false, 0);
        }
        for &op in &binary_ops(dtype) {
            let row = Tensor::from_f64(dtype, &[17, 1], &x.to_f64());
            let all = indices(&[17, 17]).map(|i| exact(op, at(&row.view(), &i), at(&x.view(), &i)));
            let wanted =
                Tensor::from_f64(if op.compares() { DType::Bool } else { dtype }, &[17, 17], &all.collect::<Vec<_>>());
            let to = Tensor::zeros(wanted.dtype(), &[17, 17]);
            for (set, got) in results(Primitive::Binary, &[Some(row.view()), Some(x.view())], &[op.param()], &to) {
                if matches!(op, BinaryOp::FloorDiv | BinaryOp::TruncDiv | BinaryOp::Mod | BinaryOp::Fmod) {
                    continue;
                }
                agree(&format!("{op} {dtype} {set:?}"), &got, &wanted.to_f64(), 3e-7, 1e-44);
            }
        }
    }
}

#[test]
fn numbers_stand_for_tensors() {
    let x = drawn(DType::Bf16, &[3, 70], 2.0, 5);
    let third = Param::Float(1.0 / 3.0);
    for (params, f) in [
        ([BinaryOp::Sub.param(), third, Param::None], &(|x: f64| x - 1.0 / 3.0) as &dyn Fn(f64) -> f64),
        ([BinaryOp::Sub.param(), Param::None, third], &|x: f64| 1.0 / 3.0 - x),
    ] {
        let wanted: Vec<f64> = x.to_f64().into_iter().map(f).collect();
        let given = [[Some(x.view()), None], [None, Some(x.view())]];
        let inputs = if matches!(params[2], Param::None) { &given[0] } else { &given[1] };
        for (set, got) in results(Primitive::Binary, inputs, &params, &Tensor::zeros(DType::Bf16, &[3, 70])) {
            agree(&format!("{set:?}"), &got, &wanted, 0.0, 1e-7);
        }
        for (set, got) in results(Primitive::Binary, &[None, None], &params, &x) {
            agree(&format!("in place {set:?}"), &got, &wanted, 0.0, 1e-7);
        }
    }
}

#[test]
fn integers_wrap_and_are_not_divided_by_zero() {
    let x = Tensor::from_ints(DType::I8, &[3], &[127, -128, 3]);
    let y = Tensor::from_ints(DType::I8, &[3], &[1, -1, 0]);
    let to = Tensor::zeros(DType::I8, &[3]);
    let inputs = [Some(x.view()), Some(y.view())];
    for (_, got) in results(Primitive::Binary, &inputs, &[BinaryOp::Add.param()], &to) {
        assert_eq!(got.to_f64(), [-128.0, 127.0, 3.0]);
    }
    for op in [BinaryOp::FloorDiv, BinaryOp::TruncDiv, BinaryOp::Mod, BinaryOp::Fmod] {
        fails(Primitive::Binary, &inputs, &[op.param()], &to, "b is 0, a divisor other than 0");
        fails(Primitive::Binary, &inputs[..1], &[op.param(), Param::Int(0)], &to, "b is 0");
    }
}

#[test]
fn softplus_of_negative_numbers_keeps_its_digits() {
    // Its result is near the middle between two numbers of bfloat16.
    let numbers = [-5.25, -9.0, -15.0];
    for dtype in [DType::F32, DType::Bf16] {
        check_unary(UnaryOp::Softplus, dtype, &[3], &Tensor::from_f64(dtype, &[3], &numbers), false, 0);
    }
}

#[test]
fn calls_that_make_no_sense_are_refused() {
    let (x, y) = (drawn(DType::F32, &[4], 1.0, 1), drawn(DType::F64, &[4], 1.0, 1));
    let (f, b) = (Tensor::zeros(DType::F32, &[4]), Tensor::zeros(DType::Bool, &[4]));
    let both = [Some(x.view()), Some(y.view())];
    fails(Primitive::Binary, &both, &[BinaryOp::Add.param()], &f, "does not give");
    fails(Primitive::Binary, &both[..1], &[BinaryOp::Eq.param(), Param::Int(1)], &f, "does not give");
    fails(Primitive::Binary, &both[..1], &[Param::Int(99)], &f, "is no BinaryOp");
    fails(Primitive::Binary, &both[..1], &[Param::text("plus")], &f, "is no BinaryOp");
    fails(Primitive::Binary, &[Some(x.view()), Some(x.view())], &[BinaryOp::And.param()], &f, "does not take");
    fails(Primitive::Unary, &both[..1], &[UnaryOp::Neg.param()], &b, "does not give");
    fails(Primitive::Unary, &both[..1], &[UnaryOp::Neg.param()], &Tensor::zeros(DType::F32, &[5]), "broadcast");
}

proptest! {
    #[test]
    fn one_of_two_is_chosen(
        (shape, a, b) in broadcast(),
        dtype in proptest::sample::select(&[DType::F32, DType::Bf16, DType::I64, DType::Bool, DType::U8][..]),
        (place, seed) in (0u8..5, any::<u32>()),
    ) {
        let condition = drawn(DType::Bool, &a, 0.7, seed.into());
        let size = if dtype == DType::Bool { 0.7 } else { 50.0 };
        let (x, y) = (drawn(dtype, if place == 1 { &shape } else { &b }, size, 3), drawn(dtype, &shape, size, 4));
        let fill = if place == 3 { 2.5 } else { f64::NEG_INFINITY };
        let fill = Tensor::from_f64(dtype, &[1], &[fill]).to_f64()[0];
        let wanted: Vec<f64> = indices(&shape)
            .map(|i| match (at(&condition.view(), &i) != 0.0, place) {
                (true, _) => at(&x.view(), &i),
                (false, 3) => fill,
                (false, _) => at(&y.view(), &i),
            })
            .collect();
        let c = Some(condition.view());
        let blank = Tensor::zeros(dtype, &shape);
        let (inputs, params, output) = match place {
            1 => (vec![c, None, Some(y.view())], vec![], x.clone()),
            2 => (vec![c, Some(x.view()), None], vec![], y.clone()),
            3 => (vec![c, Some(x.view())], vec![Param::None, Param::Float(fill)], blank),
            _ => (vec![c, Some(x.view()), Some(y.view())], vec![], blank),
        };
        for (set, got) in results(Primitive::Where, &inputs, &params, &output) {
            prop_assert_eq!(got.to_f64(), wanted.clone(), "{:?}", set);
        }
    }

    #[test]
    fn other_dtypes_have_the_same_numbers(
        (shape, a, _) in broadcast(),
        from in proptest::sample::select([&FLOATS[..], &INTEGERS, &[DType::Bool]].concat()),
        to in proptest::sample::select([&FLOATS[..], &INTEGERS, &[DType::Bool]].concat()),
        (kind, seed) in (0u8..4, any::<u32>()),
    ) {
        let x = drawn(from, &a, 60.0, seed.into());
        let x = Tensor::from_f64(from, &a, &x.to_f64().iter().map(|x| x.abs()).collect::<Vec<_>>());
        let wanted: Vec<f64> = indices(&shape)
            .map(|i| match (at(&x.view(), &i), to) {
                (x, DType::Bool) => f64::from(u8::from(x != 0.0)),
                // Through float32, as torch does it.
                (x, DType::F16 | DType::Bf16) => Tensor::from_f64(to, &[1], &[f64::from(x as f32)]).to_f64()[0],
                (x, to) if to.is_float() => Tensor::from_f64(to, &[1], &[x]).to_f64()[0],
                (x, _) => x.trunc(),
            })
            .collect();
        let spread = odd(&x, &a, kind);
        let view = match &spread {
            Some((tensor, strides)) => TensorView::strided(from, &a, strides, 0, tensor.bytes()).unwrap(),
            None => x.view(),
        };
        for (set, got) in results(Primitive::Cast, &[Some(view)], &[], &Tensor::zeros(to, &shape)) {
            agree(&format!("{set:?} {from} {to}"), &got, &wanted, 0.0, 0.0);
        }
    }
}

#[test]
fn large_integers_are_cast_exactly_and_truth_is_not_lost() {
    let (big, high) = ((1i64 << 60) + 1, 1i64 << 40);
    let mut x = Tensor::zeros(DType::I64, &[2]);
    for (set, got) in results(Primitive::Iota, &[], &[Param::Int(big), Param::Int(high - big)], &x) {
        assert_eq!((got.view().get_int(&[0]), got.view().get_int(&[1])), (big, high), "{set:?}");
        x = got;
    }
    for (_, got) in results(Primitive::Cast, &[Some(x.view())], &[], &Tensor::zeros(DType::I32, &[2])) {
        assert_eq!(got.to_f64(), [1.0, 0.0]);
    }
    for (_, got) in results(Primitive::Cast, &[Some(x.view())], &[], &Tensor::zeros(DType::Bool, &[2])) {
        assert_eq!(got.to_f64(), [1.0, 1.0]);
    }
}

#[test]
fn one_number_is_everywhere() {
    for (dtype, value) in
        [(DType::F16, 1.5), (DType::I64, -3.0), (DType::Bool, 1.0), (DType::F64, -0.25), (DType::F8E5M2, 2.0)]
    {
        for (_, got) in results(Primitive::Fill, &[], &[Param::Float(value)], &Tensor::zeros(dtype, &[3, 50])) {
            assert_eq!(got.to_f64(), [value; 150]);
        }
    }
}
