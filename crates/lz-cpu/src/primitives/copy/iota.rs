//! Numbers that are evenly apart, and triangles.
//!
//! Iota: element i of the output, counted in row-major order, is `start + i · step`, rounded to the dtype.
//!
//! | | |
//! |---|---|
//! | output 0 | row-major; int64, int32 or float32, float64, float16, bfloat16 |
//! | param 0 | start; 0 by default |
//! | param 1 | step; 1 by default |
//!
//! Triangle: `out[…, i, j] = x[…, i, j]` where j - i ≥ diagonal (upper), or j - i ≤ diagonal (lower), and a value elsewhere.
//!
//! | | |
//! |---|---|
//! | input 0 | x, of the shape of the output |
//! | output 0 | row-major |
//! | param 0 | whether it is the upper one |
//! | param 1 | diagonal; 0 by default |
//! | param 2 | the value; 0 by default |
//!
//! In place: x.

use lz_abi::{Args, DType, KernelError, Param};

use super::super::elementwise::select::{Bits, bits_of};
use super::super::loops::parts;
use super::super::matmul::Products;
use super::super::{Kernel, param, wrong};
use super::Copy;
use half::{bf16, f16};

/// The primitive.
pub struct Iota;

impl Kernel for Iota {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let or = |at: usize, default: i64| match param(args, at) {
            Param::None => Param::Int(default),
            given => given,
        };
        let (start, step) = (or(0, 0), or(1, 1));
        let (Some(x), Some(by)) = (start.as_float(), step.as_float()) else {
            return wrong(format!("{start:?} and {step:?} are no numbers"));
        };
        let real = |i: usize| x + i as f64 * by;
        let (from, apart) = (start.as_int().unwrap_or(x as i64), step.as_int().unwrap_or(by as i64));
        // Floats towards 0 where they become integers, as torch has it.
        let whole = start.as_int().is_some() && step.as_int().is_some();
        let int = |i: usize| if whole { from.wrapping_add((i as i64).wrapping_mul(apart)) } else { real(i) as i64 };
        let out = &mut args.outputs[0];
        match out.dtype() {
            DType::I64 => out.as_slice::<i64>()?.iter_mut().enumerate().for_each(|(i, to)| *to = int(i)),
            DType::I32 => out.as_slice::<i32>()?.iter_mut().enumerate().for_each(|(i, to)| *to = int(i) as i32),
            DType::F32 => out.as_slice::<f32>()?.iter_mut().enumerate().for_each(|(i, to)| *to = real(i) as f32),
            DType::F64 => out.as_slice::<f64>()?.iter_mut().enumerate().for_each(|(i, to)| *to = real(i)),
            DType::F16 => {
                out.as_slice::<f16>()?.iter_mut().enumerate().for_each(|(i, to)| *to = f16::from_f64(real(i)))
            }
            DType::Bf16 => {
                out.as_slice::<bf16>()?.iter_mut().enumerate().for_each(|(i, to)| *to = bf16::from_f64(real(i)));
            }
            other => return wrong(format!("iota does not give {other}")),
        }
        Ok(())
    }
}

/// The primitive.
pub struct Triangle;

impl Kernel for Triangle {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let upper = param(args, 0).as_bool();
        let diagonal = match param(args, 1) {
            Param::None => Some(0),
            diagonal => diagonal.as_int(),
        };
        let (Some(upper), Some(diagonal)) = (upper, diagonal) else {
            return wrong(format!("{:?} are no side and diagonal", args.params()));
        };
        let value = match param(args, 2) {
            Param::None => Param::Int(0),
            value => value,
        };
        if let Some(input) = args.input(0) {
            if input.shape() != args.outputs[0].shape() {
                return wrong(format!("{input:?} has not the shape {:?}", args.outputs[0].shape()));
            }
            Copy::run::<I>(args)?;
        }
        let bits = bits_of(args.outputs[0].dtype(), value)?;
        match args.outputs[0].dtype().bits() {
            8 => fill_outside(args, upper, diagonal, bits as u8),
            16 => fill_outside(args, upper, diagonal, bits as u16),
            32 => fill_outside(args, upper, diagonal, bits as u32),
            64 => fill_outside(args, upper, diagonal, bits),
            _ => wrong(format!("triangle does not take {}", args.outputs[0].dtype())),
        }
    }
}

/// The matrices, for several threads.
struct Shared<T>(*mut T);

// SAFETY: every part writes rows of its own.
unsafe impl<T> Sync for Shared<T> {}

fn fill_outside<T: Bits>(args: &mut Args<'_, '_>, upper: bool, diagonal: i64, value: T) -> Result<(), KernelError> {
    let (threads, out) = (args.threads(), &args.outputs[0]);
    let (Some(&[height, width]), true) = (out.shape().last_chunk::<2>(), out.is_contiguous()) else {
        return wrong(format!("triangle needs a row-major output of two axes or more, not {out:?}"));
    };
    let rows = out.len().checked_div(width as usize).unwrap_or(0);
    let parts = parts(out.len(), size_of::<T>(), threads);
    let start = Shared(out.raw().start().cast::<T>());
    threads.each(parts, |part| {
        let start = &start;
        for row in rows * part / parts..rows * (part + 1) / parts {
            let first = (row as i64 % height).saturating_add(diagonal);
            let outside = match upper {
                true => 0..first.clamp(0, width),
                false => first.saturating_add(1).clamp(0, width)..width,
            };
            // SAFETY: a piece of a row of the output, which no other part writes.
            unsafe {
                let at = start.0.add(row * width as usize + outside.start as usize);
                std::slice::from_raw_parts_mut(at, (outside.end - outside.start) as usize).fill(value);
            }
        }
    });
    Ok(())
}
