//! Several tensors along an axis, and a tensor with a margin.
//!
//! Concat: the inputs one after the other along an axis.
//!
//! | | |
//! |---|---|
//! | inputs | one or more, of the dtype of the output, alike but for that axis |
//! | output 0 | |
//! | param 0 | the axis, counted from the end if it is negative |
//!
//! Pad: x, and a value around it.
//!
//! | | |
//! |---|---|
//! | input 0 | x |
//! | output 0 | its sizes say how much is behind x |
//! | param 0 | the value; 0 by default |
//! | params 1… | how many elements are before x along axis 0, axis 1, …; where the list ends: 0 |
//!
//! Neither is in place.

use lz_abi::{Args, KernelError, Param};

use super::super::elementwise::cast::Fill;
use super::super::loops::Loop;
use super::super::matmul::Products;
use super::super::{Kernel, param, wrong};
use super::any_width;

/// The primitive.
pub struct Concat;

impl Kernel for Concat {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let (threads, out) = (args.threads(), &args.outputs[0]);
        let (shape, strides, bits) = (out.shape(), out.strides(), out.dtype().bits());
        let axis = param(args, 0).as_int().map(|axis| if axis < 0 { axis + shape.len() as i64 } else { axis });
        let Some(axis) = axis.and_then(|a| usize::try_from(a).ok()).filter(|&axis| axis < shape.len()) else {
            return wrong(format!("{:?} is no axis of {shape:?}", args.params()));
        };
        let mut first = 0;
        for input in args.inputs() {
            let sizes = if input.is_present() { input.shape() } else { &[] };
            let alike = sizes.len() == shape.len() && (0..shape.len()).all(|i| i == axis || sizes[i] == shape[i]);
            if !alike || input.dtype().bits() != bits || bits < 8 || sizes[axis] > shape[axis] - first {
                return wrong(format!("{input:?} is no part of {shape:?} along axis {axis}"));
            }
            let walk = Loop::new(sizes, [(sizes, strides), (sizes, input.strides())])?;
            let bytes = bits as usize / 8;
            let to = out.raw().start().wrapping_offset((first * strides[axis]) as isize * bytes as isize);
            // SAFETY: `run_on` says that the CPU has the instructions. Both loops stay inside their tensors: the parts are as long
            // as the axis together.
            unsafe { any_width::<I>(bytes, walk, input.raw().start(), to, threads)? };
            first += sizes[axis];
        }
        if first != shape[axis] {
            return wrong(format!("the inputs have {first} elements along axis {axis} of {shape:?}"));
        }
        Ok(())
    }
}

/// The primitive.
pub struct Pad;

impl Kernel for Pad {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let Some(input) = args.input(0) else { return wrong("pad needs an input") };
        let out = &args.outputs[0];
        let (sizes, shape, strides, bits) = (input.shape(), out.shape(), out.strides(), out.dtype().bits());
        let mut place = 0;
        let mut fits = sizes.len() == shape.len() && input.dtype().bits() == bits && bits >= 8;
        for axis in 0..shape.len().min(sizes.len()) {
            let before = match param(args, 1 + axis) {
                Param::None => Some(0),
                before => before.as_int(),
            };
            let before = before.filter(|&before| (0..=shape[axis].saturating_sub(sizes[axis])).contains(&before));
            fits &= before.is_some() && sizes[axis] <= shape[axis];
            place += before.unwrap_or(0) * strides[axis];
        }
        if !fits {
            return wrong(format!("{input:?} with the margins {:?} is not {shape:?}", args.params()));
        }
        let bytes = bits as usize / 8;
        let to = out.raw().start().wrapping_offset(place as isize * bytes as isize);
        let walk = Loop::new(sizes, [(sizes, strides), (sizes, input.strides())])?;
        if sizes != shape {
            match param(args, 0) {
                Param::None => super::super::elementwise::cast::fill_with(args, Param::Int(0))?,
                _ => Fill::run::<I>(args)?,
            }
        }
        // SAFETY: `run_on` says that the CPU has the instructions. x with what is before it is inside the output.
        unsafe { any_width::<I>(bytes, walk, input.raw().start(), to, args.threads()) }
    }
}
