//! Elements and rows by their indices.
//!
//! Indices are int64 or int32; -1 is the last element along an axis. One that is outside the axis is [`KernelError::BadData`], found
//! before anything is written. Where a result names a place twice, the later element stays (or all are added, with `add`).
//!
//! IndexSelect: `out[…, j, …] = x[…, index[j], …]` along an axis.
//!
//! | | |
//! |---|---|
//! | input 0 | x |
//! | input 1 | index, of one axis |
//! | output 0 | of the dtype of x |
//! | param 0 | the axis, counted from the end if it is negative |
//!
//! Gather: `out[i, j, k] = x[i, index[i, j, k], k]` along an axis (here the second one).
//!
//! | | |
//! |---|---|
//! | input 0 | x |
//! | input 1 | index, of the shape of the output, which has at most the sizes of x along other axes |
//! | output 0 | of the dtype of x |
//! | param 0 | the axis |
//!
//! IndexCopy: `out = x`, then `out[…, index[j], …] = source[…, j, …]` along an axis: what appends to a KV cache.
//!
//! | | |
//! |---|---|
//! | input 0 | x, of the shape and dtype of the output |
//! | input 1 | index, of one axis |
//! | input 2 | source, of the dtype of x |
//! | output 0 | |
//! | param 0 | the axis |
//!
//! In place: x.
//!
//! Scatter: `out = x`, then `out[i, index[i, j, k], k] = source[i, j, k]` along an axis (here the second one).
//!
//! | | |
//! |---|---|
//! | input 0 | x, of the shape and dtype of the output |
//! | input 1 | index |
//! | input 2 | source, of the shape of index |
//! | output 0 | |
//! | param 0 | the axis |
//! | param 1 | a number in place of the source |
//!
//! In place: x.
//!
//! Index: `out[s…, k…] = x[i₀[s…], i₁[s…], …, k…]`: the first axes by as many indices, which are broadcast together.
//!
//! | | |
//! |---|---|
//! | input 0 | x |
//! | inputs 1… | i₀, i₁, … |
//! | output 0 | of the dtype of x |
//!
//! IndexPut: `out = x`, then `out[i₀[s…], i₁[s…], …, k…] = values[s…, k…]`.
//!
//! | | |
//! |---|---|
//! | input 0 | x, of the shape and dtype of the output |
//! | input 1 | values, broadcast to the shape `[s…, k…]` |
//! | inputs 2… | i₀, i₁, … |
//! | output 0 | |
//! | param 0 | whether values are added to what is there; false by default. Added in float64 or int64, and rounded |
//!
//! In place: x.

use lz_abi::{Args, DType, KernelError, Param, TensorMut, TensorRef, numeric};

use super::copy::{Copy, any_width};
use super::elementwise::select::bits_of;
use super::loops::{Loop, RANK};
use super::matmul::Products;
use super::{Kernel, param, wrong};

#[cfg(test)]
mod tests;

/// Indices in memory.
#[derive(Clone, Copy)]
struct Indices<'a> {
    tensor: TensorRef<'a>,
    name: &'static str,
}

/// Where a tensor is, in elements, bytes of one, and its axes.
#[derive(Clone, Copy)]
struct Place {
    start: *mut u8,
    bytes: isize,
}

impl<'a> Indices<'a> {
    fn new(args: &Args<'_, 'a>, at: usize, name: &'static str) -> Result<Indices<'a>, KernelError> {
        match args.inputs().get(at).filter(|input| input.is_present()) {
            Some(tensor) if matches!(tensor.dtype(), DType::I64 | DType::I32) => Ok(Indices { tensor: *tensor, name }),
            Some(tensor) => wrong(format!("{name} is {}, neither int64 nor int32", tensor.dtype())),
            None => wrong(format!("{name} is missing")),
        }
    }

    /// The index at a place, in elements.
    #[inline(always)]
    fn at(&self, place: isize) -> i64 {
        let start = self.tensor.raw().start();
        // SAFETY: callers name places of elements.
        unsafe {
            match self.tensor.dtype() {
                DType::I64 => start.cast::<i64>().offset(place).read(),
                _ => i64::from(start.cast::<i32>().offset(place).read()),
            }
        }
    }

    /// Fails where one of them is outside an axis of so many elements.
    fn check(&self, size: i64) -> Result<(), KernelError> {
        let (shape, strides) = (self.tensor.shape(), self.tensor.strides());
        let walk = Loop::new(shape, [(shape, strides)])?;
        let (mut bad, step) = (None, walk.inner().1[0]);
        let mut before = 0;
        walk.pieces(0..walk.len(), |count, [place]| {
            for i in 0..count {
                let index = self.at(place + i as isize * step);
                if !(-size..size).contains(&index) && bad.is_none() {
                    bad = Some((before + i, index));
                }
            }
            before += count;
        });
        let Some((mut place, value)) = bad else { return Ok(()) };
        let mut at = vec![0; shape.len()];
        for (at, &n) in at.iter_mut().zip(shape).rev() {
            (*at, place) = ((place % n as usize) as i64, place / n as usize);
        }
        let expected = format!("an index of {size} elements, from -{size} on");
        Err(KernelError::BadData { input: self.name, at, value, expected })
    }
}

/// An index counted from the end, where it is negative.
#[inline(always)]
fn from_start(index: i64, size: i64) -> i64 {
    if index < 0 { index + size } else { index }
}

fn axis(args: &Args<'_, '_>, rank: usize) -> Result<usize, KernelError> {
    let given = param(args, 0).as_int();
    let axis = given.map(|axis| from_start(axis, rank as i64)).filter(|axis| (0..rank as i64).contains(axis));
    axis.map_or_else(|| wrong(format!("{given:?} is no axis of {rank}")), |axis| Ok(axis as usize))
}

fn bytes(dtype: DType) -> Result<isize, KernelError> {
    if dtype.is_sub_byte() {
        wrong(format!("elements of {dtype} are not moved"))
    } else {
        Ok(dtype.bits() as isize / 8)
    }
}

fn place_of(tensor: &TensorRef<'_>) -> Place {
    Place { start: tensor.raw().start(), bytes: tensor.dtype().bits() as isize / 8 }
}

fn place_of_output(tensor: &TensorMut<'_>) -> Place {
    Place { start: tensor.raw().start(), bytes: tensor.dtype().bits() as isize / 8 }
}

/// Sizes or strides without an axis.
fn without(axis: usize, of: &[i64]) -> ([i64; RANK], usize) {
    let mut kept = [0; RANK];
    of.iter().enumerate().filter(|&(i, _)| i != axis).zip(&mut kept).for_each(|((_, &size), kept)| *kept = size);
    (kept, of.len() - 1)
}

/// Copies slices: for each index, of the slice it names in one tensor and the one at its place in the other.
struct Slices<'a> {
    indices: Indices<'a>,
    /// Elements along the axis, of the tensor whose slices are named.
    size: i64,
    /// The axes that slices have: of the result, and of what is copied.
    slice: Loop<2>,
    to: Place,
    from: Place,
    /// Strides of the axis.
    to_step: isize,
    from_step: isize,
    /// Whether the result is the tensor whose slices are named.
    named: bool,
}

/// Addresses that threads share.
struct Shared<'a, T>(&'a T);

// SAFETY: every part of a call writes slices of its own.
unsafe impl<T> Sync for Shared<'_, T> {}

impl Slices<'_> {
    /// # Safety
    /// This CPU has the instructions of `I`; the tensors have these slices, and do not overlap.
    unsafe fn copy<I: Products>(&self, args: &Args<'_, '_>) -> Result<(), KernelError> {
        let threads = args.threads();
        let count = self.indices.tensor.shape()[0] as usize;
        let step = self.indices.tensor.strides()[0] as isize;
        let size = self.slice.len() * self.to.bytes as usize;
        let apart = self.slice.axes().len() == 0 || self.slice.axes().len() == 1 && self.slice.inner().1 == [1, 1];
        let place = |j: usize| {
            let index = from_start(self.indices.at(j as isize * step), self.size) as isize;
            let (to, from) = if self.named { (index, j as isize) } else { (j as isize, index) };
            (
                self.to.start.wrapping_offset(to * self.to_step * self.to.bytes),
                self.from.start.wrapping_offset(from * self.from_step * self.from.bytes),
            )
        };
        if !apart {
            for j in 0..count {
                let (to, from) = place(j);
                // SAFETY: the caller's.
                unsafe { any_width::<I>(self.to.bytes as usize, self.slice, from, to, threads)? };
            }
            return Ok(());
        }
        // Where a place may be named twice, one thread does all: the later slice stays.
        let parts = if self.named { 1 } else { super::loops::parts(count, size, threads).min(count.max(1)) };
        let shared = Shared(&place);
        threads.each(parts, |part| {
            let place = &shared;
            for j in count * part / parts..count * (part + 1) / parts {
                let (to, from) = (place.0)(j);
                // SAFETY: the caller's; a slice is one piece of memory.
                unsafe { std::ptr::copy_nonoverlapping(from, to, size) };
            }
        });
        Ok(())
    }
}

/// The primitive.
pub struct IndexSelect;

impl Kernel for IndexSelect {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let Some(x) = args.input(0) else { return wrong("index_select needs an input") };
        let indices = Indices::new(args, 1, "index")?;
        let out = &args.outputs[0];
        slices::<I>(args, indices, (x, place_of(&x), x.shape(), x.strides()), (out.shape(), out.strides()), false)
    }
}

/// Copies slices along an axis between a tensor and the output: from those that are named, or to them.
fn slices<I: Products>(
    args: &Args<'_, '_>,
    indices: Indices<'_>,
    (x, from, shape, strides): (TensorRef<'_>, Place, &[i64], &[i64]),
    (out_shape, out_strides): (&[i64], &[i64]),
    named: bool,
) -> Result<(), KernelError> {
    let axis = axis(args, shape.len())?;
    let to = place_of_output(&args.outputs[0]);
    bytes(x.dtype())?;
    let count = if named { shape } else { out_shape };
    let alike = out_shape.len() == shape.len()
        && (0..shape.len()).all(|i| i == axis || shape[i] == out_shape[i])
        && shape.len() <= RANK
        && indices.tensor.shape() == [count[axis]]
        && x.dtype() == args.outputs[0].dtype();
    if !alike {
        let index = indices.tensor;
        return wrong(format!(
            "slices of {shape:?} by {index:?} along axis {axis} are not {out_shape:?} of {}",
            x.dtype()
        ));
    }
    let size = if named { out_shape[axis] } else { shape[axis] };
    indices.check(size)?;
    let ((sizes, rank), (steps, _), (out_steps, _)) =
        (without(axis, shape), without(axis, strides), without(axis, out_strides));
    let sizes = &sizes[..rank];
    let slice = Loop::new(sizes, [(sizes, &out_steps[..rank]), (sizes, &steps[..rank])])?;
    let (to_step, from_step) = (out_strides[axis] as isize, strides[axis] as isize);
    let all = Slices { indices, size, slice, to, from, to_step, from_step, named };
    // SAFETY: `run_on` says that the CPU has the instructions; indices are inside the axis, and the others are those of both.
    unsafe { all.copy::<I>(args) }
}

/// Copies input 0 to the output, where it is given.
fn begin<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
    match args.input(0) {
        None => Ok(()),
        Some(x) if x.shape() == args.outputs[0].shape() && x.dtype() == args.outputs[0].dtype() => Copy::run::<I>(args),
        Some(x) => wrong(format!("{x:?} is not {:?}", args.outputs[0])),
    }
}

/// The primitive.
pub struct IndexCopy;

impl Kernel for IndexCopy {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let Some(source) = args.input(2) else { return wrong("index_copy needs a source") };
        let indices = Indices::new(args, 1, "index")?;
        let rank = args.outputs[0].shape().len();
        let along = axis(args, rank)?;
        indices.check(args.outputs[0].shape()[along])?;
        begin::<I>(args)?;
        let out = &args.outputs[0];
        let from = (source, place_of(&source), source.shape(), source.strides());
        slices::<I>(args, indices, from, (out.shape(), out.strides()), true)
    }
}

/// Walks the elements of an index with two other tensors: one at the same place, one with the index along an axis.
fn each_element(
    indices: &Indices<'_>,
    axis: usize,
    (size, named_strides): (i64, &[i64]),
    other_strides: &[i64],
    mut f: impl FnMut(isize, isize),
) -> Result<(), KernelError> {
    let shape = indices.tensor.shape();
    let mut fixed = [0i64; RANK];
    fixed[..shape.len()].copy_from_slice(named_strides);
    fixed[axis] = 0;
    let walk =
        Loop::new(shape, [(shape, indices.tensor.strides()), (shape, &fixed[..shape.len()]), (shape, other_strides)])?;
    let [i_step, named_step, other_step] = walk.inner().1;
    walk.pieces(0..walk.len(), |count, [i, named, other]| {
        for at in 0..count as isize {
            let index = from_start(indices.at(i + at * i_step), size) as isize;
            f(named + at * named_step + index * named_strides[axis] as isize, other + at * other_step);
        }
    });
    Ok(())
}

/// Moves an element.
///
/// # Safety
/// So many bytes may be read and written, and do not overlap.
#[inline(always)]
unsafe fn move_one(to: *mut u8, from: *const u8, bytes: isize) {
    // SAFETY: the caller's.
    unsafe {
        match bytes {
            4 => to.cast::<u32>().write_unaligned(from.cast::<u32>().read_unaligned()),
            8 => to.cast::<u64>().write_unaligned(from.cast::<u64>().read_unaligned()),
            2 => to.cast::<u16>().write_unaligned(from.cast::<u16>().read_unaligned()),
            _ => std::ptr::copy_nonoverlapping(from, to, bytes as usize),
        }
    }
}

/// The primitive.
pub struct Gather;

impl Kernel for Gather {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let Some(x) = args.input(0) else { return wrong("gather needs an input") };
        let indices = Indices::new(args, 1, "index")?;
        let out = &args.outputs[0];
        let (from, shape) = (x.shape(), indices.tensor.shape());
        let axis = axis(args, from.len())?;
        let fits = shape.len() == from.len() && (0..from.len()).all(|i| i == axis || shape[i] <= from[i]);
        if !fits || out.shape() != shape || out.dtype() != x.dtype() || shape.len() > RANK {
            return wrong(format!("{x:?} by {:?} along axis {axis} is not {out:?}", indices.tensor));
        }
        let width = bytes(x.dtype())?;
        indices.check(from[axis])?;
        let (to, from_start) = (out.raw().start(), x.raw().start());
        each_element(&indices, axis, (from[axis], x.strides()), out.strides(), |named, other| {
            // SAFETY: indices are inside the axis, and the others are no larger than those of x.
            unsafe { move_one(to.wrapping_offset(other * width), from_start.wrapping_offset(named * width), width) };
        })
    }
}

/// The primitive.
pub struct Scatter;

impl Kernel for Scatter {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let indices = Indices::new(args, 1, "index")?;
        let out = &args.outputs[0];
        let (shape, dtype, named) = (out.shape(), out.dtype(), indices.tensor.shape());
        let axis = axis(args, shape.len())?;
        let (source, scalar) = match param(args, 1) {
            Param::None => (args.input(2), None),
            given => (None, Some(bits_of(dtype, given)?)),
        };
        let fits = named.len() == shape.len() && (0..shape.len()).all(|i| i == axis || named[i] <= shape[i]);
        let same = scalar.is_some() || source.is_some_and(|s| s.shape() == named && s.dtype() == dtype);
        if !fits || !same || shape.len() > RANK {
            return wrong(format!("{source:?} by {:?} along axis {axis} does not fit {out:?}", indices.tensor));
        }
        let width = bytes(dtype)?;
        indices.check(shape[axis])?;
        begin::<I>(args)?;
        let out = &args.outputs[0];
        let (to, bits) = (out.raw().start(), scalar.unwrap_or(0).to_le_bytes());
        let nowhere = [0i64; RANK];
        let (from, strides) = match &source {
            Some(source) => (source.raw().start().cast_const(), source.strides()),
            None => (bits.as_ptr(), &nowhere[..named.len()]),
        };
        each_element(&indices, axis, (shape[axis], out.strides()), strides, |named, other| {
            // SAFETY: indices are inside the axis, and the others are no larger than those of the output.
            unsafe { move_one(to.wrapping_offset(named * width), from.wrapping_offset(other * width), width) };
        })
    }
}

/// The axes of a call with several indices: those of the indices together, and those behind the axes they name.
struct Several<'a> {
    indices: [Option<Indices<'a>>; RANK],
    count: usize,
}

impl<'a> Several<'a> {
    /// The indices from an input on, checked.
    fn new(args: &Args<'_, 'a>, first: usize, shape: &[i64]) -> Result<Several<'a>, KernelError> {
        let (mut indices, mut count) = ([None; RANK], 0);
        for at in first..args.inputs().len() {
            if count == shape.len() || count == RANK {
                return wrong(format!("{} indices for {shape:?}", args.inputs().len() - first));
            }
            let some = Indices::new(args, at, "index")?;
            some.check(shape[count])?;
            indices[count] = Some(some);
            count += 1;
        }
        if count == 0 { wrong("there is no index") } else { Ok(Several { indices, count }) }
    }

    /// Calls `f` for each element of the indices: where its slice begins in the tensor they name, and in another one whose first
    /// axes are those of the indices. `shape` and `strides` are those of the tensor, `other` those of the other one.
    fn each(
        &self,
        (shape, strides): (&[i64], &[i64]),
        (other, other_strides): (&[i64], &[i64]),
        mut f: impl FnMut(isize, isize) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let all = Loop::<1>::new(other, [(other, other_strides)])?;
        let (step, mut number, mut done) = (all.inner().1[0], 0usize, Ok(()));
        all.pieces(0..all.len(), |count, [place]| {
            for i in 0..count as isize {
                let mut named = 0;
                for (axis, indices) in self.indices.iter().flatten().enumerate() {
                    let index = indices.at(broadcast_place(number, other, &indices.tensor));
                    named += from_start(index, shape[axis]) as isize * strides[axis] as isize;
                }
                if done.is_ok() {
                    done = f(named, place + i * step);
                }
                number += 1;
            }
        });
        done
    }
}

/// Where an element of a tensor is, by its number in a shape it is broadcast to.
fn broadcast_place(mut number: usize, shape: &[i64], tensor: &TensorRef<'_>) -> isize {
    let (sizes, strides) = (tensor.shape(), tensor.strides());
    let mut place = 0;
    for (from_end, &n) in shape.iter().rev().enumerate() {
        let index = number % n as usize;
        number /= n as usize;
        if let Some(axis) = sizes.len().checked_sub(from_end + 1)
            && sizes[axis] != 1
        {
            place += index as isize * strides[axis] as isize;
        }
    }
    place
}

/// Whether indices broadcast to the first axes of a shape, whose others are those of a tensor behind the axes they name.
fn fits(several: &Several<'_>, named: &[i64], shape: &[i64]) -> Option<usize> {
    let own = named.len() - several.count;
    let together = shape.len().checked_sub(own)?;
    let front = &shape[..together];
    let fits = several
        .indices
        .iter()
        .flatten()
        .all(|indices| Loop::<1>::new(front, [(indices.tensor.shape(), indices.tensor.strides())]).is_ok());
    let largest = several.indices.iter().flatten().map(|indices| indices.tensor.shape().len()).max();
    (fits && largest == Some(together) && shape[together..] == named[several.count..]).then_some(together)
}

/// The primitive.
pub struct Index;

impl Kernel for Index {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let Some(x) = args.input(0) else { return wrong("index needs an input") };
        let several = Several::new(args, 1, x.shape())?;
        let (out, threads) = (&args.outputs[0], args.threads());
        let (shape, strides) = (out.shape(), out.strides());
        let Some(front) = fits(&several, x.shape(), shape).filter(|_| x.dtype() == out.dtype()) else {
            return wrong(format!("{x:?} by {} indices is not {out:?}", several.count));
        };
        let width = bytes(x.dtype())?;
        let (sizes, own) = (&shape[front..], &x.strides()[several.count..]);
        let slice = Loop::new(sizes, [(sizes, &strides[front..]), (sizes, own)])?;
        let (to, from) = (out.raw().start(), x.raw().start());
        several.each((x.shape(), x.strides()), (&shape[..front], &strides[..front]), |named, other| {
            let (to, from) = (to.wrapping_offset(other * width), from.wrapping_offset(named * width));
            // SAFETY: `run_on` says that the CPU has the instructions; indices are inside their axes, and slices inside both.
            unsafe { any_width::<I>(width as usize, slice, from, to, threads) }
        })
    }
}

/// The primitive.
pub struct IndexPut;

impl Kernel for IndexPut {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let Some(values) = args.input(1) else { return wrong("index_put needs values") };
        let add = match param(args, 0) {
            Param::None => false,
            given => given.as_bool().map_or_else(|| wrong(format!("{given:?} is neither true nor false")), Ok)?,
        };
        let (shape, strides, dtype) = (args.outputs[0].shape(), args.outputs[0].strides(), args.outputs[0].dtype());
        let several = Several::new(args, 2, shape)?;
        // The shape of the indices together, and of a slice.
        let mut sizes = [1i64; RANK];
        let together = several.indices.iter().flatten().map(|indices| indices.tensor.shape().len()).max().unwrap_or(0);
        let own = shape.len() - several.count;
        if together + own > RANK || values.dtype() != dtype {
            return wrong(format!("{values:?} do not fit {:?}", args.outputs[0]));
        }
        for indices in several.indices.iter().flatten() {
            let of = indices.tensor.shape();
            of.iter().enumerate().filter(|(_, n)| **n != 1).for_each(|(i, n)| sizes[together - of.len() + i] = *n);
        }
        sizes[together..together + own].copy_from_slice(&shape[several.count..]);
        let all = &sizes[..together + own];
        let front = fits(&several, shape, all);
        // The strides of the values for those axes: 0 where they are broadcast.
        let (mut steps, have) = ([0i64; RANK], values.shape().len());
        let fits = front.is_some() && have <= all.len() && {
            let skipped = all.len() - have;
            values.shape().iter().zip(values.strides()).enumerate().all(|(i, (&n, &stride))| {
                steps[skipped + i] = if n == 1 { 0 } else { stride };
                n == 1 || n == all[skipped + i]
            })
        };
        if !fits {
            return wrong(format!("{values:?} do not have the shape {all:?}"));
        }
        let width = bytes(dtype)?;
        begin::<I>(args)?;
        let (to, from, threads) = (args.outputs[0].raw().start(), values.raw().start(), args.threads());
        let slice_sizes = &all[together..];
        let slice = Loop::new(
            slice_sizes,
            [(slice_sizes, &strides[several.count..]), (slice_sizes, &steps[together..all.len()])],
        )?;
        several.each((shape, strides), (&all[..together], &steps[..together]), |named, other| {
            let (to, from) = (to.wrapping_offset(named * width), from.wrapping_offset(other * width));
            // SAFETY: `run_on` says that the CPU has the instructions; indices are inside their axes, and slices inside both.
            unsafe {
                if add {
                    add_slice(dtype, slice, from, to);
                    Ok(())
                } else {
                    any_width::<I>(width as usize, slice, from, to, threads)
                }
            }
        })
    }
}

/// Adds the elements of a slice to those of another one.
///
/// # Safety
/// The loop reaches elements that may be read and written, and do not overlap.
unsafe fn add_slice(dtype: DType, slice: Loop<2>, from: *const u8, to: *mut u8) {
    let ([to_step, from_step], width) = (slice.inner().1, dtype.bits() as isize / 8);
    slice.pieces(0..slice.len(), |count, [o, x]| {
        for i in 0..count as isize {
            // SAFETY: the caller's.
            let (from, to) = unsafe {
                (
                    std::slice::from_raw_parts(from.offset((x + i * from_step) * width), width as usize),
                    std::slice::from_raw_parts_mut(to.offset((o + i * to_step) * width), width as usize),
                )
            };
            if dtype == DType::I64 {
                let sum = numeric::load_int(dtype, from, 0).wrapping_add(numeric::load_int(dtype, to, 0));
                to.copy_from_slice(&sum.to_le_bytes());
            } else {
                numeric::store(dtype, to, 0, numeric::load(dtype, to, 0) + numeric::load(dtype, from, 0));
            }
        }
    });
}
