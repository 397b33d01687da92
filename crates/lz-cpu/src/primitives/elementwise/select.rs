//! One of two tensors, element by element.
//!
//! `out = condition ? a : b`, all broadcast to the shape of the output.
//!
//! | | |
//! |---|---|
//! | input 0 | condition: bool (or any integers of one byte: 0 is false) |
//! | input 1 | a, of the dtype of the output |
//! | input 2 | b, of the dtype of the output |
//! | output 0 | any dtype of whole bytes |
//! | param 0 | a number in place of a |
//! | param 1 | a number in place of b, as for a mask that fills |
//!
//! In place: a or b. The bits of elements are copied; a number is rounded to the dtype.

use lz_abi::{Args, KernelError, Param, numeric};

use super::super::loops::{Layout, Loop, part, parts};
use super::super::matmul::Products;
use super::super::{Kernel, param, wrong};
use super::blocks::BLOCK;
use crate::simd::{Isa, Portable, Work};

/// The primitive.
pub struct Where;

impl Kernel for Where {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        match args.outputs[0].dtype().bits() {
            8 => run::<Portable, u8>(args),
            16 => run::<Portable, u16>(args),
            32 => run::<I::Simple, u32>(args),
            64 => run::<Portable, u64>(args),
            _ => wrong(format!("where does not take {}", args.outputs[0].dtype())),
        }
    }
}

/// The bits of a number of a dtype, in the lowest bytes.
pub(in crate::primitives) fn bits_of(dtype: lz_abi::DType, param: Param) -> Result<u64, KernelError> {
    let mut bytes = [0u8; 8];
    match param {
        Param::Int(number) => numeric::store_int(dtype, &mut bytes, 0, number),
        Param::Bool(truth) => numeric::store(dtype, &mut bytes, 0, f64::from(u8::from(truth))),
        Param::Float(number) => numeric::store(dtype, &mut bytes, 0, number),
        other => return wrong(format!("{other:?} is no number")),
    }
    Ok(u64::from_le_bytes(bytes))
}

/// Bits that are copied.
pub(in crate::primitives) trait Bits: Copy + Default + Send + Sync + 'static {
    /// The lowest of 64 bits.
    fn of(bits: u64) -> Self;
}

macro_rules! bits {
    ($($type:ty)+) => {
        $(impl Bits for $type {
            fn of(bits: u64) -> $type {
                bits as $type
            }
        })+
    };
}

bits!(u8 u16 u32 u64);

/// Addresses that threads share.
struct Shared<T>(*mut T, *const u8, [*const T; 2]);

// SAFETY: every part of a call writes elements of its own.
unsafe impl<T> Sync for Shared<T> {}

fn run<I: Isa, T: Bits>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
    let (condition, threads, out) = (args.input(0), args.threads(), &args.outputs[0]);
    let Some(condition) = condition.filter(|condition| condition.dtype().bits() == 8) else {
        return wrong("where needs a condition of one byte");
    };
    let (shape, strides, dtype, start) = (out.shape(), out.strides(), out.dtype(), out.raw().start());
    let mut numbers = [T::default(); 2];
    let mut layouts: [Layout<'_>; 2] = [(shape, strides); 2];
    let mut addresses = [start.cast_const().cast::<T>(); 2];
    for i in 0..2 {
        if !matches!(param(args, i), Param::None) {
            numbers[i] = T::of(bits_of(dtype, param(args, i))?);
            (addresses[i], layouts[i]) = (std::ptr::null(), (&[][..], &[][..]));
        } else if let Some(input) = args.input(1 + i) {
            if input.dtype() != dtype {
                return wrong(format!("where of {} does not give {dtype}", input.dtype()));
            }
            (addresses[i], layouts[i]) = (input.raw().start().cast_const().cast(), (input.shape(), input.strides()));
        }
    }
    let walk = Loop::new(shape, [(shape, strides), (condition.shape(), condition.strides()), layouts[0], layouts[1]])?;
    let parts = parts(walk.len(), size_of::<T>(), threads);
    let shared = Shared(start.cast::<T>(), condition.raw().start().cast_const(), addresses);
    let steps = walk.inner().1;
    threads.each(parts, |at| {
        let Shared(out, condition, of) = &shared;
        walk.pieces(part(walk.len(), at, parts), |count, [o, c, a, b]| {
            let address = |i: usize, place: isize| match of[i].is_null() {
                true => (&raw const numbers[i], 0),
                false => (of[i].wrapping_offset(place), steps[2 + i]),
            };
            let (out, condition) = ((out.wrapping_offset(o), steps[0]), (condition.wrapping_offset(c), steps[1]));
            // SAFETY: `run_on` says that the CPU has the instructions; the loop reaches elements of these tensors only.
            unsafe { I::call(Selected { count, out, condition, a: address(0, a), b: address(1, b) }) };
        });
    });
    Ok(())
}

/// Addresses with steps.
struct Selected<T> {
    count: usize,
    out: (*mut T, isize),
    condition: (*const u8, isize),
    a: (*const T, isize),
    b: (*const T, isize),
}

/// Elements that follow each other: where they are, or in a buffer.
#[inline(always)]
unsafe fn near<T: Copy>(
    (at, step): (*const T, isize),
    first: usize,
    count: usize,
    buffer: &mut [T; BLOCK],
) -> *const T {
    // SAFETY: the caller's.
    unsafe {
        match step {
            1 => return at.add(first),
            0 => buffer[..count].fill(*at),
            _ => (0..count).for_each(|i| buffer[i] = *at.offset((first + i) as isize * step)),
        }
    }
    buffer.as_ptr()
}

impl<T: Bits> Work for Selected<T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut buffers = [[T::default(); BLOCK]; 2];
        let (mut truth, mut found) = ([0u8; BLOCK], [T::default(); BLOCK]);
        let [in_a, in_b] = &mut buffers;
        for first in (0..self.count).step_by(BLOCK) {
            let count = BLOCK.min(self.count - first);
            // SAFETY: who makes one vouches for the addresses. Results are stored after the arguments were read.
            unsafe {
                let c = std::slice::from_raw_parts(near(self.condition, first, count, &mut truth), count);
                let a = std::slice::from_raw_parts(near(self.a, first, count, in_a), count);
                let b = std::slice::from_raw_parts(near(self.b, first, count, in_b), count);
                for (((found, c), a), b) in found[..count].iter_mut().zip(c).zip(a).zip(b) {
                    *found = if *c != 0 { *a } else { *b };
                }
                let (out, step) = self.out;
                match step {
                    1 => std::ptr::copy_nonoverlapping(found.as_ptr(), out.add(first), count),
                    _ => (0..count).for_each(|i| out.offset((first + i) as isize * step).write(found[i])),
                }
            }
        }
    }
}
