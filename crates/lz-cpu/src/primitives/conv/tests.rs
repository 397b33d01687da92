//! Convolutions against float64.

use lz_abi::{DType, Param, Tensor, TensorView, indices, row_major};
use proptest::prelude::*;

use super::super::Primitive;
use super::super::checking::{agree, drawn, fails, results};
use super::Activation;

/// One call.
#[derive(Clone, Debug)]
struct Convolution {
    dtype: DType,
    images: i64,
    groups: i64,
    /// Channels and outputs of a group.
    channels: i64,
    outputs: i64,
    /// Size, kernel, stride, padding and dilation of each axis.
    axes: Vec<[i64; 5]>,
    bias: bool,
    activation: Activation,
    /// x lies in memory with the channels last.
    channels_last: bool,
    seed: u64,
}

const PLAIN: Convolution = Convolution {
    dtype: DType::F32,
    images: 1,
    groups: 1,
    channels: 1,
    outputs: 1,
    axes: Vec::new(),
    bias: true,
    activation: Activation::None,
    channels_last: false,
    seed: 1,
};

impl Convolution {
    fn windows(&self) -> Vec<i64> {
        self.axes.iter().map(|[n, k, s, p, d]| (n + 2 * p - d * (k - 1) - 1).div_euclid(*s) + 1).collect()
    }

    fn params(&self) -> Vec<Param> {
        let moves = (2..5).flat_map(|of| self.axes.iter().map(move |axis| Param::Int(axis[of])));
        [Param::Int(self.groups), self.activation.param()].into_iter().chain(moves).collect()
    }

    fn check(&self) {
        let shape = |first: i64, second: i64, of: usize| -> Vec<i64> {
            [first, second].into_iter().chain(self.axes.iter().map(|axis| axis[of])).collect()
        };
        let all = self.groups * self.outputs;
        let x = drawn(self.dtype, &shape(self.images, self.groups * self.channels, 0), 1.0, self.seed);
        let w = drawn(self.dtype, &shape(all, self.channels, 1), 1.0, self.seed ^ 77);
        let b = drawn(self.dtype, &[all], 1.0, self.seed ^ 1234);
        let size: Vec<i64> = [self.images, all].into_iter().chain(self.windows()).collect();
        let wanted: Vec<f64> = indices(&size)
            .map(|index| {
                let group = index[1] / self.outputs;
                let terms = indices(&w.shape()[1..]).filter_map(|tap| {
                    let mut place = vec![index[0], group * self.channels + tap[0]];
                    for (i, [n, _, s, p, d]) in self.axes.iter().enumerate() {
                        let at = index[i + 2] * s - p + tap[i + 1] * d;
                        place.push(Some(at).filter(|at| (0..*n).contains(at))?);
                    }
                    let weight: Vec<i64> = [index[1]].into_iter().chain(tap.iter().copied()).collect();
                    Some(x.view().get(&place) * w.view().get(&weight))
                });
                let bias = if self.bias { b.view().get(&index[1..2]) } else { 0.0 };
                self.activation.exact()(terms.sum::<f64>() + bias)
            })
            .collect();
        // The same elements, with the channels last in memory.
        let order: Vec<usize> = [0].into_iter().chain(2..2 + self.axes.len()).chain([1]).collect();
        let turned = x.view().permuted(&order).to_tensor();
        let steps = row_major(turned.shape());
        let mut strides = vec![0; order.len()];
        order.iter().zip(&steps).for_each(|(&axis, &step)| strides[axis] = step);
        let given = match self.channels_last {
            true => TensorView::strided(self.dtype, x.shape(), &strides, 0, turned.bytes()).unwrap(),
            false => x.view(),
        };
        let inputs = [Some(given), Some(w.view()), self.bias.then(|| b.view())];
        let blank = Tensor::from_f64(self.dtype, &size, &vec![7.0; wanted.len()]);
        let depth = self.channels * self.axes.iter().map(|axis| axis[1]).product::<i64>();
        for (set, got) in results(Primitive::Conv, &inputs, &self.params(), &blank) {
            agree(&format!("{set:?} {self:?}"), &got, &wanted, 1e-6, 1e-7 * depth.max(100) as f64);
        }
    }
}

/// Sizes, kernels, strides, paddings and dilations of which at least one window fits.
fn axis() -> impl Strategy<Value = [i64; 5]> {
    let size = prop_oneof![4 => 1i64..12, 2 => 14i64..20, 1 => 30i64..36];
    (size, 1i64..6, 1i64..5, 0i64..5, 1i64..4)
        .prop_map(|(n, k, s, p, d)| [n.max(d * (k - 1) + 1 - 2 * p).max(1), k, s, p, d])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn convolutions_are_those_of_float64(
        axes in proptest::collection::vec(axis(), 1..3),
        (images, groups) in (0i64..4, prop_oneof![4 => Just(1i64), 1 => 2i64..5]),
        (channels, outputs) in (1i64..6, prop_oneof![4 => 1i64..8, 1 => 11i64..26]),
        dtype in prop_oneof![4 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::Bf16)],
        (bias, channels_last, activation, seed) in
            (any::<bool>(), any::<bool>(), proptest::sample::select(Activation::ALL), 0u64..1 << 40),
    ) {
        Convolution { dtype, images, groups, channels, outputs, axes, bias, activation, channels_last, seed }.check();
    }

    #[test]
    fn convolutions_of_single_channels_are_those_of_float64(
        axes in proptest::collection::vec(axis(), 1..3),
        (images, groups, outputs) in (1i64..3, 2i64..9, 1i64..4),
        dtype in prop_oneof![4 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::Bf16)],
        (bias, activation, seed) in (any::<bool>(), proptest::sample::select(Activation::ALL), 0u64..1 << 40),
    ) {
        Convolution { dtype, images, groups, outputs, axes, bias, activation, seed, ..PLAIN }.check();
    }
}

#[test]
fn models_convolutions_are_right() {
    let check = |groups, channels, outputs, axes: &[[i64; 5]]| {
        let images = if channels * outputs > 500 { 1 } else { 2 };
        Convolution { images, groups, channels, outputs, axes: axes.to_vec(), ..PLAIN }.check();
    };
    // Patches, a stem of two axes and of one, a block and its way around, one that is a product, one of planes.
    check(1, 3, 40, &[[32, 16, 16, 0, 1]; 2]);
    check(1, 3, 16, &[[41, 7, 2, 3, 1]; 2]);
    check(1, 80, 20, &[[70, 3, 1, 1, 1]]);
    check(1, 20, 20, &[[70, 3, 2, 1, 1]]);
    check(1, 64, 16, &[[7, 3, 1, 1, 1]; 2]);
    check(1, 16, 32, &[[14, 1, 2, 0, 1]; 2]);
    check(1, 33, 40, &[[9, 1, 1, 0, 1]; 2]);
    check(24, 1, 1, &[[19, 3, 2, 1, 1]; 2]);
    // Deeper than a block of products.
    check(1, 70, 14, &[[6, 3, 1, 1, 1]; 2]);
    // Windows that reach further than the input.
    check(1, 2, 3, &[[2, 5, 3, 4, 2]; 2]);
    check(3, 1, 2, &[[2, 5, 3, 4, 2]; 2]);
}

#[test]
fn float64_is_computed_in_float64() {
    let of = |groups, channels, outputs, axes: &[[i64; 5]], activation| {
        let (axes, images, dtype) = (axes.to_vec(), 2, DType::F64);
        Convolution { dtype, images, groups, channels, outputs, axes, activation, ..PLAIN }.check();
    };
    of(1, 3, 4, &[[9, 3, 2, 1, 1]; 2], Activation::Gelu);
    of(2, 2, 3, &[[11, 2, 3, 4, 2]], Activation::Relu);
    of(3, 1, 2, &[[2, 5, 3, 4, 2]; 2], Activation::Silu);
    of(1, 2, 3, &[[2, 5, 3, 4, 2], [7, 3, 1, 0, 1]], Activation::None);
    let (x, w) = ([1.0 + f64::EPSILON, 1.0], [1.0, -1.0]);
    let inputs = [Tensor::from_f64(DType::F64, &[1, 2, 1], &x), Tensor::from_f64(DType::F64, &[1, 2, 1], &w)];
    let params = [Param::None, Param::None, Param::Int(1), Param::Int(0), Param::Int(1)];
    let blank = Tensor::zeros(DType::F64, &[1, 1, 1]);
    for (_, got) in results(Primitive::Conv, &inputs.each_ref().map(|one| Some(one.view())), &params, &blank) {
        assert_eq!(got.to_f64(), [f64::EPSILON]);
    }
}

#[test]
fn calls_that_make_no_sense_are_refused() {
    let (x, w) = (drawn(DType::F32, &[1, 4, 5], 1.0, 1), drawn(DType::F32, &[2, 4, 3], 1.0, 1));
    let inputs = [Some(x.view()), Some(w.view())];
    let to = Tensor::zeros(DType::F32, &[1, 2, 3]);
    let of = |g, s, p, d| [Param::Int(g), Param::None, Param::Int(s), Param::Int(p), Param::Int(d)];
    fails(Primitive::Conv, &inputs, &of(2, 1, 0, 1), &to, "is not convolved");
    fails(Primitive::Conv, &inputs, &of(1, 0, 0, 1), &to, "is not convolved");
    fails(Primitive::Conv, &inputs, &of(1, 1, 0, 3), &to, "is not convolved");
    fails(Primitive::Conv, &inputs, &of(1, 1, 1, 1), &to, "is not");
    fails(Primitive::Conv, &inputs[..1], &of(1, 1, 0, 1), &to, "needs");
}
