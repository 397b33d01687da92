//! Small calls of float32 tensors that lie alike: nothing is walked, converted or shared between threads.
//!
//! Most steps of small models are such calls. What a call costs beside its elements matters there: tens of nanoseconds instead
//! of hundreds.

use lz_abi::{Args, DType, Param};

use super::super::loops::parts;
use super::super::param;
use super::lanes::Operand;

/// Elements up to which results are written where an argument is. More are copied first, so that loops can be vectorized.
const MOST_IN_PLACE: usize = 64;

/// A call's elements: how many, its arguments, and where results go.
pub struct Plain<const N: usize> {
    pub count: usize,
    pub of: [Operand<f32>; N],
    pub to: *mut f32,
}

impl<const N: usize> Plain<N> {
    /// Of a call with `N` arguments, if it is such a call, and one thread does it. Each argument is a tensor of the result's sizes and
    /// strides, or one number. An element takes as long as copying `weight` bytes for each of its bytes.
    #[inline(always)]
    pub fn of(args: &Args<'_, '_>, scalars: [Param; N], weight: usize) -> Option<Plain<N>> {
        let out = &args.outputs[0];
        let count = out.len();
        if out.dtype() != DType::F32 || count == 0 || !out.is_contiguous() {
            return None;
        }
        if parts(count, weight * size_of::<f32>(), args.threads()) > 1 {
            return None;
        }
        let to = out.raw().start().cast::<f32>();
        let mut of = [Operand::One(0.0); N];
        for (i, one) in of.iter_mut().enumerate() {
            *one = match scalars[i] {
                Param::None => match args.input(i) {
                    None if count <= MOST_IN_PLACE => Operand::Many(to.cast_const()),
                    Some(input) if input.dtype() == DType::F32 => {
                        let start = input.raw().start().cast::<f32>().cast_const();
                        let alike = input.shape() == out.shape() && input.strides() == out.strides();
                        match alike {
                            true => Operand::Many(start),
                            // SAFETY: the one element of a tensor, which any index leads to, with an axis for each size of 1.
                            false if input.len() == 1 && input.shape().len() <= out.shape().len() => {
                                Operand::One(unsafe { start.read() })
                            }
                            false => return None,
                        }
                    }
                    _ => return None,
                },
                Param::Float(number) => Operand::One(number as f32),
                _ => return None,
            };
        }
        Some(Plain { count, of, to })
    }
}

/// The parameters that may be numbers in the place of two arguments.
#[inline(always)]
pub fn two_scalars(args: &Args<'_, '_>) -> [Param; 2] {
    [param(args, 2), param(args, 1)]
}
