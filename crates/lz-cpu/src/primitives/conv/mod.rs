//! Convolutions over one or two axes.
//!
//! `out[n, o] = activation(Σ x[n, c, …] · w[o, c, …] + bias[o])` over the channels c of the group of o and the taps of the window.
//! x is padded with zeros. Sums are made in float32, or in float64 of float64, in the same order for any number of threads.
//!
//! | | |
//! |---|---|
//! | input 0 | x `[N, C, L]` or `[N, C, H, W]`: float32, float16 or bfloat16, or row-major float64 |
//! | input 1 | w `[O, C / groups, kernel…]` of the dtype of x, row-major |
//! | input 2 | bias `[O]`, float32 or of the dtype of x; may be absent |
//! | output 0 | `[N, O, …]` of the dtype of x, row-major |
//! | param 0 | groups; 1 by default |
//! | param 1 | the [`Activation`]; none by default |
//! | params 2… | stride of each axis, then padding of each axis, then dilation of each axis |
//!
//! Not in place. With many channels in a group it is a product of matrices (`products.rs`): w has a row for each output and a column
//! for each tap of each channel, and the windows are packed as its other side. Where a group has one channel, each plane is computed
//! by itself (`depthwise.rs`).

use lz_abi::{Args, DType, KernelError, Param};

use super::matmul::operand::Matrix;
use super::matmul::{Activation, Products};
use super::windows::Geometry;
use super::windows::doubles::Doubles;
use super::windows::planes::{Planes, steps};
use super::{Kernel, Meta, param, wrong};

mod depthwise;
mod products;

#[cfg(test)]
mod tests;

/// Outputs of a group of one channel up to which planes are computed by themselves.
const FEW: usize = 4;

/// The primitive.
pub struct Conv;

/// A call.
struct Call {
    images: usize,
    channels: usize,
    outputs: usize,
    groups: usize,
    windows: Geometry,
    x: Planes,
    /// Outputs, and taps of channels.
    weight: Matrix,
    bias: Option<Matrix>,
    out: Matrix,
    activation: Activation,
}

impl Call {
    fn is_depthwise(&self) -> bool {
        is_depthwise(self.channels, self.outputs, self.groups)
    }
}

fn is_depthwise(channels: usize, outputs: usize, groups: usize) -> bool {
    groups > 1 && channels == groups && outputs <= groups * FEW
}

/// How often a window fits.
fn fits(size: i64, kernel: i64, [stride, padding, dilation]: [i64; 3]) -> Option<i64> {
    let room = size + 2 * padding - dilation * (kernel - 1) - 1;
    (size >= 0 && kernel >= 1 && stride >= 1 && padding >= 0 && dilation >= 1 && room >= 0).then(|| room / stride + 1)
}

/// The windows of a call, and how many groups its channels make: by the sizes of x and w.
fn geometry(x: &[i64], w: &[i64], params: &[Param]) -> Option<(Geometry, usize)> {
    let axes = x.len().checked_sub(2).filter(|axes| (1..=2).contains(axes) && w.len() == x.len())?;
    let groups = match params.first() {
        None | Some(Param::None) => 1,
        Some(given) => usize::try_from(given.as_int()?).ok().filter(|&groups| groups > 0)?,
    };
    let one = Geometry::ONE;
    let mut windows = one;
    for axis in 0..axes {
        let number = |of: usize| params.get(2 + of * axes + axis)?.as_int();
        let (size, kernel, moves) = (x[2 + axis], w[2 + axis], [number(0)?, number(1)?, number(2)?]);
        let at = axis + 2 - axes;
        windows.output[at] = fits(size, kernel, moves)? as usize;
        (windows.input[at], windows.kernel[at]) = (size as usize, kernel as usize);
        [windows.stride[at], windows.padding[at], windows.dilation[at]] = moves.map(|number| number as usize);
    }
    (x[1] == w[1] * groups as i64 && w[0] % groups as i64 == 0).then_some((windows, groups))
}

/// Checks the arguments.
fn bind(args: &Args<'_, '_>) -> Result<Call, KernelError> {
    let (Some(x), Some(w)) = (args.input(0), args.input(1)) else { return wrong("conv needs an input and a weight") };
    let out = &args.outputs[0];
    let dtype = x.dtype();
    let takes = matches!(dtype, DType::F32 | DType::F16 | DType::Bf16 | DType::F64)
        && w.dtype() == dtype
        && out.dtype() == dtype;
    let (Some((windows, groups)), true) = (geometry(x.shape(), w.shape(), args.params()), takes) else {
        return wrong(format!("{x:?} is not convolved with {w:?} by {:?}", args.params()));
    };
    let (images, channels, outputs) = (x.shape()[0], x.shape()[1], w.shape()[0]);
    let skipped = 4 - x.shape().len();
    let is_shape = out.shape().len() == x.shape().len()
        && out.shape()[..2] == [images, outputs]
        && out.shape()[2..].iter().zip(&windows.output[skipped..]).all(|(&a, &b)| a == b as i64);
    if !is_shape || !out.is_contiguous() || !w.is_contiguous() {
        return wrong(format!("a convolution of {x:?} with {w:?} is not {out:?}, or lies otherwise"));
    }
    let bias = args.input(2);
    if let Some(bias) = &bias
        && (bias.shape() != [outputs] || bias.dtype() != dtype && bias.dtype() != DType::F32)
    {
        return wrong(format!("{bias:?} is no bias of {outputs} outputs of {dtype}"));
    }
    let activation = match param(args, 1) {
        Param::None => Activation::None,
        given => Activation::of(given)?,
    };
    let depth = w.shape()[1] as usize * windows.taps();
    let matrix = |start: *mut u8, dtype: DType, row: usize, column: isize| Matrix {
        start,
        dtype,
        row: row as isize,
        column,
        packed: false,
    };
    Ok(Call {
        images: images as usize,
        channels: channels as usize,
        outputs: outputs as usize,
        groups,
        windows,
        x: Planes { start: x.raw().start(), dtype, steps: steps(&x) },
        weight: matrix(w.raw().start(), dtype, depth, 1),
        bias: bias.map(|bias| matrix(bias.raw().start(), bias.dtype(), 0, bias.strides()[0] as isize)),
        out: matrix(out.raw().start(), dtype, windows.windows(), 1),
        activation,
    })
}

/// A convolution of float64.
fn in_doubles(args: &mut Args<'_, '_>, call: &Call) -> Result<(), KernelError> {
    let given = |at: usize| args.input(at).map(|input| input.as_slice::<f64>()).transpose();
    let (Some(x), Some(w), bias) = (given(0)?, given(1)?, given(2)?) else {
        return wrong("conv needs an input and a weight");
    };
    let (activation, sizes) = (call.activation.exact(), [call.channels, call.outputs, call.groups]);
    let (threads, windows) = (args.threads(), &call.windows);
    Doubles { windows, sizes, x, w, bias, activation }.convolve(threads, args.outputs[0].as_slice()?);
    Ok(())
}

impl Kernel for Conv {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let call = bind(args)?;
        if call.images * call.outputs * call.windows.windows() == 0 {
            return Ok(());
        }
        if call.x.dtype == DType::F64 {
            return in_doubles(args, &call);
        }
        match call.is_depthwise() {
            true => depthwise::run::<I>(args, &call),
            false => products::run::<I>(args, &call),
        }
    }

    fn scratch(inputs: &[Option<Meta<'_>>], params: &[Param], threads: usize) -> usize {
        let shape = |at: usize| inputs.get(at).copied().flatten().map_or(&[][..], |meta| meta.shape);
        let (x, w) = (shape(0), shape(1));
        let Some((windows, groups)) = geometry(x, w, params) else { return 0 };
        let (images, channels, outputs) = (x[0] as usize, x[1] as usize, w[0] as usize);
        if inputs[0].is_some_and(|x| x.dtype == DType::F64) {
            return 0;
        }
        match is_depthwise(channels, outputs, groups) {
            true => depthwise::scratch(&windows, threads),
            false => products::scratch(&windows, (images, channels, outputs / groups.max(1)), w[1] as usize, threads),
        }
    }
}
