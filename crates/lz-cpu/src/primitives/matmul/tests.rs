//! Products against float64.

use lz_abi::{DType, Param, Tensor, TensorView, indices};
use proptest::prelude::*;

use super::super::checking::{agree, at, drawn, fails, results};
use super::super::{InstructionSet, Primitive};
use super::Activation;

/// One call.
struct Product {
    dtype: DType,
    to: DType,
    /// Axes before the last two: of the output, of A, of B.
    batch: [Vec<i64>; 3],
    sizes: (i64, i64, i64),
    transposed: [bool; 2],
    /// A and B lie in memory the other way round.
    turned: [bool; 2],
    alpha: f64,
    beta: f64,
    bias: bool,
    /// Not given, given in whole, given as a row.
    c: u8,
    activation: Activation,
    /// The bfloat16 parts that numbers may be split into.
    parts: Option<i64>,
    seed: u64,
}

impl Default for Product {
    fn default() -> Product {
        Product {
            dtype: DType::F32,
            to: DType::F32,
            batch: [vec![], vec![], vec![]],
            sizes: (1, 1, 1),
            transposed: [false; 2],
            turned: [false; 2],
            alpha: 1.0,
            beta: 1.0,
            bias: false,
            c: 0,
            activation: Activation::None,
            parts: None,
            seed: 1,
        }
    }
}

/// The same elements with the last two axes the other way round in memory.
fn turned(tensor: &Tensor) -> (Tensor, Vec<i64>) {
    let rank = tensor.shape().len();
    let mut order: Vec<usize> = (0..rank).collect();
    order.swap(rank - 1, rank - 2);
    let copy = tensor.view().permuted(&order).to_tensor();
    let mut strides = copy.view().strides().to_vec();
    strides.swap(rank - 1, rank - 2);
    (copy, strides)
}

impl Product {
    fn check(&self) {
        let (m, n, k) = self.sizes;
        let shape = |batch: &[i64], rows: i64, columns: i64, transposed: bool| -> Vec<i64> {
            let last = if transposed { [columns, rows] } else { [rows, columns] };
            batch.iter().copied().chain(last).collect()
        };
        let a = drawn(self.dtype, &shape(&self.batch[1], m, k, self.transposed[0]), 1.0, self.seed);
        let b = drawn(self.dtype, &shape(&self.batch[2], k, n, self.transposed[1]), 1.0, self.seed + 1);
        let bias = drawn(self.to, &[n], 2.0, self.seed + 2);
        let out = shape(&self.batch[0], m, n, false);
        let c_shape = if self.c == 2 { vec![n] } else { out.clone() };
        let c = drawn(self.to, &c_shape, 2.0, self.seed + 3);
        let old = drawn(self.to, &out, 2.0, self.seed + 4);
        let (a_view, b_view) = (a.view(), b.view());
        // The matrix of a place, row by row.
        let matrix = |view: &TensorView<'_>, batch: &[i64], rows: i64, columns: i64, transposed: bool| -> Vec<f64> {
            let element = |i: i64, j: i64| at(view, &[batch, &if transposed { [j, i] } else { [i, j] }].concat());
            (0..rows * columns).map(|place| element(place / columns, place % columns)).collect()
        };
        let (mut known, mut x, mut y) = (None, Vec::new(), Vec::new());
        let wanted: Vec<f64> = indices(&out)
            .map(|index| {
                let (batch, last) = index.split_at(index.len() - 2);
                let (i, j) = (last[0], last[1]);
                if known.as_deref() != Some(batch) {
                    x = matrix(&a_view, batch, m, k, self.transposed[0]);
                    y = matrix(&b_view, batch, n, k, !self.transposed[1]);
                    known = Some(batch.to_vec());
                }
                let row = |all: &[f64], at: i64| all[(at * k) as usize..((at + 1) * k) as usize].to_vec();
                let sum: f64 = row(&x, i).iter().zip(row(&y, j)).map(|(x, y)| x * y).sum();
                let sum = self.alpha * sum + if self.bias { bias.to_f64()[j as usize] } else { 0.0 };
                let c = match self.c {
                    0 if self.beta == 0.0 => 0.0,
                    0 => at(&old.view(), &index),
                    _ => at(&c.view(), &index),
                };
                self.activation.exact()(sum) + self.beta * c
            })
            .collect();
        let params = [
            Param::Bool(self.transposed[0]),
            Param::Bool(self.transposed[1]),
            Param::Float(self.alpha),
            Param::Float(self.beta),
            self.activation.param(),
            Param::None,
            self.parts.map_or(Param::None, Param::Int),
        ];
        let (turned_a, turned_b) = (turned(&a), turned(&b));
        let view = |i: usize, whole: &'_ Tensor, other: &'_ (Tensor, Vec<i64>)| -> (Vec<i64>, Vec<i64>) {
            match self.turned[i] {
                true => (whole.shape().to_vec(), other.1.clone()),
                false => (whole.shape().to_vec(), whole.view().strides().to_vec()),
            }
        };
        let (la, lb) = (view(0, &a, &turned_a), view(1, &b, &turned_b));
        let bytes = |i: usize| match (i, self.turned[i]) {
            (0, true) => turned_a.0.bytes(),
            (0, false) => a.bytes(),
            (_, true) => turned_b.0.bytes(),
            (_, false) => b.bytes(),
        };
        let inputs = [
            Some(TensorView::strided(self.dtype, &la.0, &la.1, 0, bytes(0)).unwrap()),
            Some(TensorView::strided(self.dtype, &lb.0, &lb.1, 0, bytes(1)).unwrap()),
            self.bias.then(|| bias.view()),
            (self.c > 0).then(|| c.view()),
        ];
        // Sums of so many products, added one after the other: each sum rounds by 6e-8 of numbers that may be larger than the last.
        let off = if self.parts == Some(2) { 2e-5 * k.max(1) as f64 } else { 1e-7 * k.max(100) as f64 };
        let (share, off) = if self.dtype == DType::F64 { (1e-14, 3e-16 * k.max(100) as f64) } else { (1e-6, off) };
        for (set, got) in results(Primitive::Matmul, &inputs, &params, &old) {
            agree(&format!("{set:?} {} {:?}", self.dtype, self.sizes), &got, &wanted, share, off);
        }
    }
}

fn edges() -> impl Strategy<Value = i64> {
    prop_oneof![4 => 0i64..20, 2 => 30i64..36, 1 => 47i64..50, 1 => 63i64..66, 1 => 95i64..98, 1 => 127i64..131]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn products_are_those_of_float64(
        (m, n, k) in (edges(), edges(), prop_oneof![8 => edges(), 1 => 510i64..515, 1 => 1022i64..1026]),
        (dtype, wide) in (prop_oneof![4 => Just(DType::F32), 2 => Just(DType::F64), 1 => Just(DType::F16), 1 => Just(DType::Bf16)], any::<bool>()),
        (transposed, turned) in (any::<[bool; 2]>(), any::<[bool; 2]>()),
        (alpha, beta) in (prop_oneof![Just(1.0), Just(-0.5)], prop_oneof![Just(0.0), Just(1.0), Just(0.25)]),
        (bias, c, activation, seed) in (any::<bool>(), 0u8..3, proptest::sample::select(Activation::ALL), 0u64..1 << 40),
    ) {
        let to = if wide && dtype != DType::F64 { DType::F32 } else { dtype };
        Product { dtype, to, sizes: (m, n, k), transposed, turned, alpha, beta, bias, c, activation, seed, ..Product::default() }.check();
    }

    #[test]
    fn products_of_parts_are_those_of_float64(
        (m, n, k) in (prop_oneof![3 => edges(), 1 => 500i64..530], edges(), prop_oneof![4 => edges(), 1 => 250i64..260, 1 => 510i64..515]),
        (parts, transposed, turned) in (2i64..4, any::<[bool; 2]>(), any::<[bool; 2]>()),
        (alpha, beta) in (prop_oneof![Just(1.0), Just(-0.5)], prop_oneof![Just(0.0), Just(1.0)]),
        (bias, c, activation, seed) in (any::<bool>(), 0u8..3, proptest::sample::select(Activation::ALL), 0u64..1 << 40),
    ) {
        let parts = Some(parts);
        Product { parts, sizes: (m, n, k), transposed, turned, alpha, beta, bias, c, activation, seed, ..Product::default() }.check();
    }

    #[test]
    fn products_of_many_matrices_are_those_of_float64(
        (m, n, k) in (0i64..20, 0i64..40, 0i64..20),
        batch in proptest::collection::vec(0i64..4, 1..3),
        (ones, short) in (any::<[u8; 2]>(), [0usize..3, 0usize..3]),
        (transposed, turned, c, seed) in (any::<[bool; 2]>(), any::<[bool; 2]>(), 0u8..3, 0u64..1 << 40),
        parts in prop_oneof![3 => Just(None), 1 => Just(Some(3))],
    ) {
        let of = |ones: u8, short: usize| -> Vec<i64> {
            batch.iter().enumerate().map(|(i, &n)| if ones >> i & 1 == 1 { 1 } else { n }).skip(short).collect()
        };
        let batch = [batch.clone(), of(ones[0], short[0]), of(ones[1], short[1])];
        Product { batch, sizes: (m, n, k), transposed, turned, c, parts, seed, ..Product::default() }.check();
    }

    #[test]
    fn products_with_a_packed_weight_are_the_same(
        (m, n, k) in (edges(), edges(), prop_oneof![8 => edges(), 1 => 510i64..515, 1 => 1022i64..1026]),
        (dtype, transposed, seed) in (proptest::sample::select(&[DType::F32, DType::Bf16, DType::F16][..]), any::<bool>(), any::<u32>()),
    ) {
        let weight = drawn(dtype, &if transposed { [n, k] } else { [k, n] }, 1.0, seed.into());
        let blank = Tensor::from_f64(DType::F32, &[(n + 31) / 32, k, 32], &vec![7.0; ((n + 31) / 32 * k * 32) as usize]);
        let x = drawn(dtype, &[m, k], 1.0, seed.into());
        let to = Tensor::zeros(dtype, &[m, n]);
        let both = [Some(x.view()), Some(weight.view())];
        let packs: Vec<_> = results(Primitive::Pack, &both[1..], &[Param::Bool(transposed)], &blank).collect();
        for (_, pack) in &packs {
            prop_assert_eq!(pack, &packs[0].1);
        }
        let pack = &packs[0].1;
        let other = [Some(x.view()), Some(pack.view())];
        let params = [Param::None, Param::None, Param::None, Param::None, Param::None, Param::Int(n)];
        let split = [&params[..], &[Param::Int(3)]].concat();
        let plain: Vec<_> = results(Primitive::Matmul, &both, &[Param::None, Param::Bool(transposed)], &to).collect();
        for ((set, got), (_, wanted)) in results(Primitive::Matmul, &other, &params, &to).zip(&plain) {
            agree(&format!("{set:?}"), &got, &wanted.to_f64(), 1e-6, 3e-8 * k.max(100) as f64);
        }
        for ((set, got), (_, wanted)) in results(Primitive::Matmul, &other, &split, &to).zip(&plain) {
            agree(&format!("{set:?}, split"), &got, &wanted.to_f64(), 2e-6, 1e-7 * k.max(100) as f64);
        }
    }
}

#[test]
fn every_height_of_a_tile_is_right() {
    for m in 1..=26 {
        for n in [33, 128, 161] {
            Product { sizes: (m, n, 37), seed: m as u64, ..Product::default() }.check();
            Product { sizes: (m, n, 37), transposed: [false, true], seed: m as u64, ..Product::default() }.check();
        }
        for (n, k) in [(15, 257), (64, 256), (130, 37)] {
            for transposed in [[false, false], [false, true], [true, false]] {
                let sizes = (m, n, k);
                Product { dtype: DType::F64, to: DType::F64, sizes, transposed, seed: 3, ..Product::default() }.check();
            }
        }
    }
}

#[test]
fn rows_in_pieces_are_right() {
    Product { sizes: (1030, 33, 520), ..Product::default() }.check();
    Product { sizes: (400, 40, 70), ..Product::default() }.check();
    Product { sizes: (2, 700, 600), transposed: [false, true], ..Product::default() }.check();
    Product { sizes: (3, 700, 600), ..Product::default() }.check();
}

#[test]
fn a_result_does_not_depend_on_threads() {
    let (a, b) = (drawn(DType::F32, &[50, 700], 1.0, 1), drawn(DType::F32, &[700, 300], 1.0, 2));
    let all: Vec<_> =
        results(Primitive::Matmul, &[Some(a.view()), Some(b.view())], &[], &Tensor::zeros(DType::F32, &[50, 300]))
            .collect();
    for pair in all.chunks_exact(2) {
        assert_eq!(pair[0], pair[1]);
    }
}

/// Calls without parts, with two and with three.
fn parts() -> [Vec<Param>; 3] {
    [vec![], vec![Param::Int(2)], vec![Param::Int(3)]].map(|parts| [vec![Param::None; 6], parts].concat())
}

#[test]
fn what_is_no_number_stays_none() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let a = Tensor::from_f64(DType::F32, &[2, 2], &[inf, 1.0, nan, 0.0]);
    let b = Tensor::from_f64(DType::F32, &[2, 2], &[1.0, 2.0, -1e-42, 3e38]);
    let to = Tensor::zeros(DType::F32, &[2, 2]);
    for params in parts() {
        for (_, got) in results(Primitive::Matmul, &[Some(a.view()), Some(b.view())], &params, &to) {
            let got = got.to_f64();
            assert!(got[..2] == [inf, inf] && got[2].is_nan() && got[3].is_nan(), "{got:?}");
        }
    }
}

#[test]
fn numbers_that_cannot_be_split_are_multiplied_as_they_are() {
    // One number of A or B that is too large, or all too small, in a product of several tiles, panels and blocks.
    let (m, n, k) = (70i64, 70i64, 300i64);
    let ones = |rows: i64, columns: i64, by: f64| vec![by; (rows * columns) as usize];
    // A row and a column that are small among others that are not.
    let mixed = |rows: i64, columns: i64, by: fn(i64, i64) -> i64| -> Tensor {
        let number = |at: i64| if by(at / columns, at % columns) == 5 { 1.234_567_8e-36 } else { 1.1 };
        Tensor::from_f64(DType::F32, &[rows, columns], &(0..rows * columns).map(number).collect::<Vec<_>>())
    };
    let (a, b) = (mixed(m, k, |i, _| i), mixed(k, n, |_, j| j));
    let [plain, _, three] = parts();
    let (inputs, to) = ([Some(a.view()), Some(b.view())], Tensor::zeros(DType::F32, &[m, n]));
    let wanted: Vec<_> = results(Primitive::Matmul, &inputs, &plain, &to).collect();
    for ((set, got), (_, wanted)) in results(Primitive::Matmul, &inputs, &three, &to).zip(&wanted) {
        agree(&format!("{set:?}, small ones"), &got, &wanted.to_f64(), 1e-6, 0.0);
    }
    for (number, others) in [(3.4e38, 1e-3), (f64::NEG_INFINITY, 1.0), (1e-42, 1e-42), (2e-30, 2e-30)] {
        for (at_a, at_b) in [(Some(69 * k + 299), None), (None, Some(299 * n + 5))] {
            let (mut a, mut b) = (ones(m, k, others), ones(k, n, 1.0 / others.max(1e-20)));
            at_a.into_iter().for_each(|at| a[at as usize] = number);
            if let Some(at) = at_b {
                (a, b) = (ones(m, k, 1.0), ones(k, n, others));
                b[at as usize] = number;
            }
            let (a, b) = (Tensor::from_f64(DType::F32, &[m, k], &a), Tensor::from_f64(DType::F32, &[k, n], &b));
            let to = Tensor::zeros(DType::F32, &[m, n]);
            let inputs = [Some(a.view()), Some(b.view())];
            let [plain, two, three] = parts();
            let wanted: Vec<_> = results(Primitive::Matmul, &inputs, &plain, &to).collect();
            for params in [two, three] {
                for ((set, got), (_, wanted)) in results(Primitive::Matmul, &inputs, &params, &to).zip(&wanted) {
                    agree(&format!("{set:?} {number} {params:?}"), &got, &wanted.to_f64(), 2e-5, 0.0);
                }
            }
        }
    }
}

#[test]
fn three_parts_are_as_exact_as_float32() {
    let (m, n, k) = (64, 96, 768);
    let (a, b) = (drawn(DType::F32, &[m, k], 1.0, 1), drawn(DType::F32, &[k, n], 1.0, 2));
    let (x, y) = (a.to_f64(), b.to_f64());
    let product = |i: i64, j: i64| (0..k).map(|l| x[(i * k + l) as usize] * y[(l * n + j) as usize]).sum::<f64>();
    let wanted: Vec<f64> = (0..m * n).map(|at| product(at / n, at % n)).collect();
    let errors = parts().map(|params| {
        let all =
            results(Primitive::Matmul, &[Some(a.view()), Some(b.view())], &params, &Tensor::zeros(DType::F32, &[m, n]));
        let (_, best) = all.last().unwrap();
        let squares = best.to_f64().iter().zip(&wanted).map(|(a, b)| (a - b) * (a - b)).sum::<f64>();
        (squares / wanted.len() as f64).sqrt()
    });
    println!("errors of no, two and three parts: {errors:?}");
    assert!(errors[2] <= 1.1 * errors[0] && errors[1] < 1e-3, "{errors:?}");
}

#[test]
fn calls_that_make_no_sense_are_refused() {
    let (a, b) = (drawn(DType::F32, &[2, 3], 1.0, 1), drawn(DType::F32, &[4, 5], 1.0, 1));
    let wide = drawn(DType::F64, &[3, 5], 1.0, 1);
    let to = Tensor::zeros(DType::F32, &[2, 5]);
    fails(Primitive::Matmul, &[Some(a.view()), Some(b.view())], &[], &to, "is not");
    fails(Primitive::Matmul, &[Some(a.view()), Some(wide.view())], &[], &to, "does not give");
    fails(Primitive::Matmul, &[Some(a.view())], &[], &to, "two matrices");
    assert!(InstructionSet::Portable.is_here());
}
