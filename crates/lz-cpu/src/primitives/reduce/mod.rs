//! Sums and the like along axes.
//!
//! Reduce: `out = op` of the elements along some axes.
//!
//! | | |
//! |---|---|
//! | input 0 | x: any dtype of whole bytes but the 8-bit floats |
//! | output 0 | any dtype x can be cast to; the axes are kept with a size of 1, or left out: its number of axes says which |
//! | param 0 | the operation: [`ReduceOp`] |
//! | params 1… | the axes, counted from the end if negative; none for all of them |
//!
//! ArgReduce: the place of the largest or smallest element along an axis, or of all elements in row-major order. The first one of several;
//! a NaN is both the largest and the smallest.
//!
//! | | |
//! |---|---|
//! | input 0 | x |
//! | output 0 | int64 or int32; the axis is kept with a size of 1, or left out |
//! | param 0 | the operation: [`ReduceOp::Max`] or [`ReduceOp::Min`] |
//! | param 1 | the axis; none for all elements |
//!
//! Cumsum: each element and all before it along an axis.
//!
//! | | |
//! |---|---|
//! | input 0 | x, of the shape of the output |
//! | output 0 | any dtype x can be cast to |
//! | param 0 | the axis |
//!
//! Cumsum may be in place, the others may not. Floats are added as float32 in blocks of [`BLOCK`] elements, whose sums are added as
//! float64; integers are added as int64. One result is made by one thread, in one order: it does not depend on how many there are. The
//! largest and the smallest of nothing are an error.

use lz_abi::{Args, DType, KernelError, Param};

use super::elementwise::binary::Arithmetic;
use super::elementwise::blocks::{BLOCK, Codec};
use super::elementwise::cast::convert;
use super::elementwise::numbers::with_wide;
use super::kinds::kinds;
use super::loops::{Loop, RANK, parts};
use super::matmul::Products;
use super::{Kernel, param, wrong};
use crate::simd::{Isa, Portable, Work};

mod fold;

#[cfg(test)]
mod tests;

use fold::{Found, Sums};

kinds! {
    /// What is made of several numbers.
    ReduceOp {
        /// Their sum
        Sum = "sum",
        /// Their sum, divided by how many there are
        Mean = "mean",
        /// Their product
        Prod = "prod",
        /// The largest one; NaN where one is
        Max = "max",
        /// The smallest one; NaN where one is
        Min = "min",
        /// Whether one is not 0
        Any = "any",
        /// Whether none is 0
        All = "all",
    }
}

/// Room for a block of numbers of any type.
type Buffer = [u64; BLOCK];

/// Addresses that threads share.
#[derive(Clone, Copy)]
struct Tensor {
    start: *mut u8,
    codec: Codec,
}

// SAFETY: every part of a call writes results of its own.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Numbers that follow each other: where they are, or in a buffer.
    ///
    /// # Safety
    /// At most [`BLOCK`] elements are there.
    #[inline(always)]
    unsafe fn numbers(&self, n: usize, place: isize, step: isize, buffer: &mut Buffer) -> *const u8 {
        let at = self.start.wrapping_offset(place * self.codec.size());
        // SAFETY: the caller's.
        unsafe { self.codec.numbers(n, at, step, buffer.as_mut_ptr().cast()) }
    }
}

/// Which axes go: a bit for each.
fn axes(args: &Args<'_, '_>, first: usize, rank: usize) -> Result<u32, KernelError> {
    let given = args.params().get(first..).unwrap_or(&[]);
    let mut gone = 0;
    for axis in given.iter().filter(|axis| !matches!(axis, Param::None)) {
        let at = axis.as_int().map(|axis| if axis < 0 { axis + rank as i64 } else { axis });
        match at.filter(|at| (0..rank as i64).contains(at)) {
            Some(at) if gone >> at & 1 == 0 => gone |= 1 << at,
            _ => return wrong(format!("{axis:?} is no axis of {rank}, or is named twice")),
        }
    }
    Ok(if gone == 0 { (1 << rank) - 1 } else { gone })
}

/// The loops of a call: over the results, in the output and in x, and over what becomes one result, in x.
fn walks(args: &Args<'_, '_>, gone: u32) -> Result<(Loop<2>, Loop<1>), KernelError> {
    let (Some(x), out) = (args.input(0), &args.outputs[0]) else { return wrong("there is no input") };
    let (shape, steps) = (x.shape(), x.strides());
    let (mut kept, mut along) = (Loop::one(), Loop::one());
    let (sizes, out_steps) = (out.shape(), out.strides());
    let keeps = sizes.len() == shape.len();
    let mut at = 0;
    let mut fits = true;
    for axis in 0..shape.len() {
        if gone >> axis & 1 == 1 {
            along.push(shape[axis] as usize, [steps[axis] as isize]);
            fits &= !keeps || sizes[axis] == 1;
            at += usize::from(keeps);
        } else {
            fits &= sizes.get(at) == Some(&shape[axis]);
            if fits {
                kept.push(shape[axis] as usize, [out_steps[at] as isize, steps[axis] as isize]);
            }
            at += 1;
        }
    }
    if !fits || at != sizes.len() {
        return wrong(format!("{x:?} is not reduced to {out:?}"));
    }
    Ok((kept, along))
}

/// Calls `f` for pieces of at most [`BLOCK`] results of each part: how many, and where they begin.
fn each_piece(kept: &Loop<2>, range: std::ops::Range<usize>, mut f: impl FnMut(usize, [isize; 2])) {
    let steps = kept.inner().1;
    kept.pieces(range, |count, at| {
        for first in (0..count).step_by(BLOCK) {
            let place = std::array::from_fn(|i| at[i] + first as isize * steps[i]);
            f(BLOCK.min(count - first), place);
        }
    });
}

/// How one type of numbers is reduced, by addresses.
#[derive(Clone, Copy)]
struct Functions {
    /// Writes what nothing is.
    begin: fn(ReduceOp, &mut [u64]),
    /// Adds numbers to one result.
    row: unsafe fn(ReduceOp, usize, *const u8, &mut u64),
    /// Adds numbers to as many results.
    columns: unsafe fn(ReduceOp, usize, *const u8, &mut [u64]),
    /// Divides by how many there were.
    mean: fn(&mut [u64], usize),
    /// The first place of the largest or smallest number, and what it is, if it beats the one before.
    find: unsafe fn(ReduceOp, usize, *const u8, Option<u64>) -> Option<Found>,
    /// To the dtype of the result.
    convert: unsafe fn(usize, *const u8, *mut u8),
}

impl Functions {
    fn of<I: Products>(from: DType, to: DType) -> Functions {
        let narrow = from.is_float() && from != DType::F64;
        match narrow {
            true => Functions::of_numbers::<I, f32>(to),
            false => with_wide!(from, A => Functions::of_numbers::<Portable, A>(to)),
        }
    }

    fn of_numbers<I: Isa, A: Sums>(to: DType) -> Functions {
        let convert: unsafe fn(usize, *const u8, *mut u8) = match to {
            DType::Bool => convert::<Portable, A::Sum, i32, true>,
            to => with_wide!(to, B => convert::<Portable, A::Sum, B, false>),
        };
        Functions {
            begin: |op, sums| sums.fill(fold::bits(A::begin(op))),
            row: row::<I, A>,
            columns: columns::<I, A>,
            mean: |sums, count| {
                sums.iter_mut().for_each(|sum| *sum = fold::bits(A::divided(fold::number(*sum), count)))
            },
            find: find::<I, A>,
            convert,
        }
    }
}

/// Reduces numbers to one result, or to as many.
struct Reducing<'a, A: Sums> {
    op: ReduceOp,
    numbers: &'a [A],
    to: &'a mut [u64],
    columns: bool,
}

impl<A: Sums> Work for Reducing<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        if self.columns {
            A::fold_columns(self.op, self.numbers, self.to);
        } else {
            let found = A::fold_row(self.op, self.numbers, fold::number(self.to[0]));
            self.to[0] = fold::bits(found);
        }
    }
}

unsafe fn row<I: Isa, A: Sums>(op: ReduceOp, n: usize, from: *const u8, to: &mut u64) {
    // SAFETY: the caller's.
    unsafe {
        let numbers = std::slice::from_raw_parts(from.cast::<A>(), n);
        I::call(Reducing { op, numbers, to: std::slice::from_mut(to), columns: false });
    }
}

unsafe fn columns<I: Isa, A: Sums>(op: ReduceOp, n: usize, from: *const u8, to: &mut [u64]) {
    // SAFETY: the caller's.
    unsafe { I::call(Reducing { op, numbers: std::slice::from_raw_parts(from.cast::<A>(), n), to, columns: true }) };
}

/// Finds the largest or smallest number.
struct Finding<'a, A: Sums> {
    op: ReduceOp,
    numbers: &'a [A],
    best: Option<u64>,
}

impl<A: Sums> Work for Finding<'_, A> {
    type Output = Option<Found>;

    #[inline(always)]
    fn run(self) -> Option<Found> {
        fold::find(self.op, self.numbers, self.best)
    }
}

unsafe fn find<I: Isa, A: Sums>(op: ReduceOp, n: usize, from: *const u8, best: Option<u64>) -> Option<Found> {
    // SAFETY: the caller's.
    unsafe { I::call(Finding { op, numbers: std::slice::from_raw_parts(from.cast::<A>(), n), best }) }
}

/// The primitive.
pub struct Reduce;

impl Kernel for Reduce {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let op = ReduceOp::of(param(args, 0))?;
        let Some(x) = args.input(0).filter(|x| x.shape().len() <= RANK) else { return wrong("reduce needs an input") };
        if op == ReduceOp::Mean && !x.dtype().is_float() {
            return wrong(format!("mean of {}: convert it to a float first", x.dtype()));
        }
        let (kept, along) = walks(args, axes(args, 1, x.shape().len())?)?;
        let (threads, out) = (args.threads(), &args.outputs[0]);
        let of = Functions::of::<I>(x.dtype(), out.dtype());
        let from = Tensor { start: x.raw().start(), codec: Codec::of::<I>(x.dtype())? };
        let to = Tensor { start: out.raw().start(), codec: Codec::of::<Portable>(out.dtype())? };
        let count = along.len();
        if count == 0 && matches!(op, ReduceOp::Max | ReduceOp::Min) && kept.len() > 0 {
            return wrong(format!("{} of no elements", op.name()));
        }
        let total = kept.len();
        let parts = parts(total.saturating_mul(count), from.codec.size() as usize, threads).min(total.max(1));
        let ([to_step, from_step], [step]) = (kept.inner().1, along.inner().1);
        // Results are made side by side where their elements are nearer to each other than those of one result.
        let beside = kept.inner().0 > 1 && from_step.unsigned_abs() < step.unsigned_abs();
        let shared = (from, to);
        threads.each(parts, |part| {
            let (from, to) = &shared;
            let (mut sums, mut buffer) = ([0u64; BLOCK], [0u64; BLOCK]);
            let range = total * part / parts..total * (part + 1) / parts;
            each_piece(&kept, range, |n, [o, x]| {
                let sums = &mut sums[..n];
                (of.begin)(op, sums);
                // SAFETY: `run_on` says that the CPU has the instructions; both loops reach elements of these tensors only.
                unsafe {
                    if beside {
                        along.pieces(0..count, |many, [place]| {
                            for i in 0..many as isize {
                                let numbers = from.numbers(n, x + place + i * step, from_step, &mut buffer);
                                (of.columns)(op, n, numbers, sums);
                            }
                        });
                    } else {
                        for (i, sum) in sums.iter_mut().enumerate() {
                            let x = x + i as isize * from_step;
                            along.pieces(0..count, |many, [place]| {
                                for first in (0..many).step_by(BLOCK) {
                                    let (n, at) = (BLOCK.min(many - first), x + place + first as isize * step);
                                    (of.row)(op, n, from.numbers(n, at, step, &mut buffer), sum);
                                }
                            });
                        }
                    }
                    if op == ReduceOp::Mean {
                        (of.mean)(sums, count);
                    }
                    (of.convert)(n, sums.as_ptr().cast(), buffer.as_mut_ptr().cast());
                    to.codec.store(n, buffer.as_ptr().cast(), to.start.offset(o * to.codec.size()), to_step);
                }
            });
        });
        Ok(())
    }
}

/// The primitive.
pub struct ArgReduce;

impl Kernel for ArgReduce {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let op = ReduceOp::of(param(args, 0))?;
        let Some(x) = args.input(0).filter(|x| x.shape().len() <= RANK) else {
            return wrong("arg_reduce needs an input");
        };
        let (kept, along) = walks(args, axes(args, 1, x.shape().len())?)?;
        let (threads, out) = (args.threads(), &args.outputs[0]);
        if !matches!(op, ReduceOp::Max | ReduceOp::Min) || !matches!(out.dtype(), DType::I64 | DType::I32) {
            return wrong(format!("arg_reduce by {} does not give {}", op.name(), out.dtype()));
        }
        let (total, count) = (kept.len(), along.len());
        if count == 0 && total > 0 {
            return wrong(format!("the place of the {} of no elements", op.name()));
        }
        let of = Functions::of::<I>(x.dtype(), out.dtype());
        let from = Tensor { start: x.raw().start(), codec: Codec::of::<I>(x.dtype())? };
        let to = Tensor { start: out.raw().start(), codec: Codec::of::<Portable>(out.dtype())? };
        let wide = out.dtype() == DType::I64;
        let parts = parts(total.saturating_mul(count), from.codec.size() as usize, threads).min(total.max(1));
        let ([to_step, from_step], [step]) = (kept.inner().1, along.inner().1);
        let shared = (from, to);
        threads.each(parts, |part| {
            let (from, to) = &shared;
            let mut buffer = [0u64; BLOCK];
            kept.pieces(total * part / parts..total * (part + 1) / parts, |n, [o, x]| {
                for i in 0..n as isize {
                    let (mut best, mut found, mut before) = (None, 0usize, 0usize);
                    along.pieces(0..count, |many, [place]| {
                        for first in (0..many).step_by(BLOCK) {
                            let n = BLOCK.min(many - first);
                            let at = x + i * from_step + place + first as isize * step;
                            // SAFETY: as of `Reduce`.
                            let better = unsafe { (of.find)(op, n, from.numbers(n, at, step, &mut buffer), best) };
                            if let Some(better) = better {
                                (best, found) = (Some(better.number), before + first + better.at);
                            }
                        }
                        before += many;
                    });
                    let at = to.start.wrapping_offset((o + i * to_step) * to.codec.size());
                    // SAFETY: an element of the output.
                    unsafe {
                        match wide {
                            true => at.cast::<i64>().write(found as i64),
                            false => at.cast::<i32>().write(found as i32),
                        }
                    }
                }
            });
        });
        Ok(())
    }
}

/// The primitive.
pub struct Cumsum;

impl Kernel for Cumsum {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let (input, threads, out) = (args.input(0), args.threads(), &args.outputs[0]);
        let (shape, steps) = (out.shape(), out.strides());
        let (sizes, strides, dtype) =
            input.map_or((shape, steps, out.dtype()), |x| (x.shape(), x.strides(), x.dtype()));
        let gone = axes(args, 0, shape.len())?;
        if sizes != shape || gone.count_ones() != 1 || shape.len() > RANK || dtype.is_sub_byte() {
            return wrong(format!("{input:?} is not added up to {out:?} along {:?}", args.params()));
        }
        let axis = gone.trailing_zeros() as usize;
        let mut lines = Loop::<2>::one();
        for at in (0..shape.len()).filter(|&at| at != axis) {
            lines.push(shape[at] as usize, [steps[at] as isize, strides[at] as isize]);
        }
        let of = Functions::of::<I>(dtype, out.dtype());
        let start = out.raw().start();
        let from = Tensor { start: input.map_or(start, |x| x.raw().start()), codec: Codec::of::<I>(dtype)? };
        let to = Tensor { start, codec: Codec::of::<Portable>(out.dtype())? };
        let running: unsafe fn(usize, *const u8, &mut [u64], &mut u64) = with_wide!(dtype, A => running::<A>);
        let (total, count) = (lines.len(), shape[axis] as usize);
        let parts = parts(total.saturating_mul(count), from.codec.size() as usize * 4, threads).min(total.max(1));
        let (line_steps, to_step, step) = (lines.inner().1, steps[axis] as isize, strides[axis] as isize);
        let shared = (from, to);
        threads.each(parts, |part| {
            let (from, to) = &shared;
            let (mut sums, mut buffer) = ([0u64; BLOCK], [0u64; BLOCK]);
            lines.pieces(total * part / parts..total * (part + 1) / parts, |n, [o, x]| {
                for i in 0..n as isize {
                    let (o, x) = (o + i * line_steps[0], x + i * line_steps[1]);
                    let mut sum = [0u64];
                    (of.begin)(ReduceOp::Sum, &mut sum);
                    for first in (0..count).step_by(BLOCK) {
                        let (n, first) = (BLOCK.min(count - first), first as isize);
                        // SAFETY: as of `Reduce`. A block is read before it is written.
                        unsafe {
                            let numbers = from.numbers(n, x + first * step, step, &mut buffer);
                            running(n, numbers, &mut sums[..n], &mut sum[0]);
                            (of.convert)(n, sums.as_ptr().cast(), buffer.as_mut_ptr().cast());
                            let at = to.start.offset((o + first * to_step) * to.codec.size());
                            to.codec.store(n, buffer.as_ptr().cast(), at, to_step);
                        }
                    }
                }
            });
        });
        Ok(())
    }
}

unsafe fn running<A: Sums>(n: usize, from: *const u8, to: &mut [u64], sum: &mut u64) {
    // SAFETY: the caller's.
    let numbers = unsafe { std::slice::from_raw_parts(from.cast::<A>(), n) };
    let mut total: A::Sum = fold::number(*sum);
    for (to, number) in to.iter_mut().zip(numbers) {
        total = Arithmetic::add(total, number.sum());
        *to = fold::bits(total);
    }
    *sum = fold::bits(total);
}
