//! Copies of elements, bit by bit.
//!
//! Copy: `out = x`, x broadcast to the shape of the output. Of a view with other strides it makes a row-major tensor, into one it
//! writes a part of a tensor, and x may be a slice, a transposed or an expanded tensor.
//!
//! | | |
//! |---|---|
//! | input 0 | x, of the dtype of the output (or of another one of as many bits) |
//! | output 0 | any strides |
//!
//! Permute: axis i of the output is axis `order[i]` of x.
//!
//! | | |
//! |---|---|
//! | input 0 | x |
//! | output 0 | |
//! | params | order: as many integers as there are axes |
//!
//! Slice: element i along an axis of the output is element `start + i · step` of x.
//!
//! | | |
//! |---|---|
//! | input 0 | x |
//! | output 0 | its sizes say how many elements are taken |
//! | params | start and step of axis 0, start and step of axis 1, …; where the list ends: 0 and 1 |
//!
//! None of them is in place.

use lz_abi::{Args, KernelError, Param, Threads};

use super::loops::{Loop, RANK};
use super::matmul::Products;
use super::{Kernel, param, wrong};

pub mod concat;
pub mod iota;
pub(super) mod strided;

#[cfg(test)]
mod tests;

/// The primitive.
pub struct Copy;

impl Kernel for Copy {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let Some(input) = args.input(0) else { return wrong("copy needs an input") };
        let (shape, strides) = (input.shape(), input.strides());
        copy_view::<I>(args, shape, strides, input.raw().start())
    }
}

/// Copies a view of input 0 to the output.
fn copy_view<I: Products>(
    args: &mut Args<'_, '_>,
    shape: &[i64],
    strides: &[i64],
    start: *const u8,
) -> Result<(), KernelError> {
    let (Some(input), threads, out) = (args.input(0), args.threads(), &args.outputs[0]) else {
        return wrong("copy needs an input");
    };
    let bits = out.dtype().bits();
    if input.dtype().bits() != bits || bits < 8 {
        return wrong(format!("copy of {} does not give {}", input.dtype(), out.dtype()));
    }
    let walk = Loop::new(out.shape(), [(out.shape(), out.strides()), (shape, strides)])?;
    // SAFETY: `run_on` says that the CPU has the instructions. The loop reaches elements of these tensors only: of the view, the
    // callers check that.
    unsafe { any_width::<I>(bits as usize / 8, walk, start, out.raw().start(), threads) }
}

/// [`strided::copy`] of elements of so many bytes.
///
/// # Safety
/// As of [`strided::copy`].
pub(super) unsafe fn any_width<I: Products>(
    bytes: usize,
    walk: Loop<2>,
    from: *const u8,
    to: *mut u8,
    threads: Threads<'_>,
) -> Result<(), KernelError> {
    // SAFETY: the caller's.
    unsafe {
        match bytes {
            1 => strided::copy::<I, u8>(walk, from.cast(), to.cast(), threads),
            2 => strided::copy::<I, u16>(walk, from.cast(), to.cast(), threads),
            4 => strided::copy::<I, f32>(walk, from.cast(), to.cast(), threads),
            8 => strided::copy::<I, u64>(walk, from.cast(), to.cast(), threads),
            _ => return wrong(format!("elements of {bytes} bytes are not copied")),
        }
    }
    Ok(())
}

/// The primitive.
pub struct Permute;

impl Kernel for Permute {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let Some(input) = args.input(0) else { return wrong("permute needs an input") };
        let rank = input.shape().len();
        let (mut shape, mut strides, mut seen) = ([0i64; RANK], [0i64; RANK], [false; RANK]);
        for to in 0..rank {
            let from = param(args, to).as_int().and_then(|axis| usize::try_from(axis).ok());
            let from = from.filter(|&axis| axis < rank && rank <= RANK && !seen[axis]);
            let Some(from) = from else { return wrong(format!("{:?} is no order of {rank} axes", args.params())) };
            seen[from] = true;
            (shape[to], strides[to]) = (input.shape()[from], input.strides()[from]);
        }
        if args.outputs[0].shape() != &shape[..rank] {
            return wrong(format!(
                "a permuted tensor has the shape {:?}, not {:?}",
                &shape[..rank],
                args.outputs[0].shape()
            ));
        }
        copy_view::<I>(args, &shape[..rank], &strides[..rank], input.raw().start())
    }
}

/// The primitive.
pub struct Slice;

impl Kernel for Slice {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let Some(input) = args.input(0) else { return wrong("slice needs an input") };
        let (from, to) = (input.shape(), args.outputs[0].shape());
        if from.len() != to.len() || to.len() > RANK {
            return wrong(format!("a slice of {from:?} does not have the shape {to:?}"));
        }
        let (mut strides, mut place) = ([0i64; RANK], 0i64);
        for axis in 0..to.len() {
            let number = |at: usize, default: i64| match param(args, at) {
                Param::None => Some(default),
                param => param.as_int(),
            };
            let (Some(start), Some(step)) = (number(2 * axis, 0), number(2 * axis + 1, 1)) else {
                return wrong(format!("{:?} are no starts and steps", args.params()));
            };
            let last = step.checked_mul(to[axis] - 1).and_then(|span| start.checked_add(span));
            let inside = |at: i64| (0..from[axis]).contains(&at);
            if to[axis] > 0 && !(inside(start) && last.is_some_and(inside)) {
                return wrong(format!("axis {axis} of {from:?} has no {} elements from {start} by {step}", to[axis]));
            }
            strides[axis] = input.strides()[axis].wrapping_mul(step);
            place += if to[axis] > 0 { start * input.strides()[axis] } else { 0 };
        }
        let bytes = i64::from(input.dtype().bits() / 8);
        copy_view::<I>(args, to, &strides[..to.len()], input.raw().start().wrapping_offset((place * bytes) as isize))
    }
}
