//! Copies between strided tensors.

use std::cmp::Reverse;
use std::marker::PhantomData;

use lz_abi::Threads;

use super::super::loops::{Loop, part, parts};
use super::super::matmul::Products;
use crate::simd::Work;
use crate::simd::vector::{LANES, Sixteen};

/// Bits of one width.
pub trait Bits: Copy + Default + Send + Sync + 'static {
    /// Writes 16 rows of 16 elements as columns.
    ///
    /// # Safety
    /// As of [`Sixteen`]; the elements may be read and written.
    #[inline(always)]
    unsafe fn turn<V: Sixteen>(from: *const Self, from_step: isize, to: *mut Self, to_step: isize) {
        let mut tile = [[Self::default(); LANES]; LANES];
        // SAFETY: the caller's.
        unsafe {
            for (i, row) in tile.iter_mut().enumerate() {
                *row = from.offset(i as isize * from_step).cast::<[Self; LANES]>().read_unaligned();
            }
            for (i, to) in (0..LANES).map(|i| (i, to.offset(i as isize * to_step))) {
                let column: [Self; LANES] = std::array::from_fn(|row| tile[row][i]);
                to.cast::<[Self; LANES]>().write_unaligned(column);
            }
        }
    }
}

impl Bits for u8 {}
impl Bits for u16 {}
impl Bits for u64 {}

/// Any 32 bits: loads and stores leave them as they are.
impl Bits for f32 {
    #[inline(always)]
    unsafe fn turn<V: Sixteen>(from: *const f32, from_step: isize, to: *mut f32, to_step: isize) {
        // SAFETY: the caller's.
        unsafe {
            let mut rows = [V::splat(0.0); LANES];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = V::load(&*from.offset(i as isize * from_step).cast::<[f32; LANES]>());
            }
            for (i, column) in V::turned(rows).into_iter().enumerate() {
                column.store(&mut *to.offset(i as isize * to_step).cast::<[f32; LANES]>());
            }
        }
    }
}

/// Addresses that threads share.
struct Shared<T>(*const T, *mut T);

// SAFETY: every part of a copy writes elements of its own.
unsafe impl<T> Sync for Shared<T> {}

/// Copies every element of a loop: the result first, then what is copied.
///
/// # Safety
/// This CPU has the instructions of `I`. All elements the loop reaches may be read and written, and do not overlap.
pub unsafe fn copy<I: Products, T: Bits>(walk: Loop<2>, from: *const T, to: *mut T, threads: Threads<'_>) {
    if walk.len() == 0 {
        return;
    }
    let walk = walk.sorted_by_key(|strides| Reverse(strides[0].unsigned_abs()));
    let (inner, [out_step, in_step]) = walk.inner();
    let shared = Shared(from, to);
    if out_step == 1 && in_step.unsigned_abs() != 1 && in_step != 0 && inner >= LANES {
        // Another axis along which what is copied follows each other: columns become rows.
        let across = walk.axes().rev().skip(1).find(|&(size, [_, step])| step == 1 && size >= LANES);
        if let Some((size, [out_across, _])) = across {
            let mut outer = Loop::one();
            let last = walk.axes().len() - 1;
            walk.axes()
                .enumerate()
                .filter(|&(axis, (_, strides))| axis != last && strides != [out_across, 1])
                .for_each(|(_, (size, strides))| outer.push(size, strides));
            let turned = Turned { across: size, inner, out_across, in_step };
            // SAFETY: the caller's: the same elements in another order.
            return unsafe { turned.each::<I, T>(outer, &shared, threads) };
        }
    }
    let parts = parts(walk.len(), size_of::<T>(), threads);
    threads.each(parts, |at| {
        let Shared(from, to) = &shared;
        walk.pieces(part(walk.len(), at, parts), |count, [o, x]| {
            // SAFETY: the loop reaches elements that may be read and written, which other parts do not write.
            unsafe {
                let (to, from) = (to.offset(o), from.offset(x));
                match (out_step, in_step) {
                    (1, 1) => std::ptr::copy_nonoverlapping(from, to, count),
                    (1, 0) => std::slice::from_raw_parts_mut(to, count).fill(*from),
                    _ => {
                        let count = count as isize;
                        (0..count).for_each(|i| to.offset(i * out_step).write(*from.offset(i * in_step)));
                    }
                }
            }
        });
    });
}

/// A matrix whose columns follow each other in one tensor and whose rows do in the other.
#[derive(Clone, Copy)]
struct Turned {
    /// Elements along the axis that follows each other in what is copied, and from one to the next in the result.
    across: usize,
    out_across: isize,
    /// Elements along the axis that follows each other in the result, and from one to the next in what is copied.
    inner: usize,
    in_step: isize,
}

impl Turned {
    /// # Safety
    /// As of [`copy`], for the matrices at every element of `outer`.
    unsafe fn each<I: Products, T: Bits>(self, outer: Loop<2>, shared: &Shared<T>, threads: Threads<'_>) {
        // Bands of 16 rows of the result, of every matrix.
        let bands = self.across.div_ceil(LANES);
        let total = outer.len() * bands;
        let parts = parts(total, LANES * self.inner * size_of::<T>() * 2, threads).min(total.max(1));
        let outer_steps = outer.inner().1;
        threads.each(parts, |at| {
            let range = total * at / parts..total * (at + 1) / parts;
            let (first, last) = (range.start / bands, range.end.div_ceil(bands));
            let mut matrix = first;
            outer.pieces(first..last, |count, [o, x]| {
                for i in 0..count as isize {
                    let (o, x) = (o + i * outer_steps[0], x + i * outer_steps[1]);
                    let start = matrix * bands;
                    let mine = range.start.max(start) - start..range.end.min(start + bands) - start;
                    let (from, to) = (shared.0.wrapping_offset(x), shared.1.wrapping_offset(o));
                    // SAFETY: the caller's, of this matrix; other parts write other rows.
                    unsafe {
                        I::call(Bands::<T, I::Sixteen> { turned: self, from, to, bands: mine, vector: PhantomData })
                    };
                    matrix += 1;
                }
            });
        });
    }
}

/// Some bands of a matrix.
struct Bands<T, V> {
    turned: Turned,
    from: *const T,
    to: *mut T,
    bands: std::ops::Range<usize>,
    vector: PhantomData<V>,
}

impl<T: Bits, V: Sixteen> Bands<T, V> {
    /// # Safety
    /// As of [`Sixteen`], and of [`copy`].
    #[inline(always)]
    unsafe fn all(self) {
        let Turned { across, out_across, inner, in_step } = self.turned;
        for band in self.bands {
            let rows = band * LANES..((band + 1) * LANES).min(across);
            for first in (0..inner).step_by(LANES) {
                let columns = first..(first + LANES).min(inner);
                // SAFETY: the caller's.
                unsafe {
                    let from = self.from.offset(rows.start as isize + first as isize * in_step);
                    let to = self.to.offset(rows.start as isize * out_across + first as isize);
                    if rows.len() == LANES && columns.len() == LANES {
                        T::turn::<V>(from, in_step, to, out_across);
                        continue;
                    }
                    for row in 0..rows.len() as isize {
                        for column in 0..columns.len() as isize {
                            let x = *from.offset(row + column * in_step);
                            to.offset(row * out_across + column).write(x);
                        }
                    }
                }
            }
        }
    }
}

impl<T: Bits, V: Sixteen> Work for Bands<T, V> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // SAFETY: who makes one vouches for the addresses, and has it run where the instructions of `V` are.
        unsafe { self.all() }
    }
}
