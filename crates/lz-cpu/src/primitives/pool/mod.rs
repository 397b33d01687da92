//! The largest or the mean of windows over one or two axes.
//!
//! | | |
//! |---|---|
//! | input 0 | x `[N, C, L]` or `[N, C, H, W]`: float32, float16 or bfloat16, or row-major float64 |
//! | output 0 | `[N, C, …]` of the dtype of x, row-major: its sizes say how many windows there are, each of which begins in x or before it |
//! | param 0 | the operation: [`PoolOp`] |
//! | param 1 | whether a mean counts what is within `padding` of x, as zeros; true by default |
//! | params 2… | sizes of a window along each axis, then its stride along each axis, then the padding of each axis |
//!
//! Not in place. The largest of windows with a NaN is NaN. Sums are made in float32, or in float64 of float64.

use lz_abi::{Args, DType, KernelError, Param};

use super::kinds::kinds;
use super::matmul::operand::Matrix;
use super::matmul::{Activation, Products};
use super::windows::planes::{Planes, SLACK, steps, store};
use super::windows::{Geometry, doubles};
use super::{Kernel, Meta, param, wrong};
use crate::simd::{Isa, Work};

#[cfg(test)]
mod tests;

kinds! {
    /// What is made of a window.
    PoolOp {
        /// Its largest element; NaN where one is
        Max = "max",
        /// Its mean
        Avg = "avg",
    }
}

/// Elements of windows below which one thread does all: about 5 µs of one core.
const ONE_THREAD: usize = 1 << 16;

/// The primitive.
pub struct Pool;

/// The windows of a call, as many as fit if the last ones need not be whole.
fn geometry(x: &[i64], params: &[Param]) -> Option<Geometry> {
    let axes = x.len().checked_sub(2).filter(|axes| (1..=2).contains(axes))?;
    let mut windows = Geometry::ONE;
    for axis in 0..axes {
        let number = |of: usize| usize::try_from(params.get(2 + of * axes + axis)?.as_int()?).ok();
        let (at, size) = (axis + 2 - axes, x[2 + axis] as usize);
        windows.input[at] = size;
        (windows.kernel[at], windows.stride[at], windows.padding[at]) = (number(0)?, number(1)?, number(2)?);
        if windows.kernel[at] == 0 || windows.stride[at] == 0 || windows.padding[at] >= windows.kernel[at] {
            return None;
        }
        windows.output[at] = (size + windows.padding[at]).div_ceil(windows.stride[at]);
    }
    Some(windows)
}

/// float32 numbers of one thread: a plane, and its result.
fn numbers(windows: &Geometry) -> [usize; 2] {
    [windows.len() + SLACK, windows.windows() + SLACK].map(|count| count.next_multiple_of(16))
}

impl Kernel for Pool {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let op = PoolOp::of(param(args, 0))?;
        let counts = !matches!(param(args, 1), Param::Bool(false));
        let (input, threads, out) = (args.input(0), args.threads(), &args.outputs[0]);
        let Some(x) = input.filter(|x| matches!(x.dtype(), DType::F32 | DType::F16 | DType::Bf16 | DType::F64)) else {
            return wrong("pool needs an input of floats");
        };
        let Some(mut windows) = geometry(x.shape(), args.params()) else {
            return wrong(format!("{x:?} has no windows of {:?}", args.params()));
        };
        let skipped = 4usize.saturating_sub(out.shape().len());
        let fits = out.shape().len() == x.shape().len()
            && out.shape()[..2] == x.shape()[..2]
            && out.shape()[2..].iter().zip(&windows.output[skipped..]).all(|(&wanted, &most)| wanted <= most as i64);
        if !fits || out.dtype() != x.dtype() || !out.is_contiguous() {
            return wrong(format!("windows of {x:?} by {:?} are not {out:?}", args.params()));
        }
        out.shape()[2..].iter().zip(&mut windows.output[skipped..]).for_each(|(&size, to)| *to = size as usize);
        let (images, channels) = (x.shape()[0] as usize, x.shape()[1] as usize);
        let planes = images * channels;
        if planes * windows.windows() == 0 {
            return Ok(());
        }
        if x.dtype() == DType::F64 {
            let (x, out) = (x.as_slice()?, args.outputs[0].as_slice()?);
            match op {
                PoolOp::Max => doubles::largest(&windows, threads, x, out),
                PoolOp::Avg => doubles::mean(&windows, counts, threads, x, out),
            }
            return Ok(());
        }
        let from = Planes { start: x.raw().start(), dtype: x.dtype(), steps: steps(&x) };
        let row = windows.windows() as isize;
        let to = Matrix { start: out.raw().start(), dtype: out.dtype(), row, column: 1, packed: false };
        let work = planes * windows.windows() * windows.taps();
        let workers = if work < ONE_THREAD { 1 } else { threads.count().min(planes) };
        let parts = numbers(&windows);
        let slot = parts.iter().sum::<usize>();
        let memory = args.workspace().take::<f32>(slot * workers)?;
        let outside = if op == PoolOp::Max { f32::NEG_INFINITY } else { 0.0 };
        threads.each_chunk(memory, slot, |worker, slot| {
            let (plane, result) = slot.split_at_mut(parts[0]);
            let result = &mut result[..windows.windows()];
            for at in (worker..planes).step_by(workers) {
                let place = (at / channels, at % channels);
                // SAFETY: `run_on` says that the CPU has the instructions. x and the output have this plane, which no other thread
                // has.
                unsafe {
                    from.copy::<I::Simple>(place, &windows, outside, plane);
                    I::Simple::call(Pooling { op, counts, windows: &windows, plane, to: result });
                    store::<I>(result, Activation::None, to.at(at as isize * to.row));
                }
            }
        });
        Ok(())
    }

    fn scratch(inputs: &[Option<Meta<'_>>], params: &[Param], threads: usize) -> usize {
        let windows = inputs.first().copied().flatten().and_then(|x| geometry(x.shape, params));
        windows.map_or(0, |windows| numbers(&windows).iter().sum::<usize>() * size_of::<f32>() * threads.max(1))
    }
}

/// The windows of a plane.
struct Pooling<'a> {
    op: PoolOp,
    counts: bool,
    windows: &'a Geometry,
    plane: &'a [f32],
    to: &'a mut [f32],
}

impl Work for Pooling<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let windows = self.windows;
        let (width, row) = (windows.output[1], windows.row());
        let to = std::mem::take(&mut self.to);
        for (y, to) in to.chunks_exact_mut(width).enumerate() {
            let plane = &self.plane[y * windows.stride[0] * row..];
            to.copy_from_slice(&plane[..width]);
            for tap in 1..windows.taps() {
                let all = to.iter_mut().zip(&plane[windows.tap(tap, row)..][..width]);
                match self.op {
                    // A comparison that leaves a NaN of either.
                    PoolOp::Max => all.for_each(|(to, x)| *to = if *x > *to || x.is_nan() { *x } else { *to }),
                    PoolOp::Avg => all.for_each(|(to, x)| *to += x),
                }
            }
            if self.op == PoolOp::Avg {
                let rows = windows.counted(0, y, self.counts);
                to.iter_mut().enumerate().for_each(|(x, to)| *to /= (rows * windows.counted(1, x, self.counts)) as f32);
            }
        }
    }
}
