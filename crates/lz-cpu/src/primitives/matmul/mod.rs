//! Products of matrices.
//!
//! `out = activation(alpha · op(A) op(B) + bias) + beta · C`, where op transposes the last two axes or leaves them, for each matrix of
//! the axes before, which are broadcast. Sums are made in float32 (float64 of float64), in the same order for any number of threads.
//!
//! | | |
//! |---|---|
//! | input 0 | A `[…, M, K]`, or `[…, K, M]` transposed: float64, float32, float16 or bfloat16 |
//! | input 1 | B `[…, K, N]`, or `[…, N, K]` transposed, of the dtype of A; or, but for float64, a packed weight (see param 5) |
//! | input 2 | bias `[N]`, of the dtype of the output, or float32 where that is narrower; may be absent |
//! | input 3 | C, of the dtype of the output, broadcast to its shape; may be absent |
//! | output 0 | `[…, M, N]` with a last stride of 1: of the dtype of A, or float32 where that is narrower |
//! | param 0 | whether A is transposed; false by default |
//! | param 1 | whether B is transposed; false by default |
//! | param 2 | alpha; 1 by default |
//! | param 3 | beta; by default 1 where C is given, and 0 where it is not |
//! | param 4 | the [`Activation`]; none by default |
//! | param 5 | N, where B is packed: `[⌈N/32⌉, K, 32]`, float32, as [`Pack`] makes it of float weights; otherwise not given |
//! | param 6 | 2 or 3: the bfloat16 parts that numbers of float32 may be split into where that is faster ([`split`]); not given: never |
//!
//! In place: C is absent and beta is not 0: C is the old output. Any strides do for A and B; fastest are those with one stride of 1
//! among the last two axes.
//!
//! Pack: a weight as the product of many calls reads it fastest.
//!
//! | | |
//! |---|---|
//! | input 0 | W `[K, N]`, or `[N, K]` transposed, float32, float16 or bfloat16 |
//! | output 0 | `[⌈N/32⌉, K, 32]`, float32, row-major; columns behind N are 0 |
//! | param 0 | whether W is transposed |

use lz_abi::{Args, DType, KernelError, Param, TensorRef};

use super::kinds::kinds;
use super::loops::{Layout, Loop, RANK};
use super::{Kernel, Meta, param, wrong};
use crate::simd::packed::WIDTH;
use crate::simd::packed::widened::Tile;
use crate::simd::vector::doubles::{Eight, EightInOne, EightInTwo, PlainEight};
use crate::simd::{Avx2, Avx512, Isa, Portable};

mod doubles;
pub(super) mod epilogue;
pub(super) mod float;
pub(super) mod operand;
pub mod split;
pub(super) mod tasks;

use epilogue::Epilogue;
use float::Source;
use operand::Matrix;

#[cfg(test)]
mod tests;

kinds! {
    /// What a product is put through.
    Activation {
        /// Nothing
        None = "none",
        /// The larger of x and 0
        Relu = "relu",
        /// x Φ(x)
        Gelu = "gelu",
        /// Its approximation with tanh
        GeluTanh = "gelu_tanh",
        /// x / (1 + e^-x)
        Silu = "silu",
    }
}

impl Activation {
    /// The function of float64 numbers.
    pub(crate) fn exact(self) -> fn(f64) -> f64 {
        use crate::reference::activation;
        match self {
            Activation::None => |x| x,
            Activation::Relu => activation::relu,
            Activation::Gelu => activation::gelu,
            Activation::GeluTanh => activation::gelu_tanh,
            Activation::Silu => activation::silu,
        }
    }
}

/// What an instruction set multiplies with.
pub(crate) trait Products: Tile {
    /// What is compiled for copies of float32, for which wider vectors bring little. Functions of the rarer dtypes (float64 and
    /// integers) are compiled once, for every CPU of the architecture.
    type Simple: Isa;
    /// Eight float64 numbers in its registers.
    type Eight: Eight;
    /// Whether AMX may be used beside it.
    const BESIDE_AMX: bool = false;
}

impl Products for Portable {
    type Simple = Portable;
    type Eight = PlainEight;
}

impl Products for Avx2 {
    type Simple = Avx2;
    type Eight = EightInTwo;
}

impl Products for Avx512 {
    type Simple = Avx2;
    type Eight = EightInOne;
    const BESIDE_AMX: bool = true;
}

/// The primitive.
pub struct Matmul;

/// The sizes of a call.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sizes {
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

/// A product of one matrix for each element of a loop.
pub(super) struct Call<'a> {
    pub sizes: Sizes,
    pub a: Matrix,
    pub b: Source<'a>,
    /// The places of matrices, in elements: output, A, B, and C; instead of C's those of the bias, where it has a number for each row.
    pub batch: Loop<4>,
    pub epilogue: Epilogue,
}

/// Sizes and strides of the last two axes, and of those before.
type Split<'a> = ([i64; 2], [isize; 2], Layout<'a>);

/// The axes of a tensor; the last two swapped where it is transposed.
fn split<'a>(tensor: &TensorRef<'a>, transposed: bool) -> Option<Split<'a>> {
    let (shape, strides) = (tensor.shape(), tensor.strides());
    let (before, &size) = shape.split_last_chunk::<2>()?;
    let (steps, &step) = strides.split_last_chunk::<2>()?;
    let (size, step) = if transposed { ([size[1], size[0]], [step[1], step[0]]) } else { (size, step) };
    Some((size, step.map(|step| step as isize), (before, steps)))
}

fn flag(args: &Args<'_, '_>, at: usize) -> Result<bool, KernelError> {
    match param(args, at) {
        Param::None => Ok(false),
        given => given.as_bool().map_or_else(|| wrong(format!("{given:?} is neither true nor false")), Ok),
    }
}

fn number(args: &Args<'_, '_>, at: usize, default: f64) -> Result<f64, KernelError> {
    match param(args, at) {
        Param::None => Ok(default),
        given => given.as_float().map_or_else(|| wrong(format!("{given:?} is no number")), Ok),
    }
}

/// The parts that numbers may be split into, by the parameters of a call.
pub fn parts(params: &[Param]) -> Option<usize> {
    params.get(6)?.as_int().filter(|parts| (2..=3).contains(parts)).map(|parts| parts as usize)
}

impl Kernel for Matmul {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let call = bind(args)?;
        if call.a.dtype == DType::F64 {
            return doubles::run::<I>(args, &call, factors(args)?);
        }
        match parts(args.params()) {
            Some(parts) if I::BESIDE_AMX && split::is_here() && split::takes(&call) => match parts {
                2 => split::run::<2>(args, &call),
                _ => split::run::<3>(args, &call),
            },
            _ => float::run::<I>(args, &call),
        }
    }

    fn scratch(inputs: &[Option<Meta<'_>>], params: &[Param], threads: usize) -> usize {
        let sizes = |at: usize| inputs.get(at).copied().flatten().map_or(&[][..], |meta| meta.shape);
        let is = |at: usize| params.get(at).and_then(|param| param.as_bool()).unwrap_or(false);
        let ([.., a, b], packed) = (sizes(0), params.get(5).and_then(|param| param.as_int())) else { return 0 };
        let (m, k) = if is(0) { (*b, *a) } else { (*a, *b) };
        let n = match (packed, sizes(1)) {
            (Some(n), _) => n,
            (None, [.., a, b]) => {
                if is(1) {
                    *a
                } else {
                    *b
                }
            }
            _ => 0,
        };
        // Matrices that share b may be one of more rows: as many as both are broadcast to. An output may have more, whose rows
        // are fewer than a tile's if k is small.
        let lead = |at: usize, i: usize| sizes(at).iter().rev().skip(2).nth(i).copied().unwrap_or(1);
        let rows: i64 = (0..sizes(0).len().max(sizes(1).len())).map(|i| lead(0, i).max(lead(1, i))).product();
        let rows = (m as usize * rows as usize).max(float::HEIGHT);
        let sizes = Sizes { m: rows, n: n as usize, k: k as usize };
        if inputs.first().copied().flatten().is_some_and(|a| a.dtype == DType::F64) {
            return doubles::scratch(sizes, threads);
        }
        let split = parts(params).map_or(0, |parts| split::scratch(sizes, parts, threads));
        split.max(float::scratch(sizes, threads))
    }
}

/// Alpha and beta.
fn factors(args: &Args<'_, '_>) -> Result<(f64, f64), KernelError> {
    let beta = if args.input(3).is_some() { 1.0 } else { 0.0 };
    Ok((number(args, 2, 1.0)?, number(args, 3, beta)?))
}

/// Checks the arguments.
fn bind(args: &Args<'_, '_>) -> Result<Call<'static>, KernelError> {
    let (Some(a), Some(b)) = (args.input(0), args.input(1)) else { return wrong("matmul needs two matrices") };
    let out = &args.outputs[0];
    let (shape, steps) = (out.shape(), out.strides());
    fn of<'a>(tensor: &TensorRef<'a>, transposed: bool) -> Result<Split<'a>, KernelError> {
        split(tensor, transposed).ok_or_else(|| KernelError::Failed(format!("{tensor:?} is no matrix")))
    }
    let (Some(&[m, n]), Some(&[row, column])) = (shape.last_chunk::<2>(), steps.last_chunk::<2>()) else {
        return wrong(format!("{out:?} is no matrix"));
    };
    let ([a_m, k], a_steps, a_before) = of(&a, flag(args, 0)?)?;
    let packed = param(args, 5).as_int();
    let (b_size, b_steps, b_before) = match packed {
        None => of(&b, flag(args, 1)?)?,
        Some(n) => {
            ([if b.shape() == [(n + 31) / 32, k, WIDTH as i64] { k } else { -1 }, n], [0; 2], (&[][..], &[][..]))
        }
    };
    let floats = |dtype: DType| matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::Bf16);
    let (from, to) = (a.dtype(), out.dtype());
    let takes = floats(from) && (to == from || to == DType::F32 && from != DType::F64);
    let b_dtype = if packed.is_some() { DType::F32 } else { from };
    let is_packed = packed.is_some() && b.is_contiguous() && from != DType::F64;
    if !takes || b.dtype() != b_dtype || packed.is_some() && !is_packed {
        return wrong(format!("matmul of {from} and {} does not give {to}", b.dtype()));
    }
    if (a_m, b_size) != (m, [k, n]) || column != 1 && n > 1 {
        return wrong(format!("a product of {a:?} and {b:?} is not {out:?}"));
    }
    let (c, (alpha, beta)) = (args.input(3), factors(args)?);
    let activation = match param(args, 4) {
        Param::None => Activation::None,
        given => Activation::of(given)?,
    };
    let before = &shape[..shape.len() - 2];
    let (mut c_steps, mut c_before): ([isize; 2], Layout<'_>) = ([row as isize, 1], (before, &steps[..before.len()]));
    let mut c_all = Loop::<1>::one();
    if let Some(c) = &c {
        if c.dtype() != to || c.shape().len() > shape.len() {
            return wrong(format!("{c:?} is not added to {out:?}"));
        }
        // What is broadcast has strides of 0.
        c_all = Loop::new(shape, [(c.shape(), c.strides())])?;
        let (sizes, strides) = (c.shape(), c.strides());
        let step = |from_end: usize| match sizes.len().checked_sub(from_end) {
            Some(axis) if sizes[axis] != 1 => strides[axis] as isize,
            _ => 0,
        };
        c_steps = [step(2), step(1)];
        let leading = sizes.len().saturating_sub(2);
        c_before = (&sizes[..leading], &strides[..leading]);
    }
    let _ = c_all;
    let bias = args.input(2);
    if let Some(bias) = &bias
        && (bias.shape() != [n] || bias.dtype() != to && (bias.dtype() != DType::F32 || to == DType::F64))
    {
        return wrong(format!("{bias:?} is no bias of {n} columns of {to}"));
    }
    let mut batch = Loop::new(before, [(before, &steps[..before.len()]), a_before, b_before, c_before])?;
    let mut sizes = Sizes { m: m as usize, n: n as usize, k: k as usize };
    let (mut row, mut a_row, mut c_row) = (row as isize, a_steps[0], c_steps[0]);
    // Matrices that have B in common and lie one after the other are one matrix.
    while batch.axes().len() > 0 {
        let (size, [o, x, w, r]) = batch.inner();
        let height = sizes.m as isize;
        let follows = |step: isize, row: isize| height == 1 || step == row * height;
        let same_c = beta == 0.0 || follows(r, c_row);
        if w != 0 || !(follows(o, row) && follows(x, a_row) && same_c) {
            break;
        }
        if height == 1 {
            (row, a_row, c_row) = (o, x, r);
        }
        sizes.m *= size;
        batch = batch.outer();
    }
    let start = out.raw().start();
    let a = Matrix { start: a.raw().start(), dtype: from, row: a_row, column: a_steps[1], packed: false };
    let b = Matrix {
        start: b.raw().start(),
        dtype: b_dtype,
        row: b_steps[0],
        column: b_steps[1],
        packed: packed.is_some(),
    };
    let c_start = c.as_ref().map_or(start, |c| c.raw().start());
    let epilogue = Epilogue {
        alpha: alpha as f32,
        beta: beta as f32,
        activation,
        bias: bias.map(|b| Matrix {
            start: b.raw().start(),
            dtype: b.dtype(),
            row: 0,
            column: b.strides()[0] as isize,
            packed: false,
        }),
        c: Matrix { start: c_start, dtype: to, row: c_row, column: c_steps[1], packed: false },
        out: Matrix { start, dtype: to, row, column: 1, packed: false },
        image: usize::MAX,
        images: 0,
    };
    Ok(Call { sizes, a, b: Source::Matrix(b), batch, epilogue })
}

/// The primitive.
pub struct Pack;

impl Kernel for Pack {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let transposed = flag(args, 0)?;
        let (Some(input), threads) = (args.input(0), args.threads()) else { return wrong("pack needs a weight") };
        let Some(([k, n], steps, (&[], _))) = split(&input, transposed) else {
            return wrong(format!("{input:?} is no weight"));
        };
        let out = &mut args.outputs[0];
        if out.shape() != [(n + 31) / 32, k, WIDTH as i64]
            || !matches!(input.dtype(), DType::F32 | DType::F16 | DType::Bf16)
        {
            return wrong(format!("{input:?} is not packed as {out:?}"));
        }
        let from =
            Matrix { start: input.raw().start(), dtype: input.dtype(), row: steps[0], column: steps[1], packed: false };
        let to = out.as_slice::<f32>()?;
        threads.each_chunk(to, (k as usize * WIDTH).max(1), |panel, to| {
            let columns = panel * WIDTH..((panel + 1) * WIDTH).min(n as usize);
            // SAFETY: `run_on` says that the CPU has the instructions; the matrix has these columns.
            unsafe { from.pack::<I>(0..k as usize, columns, to) };
        });
        Ok(())
    }
}

const _: () = assert!(RANK >= 8);
