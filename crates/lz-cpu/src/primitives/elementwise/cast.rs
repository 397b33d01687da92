//! Another dtype, and one number everywhere.
//!
//! Cast: `out = x` in the dtype of the output, x broadcast to its shape.
//!
//! | | |
//! |---|---|
//! | input 0 | x |
//! | output 0 | any dtype of whole bytes but the 8-bit floats |
//!
//! Not in place. Floats are rounded to nearest, half to even (float64 to the half floats through float32, as torch does), integers
//! wrap, floats become integers towards 0 (at the ends of int32, or of int64 for int64, and 0 for a NaN), and bool is "not 0".
//!
//! Fill: `out = value`, rounded to the dtype.
//!
//! | | |
//! |---|---|
//! | output 0 | any dtype of whole bytes |
//! | param 0 | the value |

use lz_abi::{Args, DType, KernelError, Param};

use super::super::loops::{Loop, part, parts};
use super::super::matmul::Products;
use super::super::{Kernel, param, wrong};
use super::blocks::{Codec, Conversion, Tensor};
use super::numbers::{Number, with_wide};
use super::select::{Bits, bits_of};
use crate::simd::{Isa, Portable, Work};

/// The primitive.
pub struct Cast;

impl Kernel for Cast {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let Some(input) = args.input(0) else { return wrong("cast needs an input") };
        let (from, to) = (input.dtype(), args.outputs[0].dtype());
        if from == to {
            return super::super::copy::Copy::run::<I>(args);
        }
        let (threads, out) = (args.threads(), &args.outputs[0]);
        let walk = Loop::new(out.shape(), [(out.shape(), out.strides()), (input.shape(), input.strides())])?;
        let of = |start: *mut u8, dtype: DType| {
            Ok::<_, KernelError>(Tensor { start, codec: Codec::of::<I>(dtype)?, scalar: None })
        };
        let tensors = [of(out.raw().start(), to)?, of(input.raw().start(), from)?];
        let convert: unsafe fn(usize, *const u8, *mut u8) = match to {
            DType::Bool => with_wide!(from, A => convert::<Portable, A, i32, true>),
            to => with_wide!(from, A => with_wide!(to, B => convert::<Portable, A, B, false>)),
        };
        // SAFETY: `run_on` says that the CPU has the instructions; the loop reaches elements of these tensors only.
        unsafe { Conversion { walk, tensors, convert }.each(threads) };
        Ok(())
    }
}

/// Makes numbers of other ones.
///
/// # Safety
/// This CPU has the instructions of `I`; so many numbers may be read and written, and do not overlap.
pub(in crate::primitives) unsafe fn convert<I: Isa, A: Number, B: From64, const TRUTH: bool>(
    n: usize,
    from: *const u8,
    to: *mut u8,
) {
    // SAFETY: the caller's.
    unsafe {
        let (from, to) =
            (std::slice::from_raw_parts(from.cast::<A>(), n), std::slice::from_raw_parts_mut(to.cast::<B>(), n));
        I::call(Converted { from, to, truth: TRUTH });
    }
}

/// A number of another one.
pub(in crate::primitives) trait From64: Number {
    fn from_f64(x: f64) -> Self;
    fn from_i64(x: i64) -> Self;
}

macro_rules! from {
    ($($type:ty)+) => {
        $(impl From64 for $type {
            #[inline(always)]
            fn from_f64(x: f64) -> $type {
                x as $type
            }
            #[inline(always)]
            fn from_i64(x: i64) -> $type {
                x as $type
            }
        })+
    };
}

from!(f32 f64 i32 i64);

/// Numbers as numbers of another type.
struct Converted<'a, A, B> {
    from: &'a [A],
    to: &'a mut [B],
    /// Whether only "not 0" matters.
    truth: bool,
}

impl<A: Number, B: From64> Work for Converted<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let all = self.to.iter_mut().zip(self.from);
        let floats = std::any::TypeId::of::<A>() == std::any::TypeId::of::<f32>()
            || std::any::TypeId::of::<A>() == std::any::TypeId::of::<f64>();
        if self.truth {
            all.for_each(|(to, from)| *to = B::from_i64(from.is_true().into()));
        } else if floats {
            all.for_each(|(to, from)| *to = B::from_f64(from.to_f64()));
        } else {
            all.for_each(|(to, from)| *to = B::from_i64(from.to_i64()));
        }
    }
}

/// An address that threads share.
struct Shared<T>(*mut T);

// SAFETY: every part of a call writes elements of its own.
unsafe impl<T> Sync for Shared<T> {}

/// The primitive.
pub struct Fill;

impl Kernel for Fill {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let value = param(args, 0);
        fill_with(args, value)
    }
}

/// Fills the output with a value.
pub(in crate::primitives) fn fill_with(args: &mut Args<'_, '_>, value: Param) -> Result<(), KernelError> {
    let dtype = args.outputs[0].dtype();
    let bits = bits_of(dtype, value)?;
    match dtype.bits() {
        8 => fill(args, bits as u8),
        16 => fill(args, bits as u16),
        32 => fill(args, bits as u32),
        64 => fill(args, bits),
        _ => wrong(format!("fill does not take {dtype}")),
    }
}

fn fill<T: Bits>(args: &mut Args<'_, '_>, value: T) -> Result<(), KernelError> {
    let (threads, out) = (args.threads(), &args.outputs[0]);
    let walk = Loop::new(out.shape(), [(out.shape(), out.strides())])?;
    let shared = Shared(out.raw().start().cast::<T>());
    let (parts, step) = (parts(walk.len(), size_of::<T>(), threads), walk.inner().1[0]);
    threads.each(parts, |at| {
        let Shared(out) = &shared;
        walk.pieces(part(walk.len(), at, parts), |count, [place]| {
            let out = out.wrapping_offset(place);
            // SAFETY: the loop reaches elements of the output only, and other parts write others.
            unsafe {
                match step {
                    1 => std::slice::from_raw_parts_mut(out, count).fill(value),
                    _ => (0..count as isize).for_each(|i| out.offset(i * step).write(value)),
                }
            }
        });
    });
    Ok(())
}
