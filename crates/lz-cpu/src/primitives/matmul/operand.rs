//! Matrices in memory, and how a tile of a product needs them.

use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};
use lz_abi::DType;

use super::Products;
use crate::simd::Work;
use crate::simd::half_floats::Narrow;
use crate::simd::packed::WIDTH;
use crate::simd::packed::engine::STRIDE;
use crate::simd::vector::{LANES, Sixteen};

/// A matrix at an address.
#[derive(Clone, Copy)]
pub struct Matrix {
    pub start: *const u8,
    pub dtype: DType,
    /// From an element to the one below it, and to the one beside it.
    pub row: isize,
    pub column: isize,
    /// Whether it lies in panels of [`WIDTH`] columns.
    pub packed: bool,
}

// SAFETY: an address; who uses it vouches for it.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

/// Calls a function with the Rust type of a float dtype.
macro_rules! with_narrow {
    ($dtype:expr, $T:ident => $call:expr) => {
        match $dtype {
            lz_abi::DType::F16 => {
                type $T = half::f16;
                $call
            }
            lz_abi::DType::Bf16 => {
                type $T = half::bf16;
                $call
            }
            _ => {
                type $T = f32;
                $call
            }
        }
    };
}
pub(in crate::primitives) use with_narrow;

impl Matrix {
    /// The matrix some elements further on.
    #[inline(always)]
    pub fn at(self, place: isize) -> Matrix {
        let bytes = (self.dtype.bits() / 8) as isize;
        Matrix { start: self.start.wrapping_offset(place * bytes), ..self }
    }

    /// Writes a panel of columns: for each row of a range [`WIDTH`] numbers as float32, 0 where no column is.
    ///
    /// # Safety
    /// This CPU has the instructions of `I`, and the matrix has these elements, of a float dtype.
    pub unsafe fn pack<I: Products>(self, rows: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
        let from = self.at(rows.start as isize * self.row + columns.start as isize * self.column);
        // SAFETY: the caller's.
        unsafe {
            with_narrow!(self.dtype, T => I::call(Packing::<T, I::Sixteen> {
                from: from.start.cast(), row: self.row, column: self.column, rows: rows.len(), columns: columns.len(), to,
                kind: PhantomData,
            }));
        }
    }

    /// Writes some columns of some rows as float32, [`STRIDE`] apart.
    ///
    /// # Safety
    /// As of [`Matrix::pack`].
    pub unsafe fn arrange<I: Products>(self, rows: Range<usize>, columns: Range<usize>, apart: usize, to: &mut [f32]) {
        let from = self.at(rows.start as isize * self.row + columns.start as isize * self.column);
        // SAFETY: the caller's.
        unsafe {
            with_narrow!(self.dtype, T => I::call(Arranging::<T> {
                from: from.start.cast(), row: self.row, column: self.column, rows: rows.len(), columns: columns.len(), apart, to,
            }));
        }
    }
}

const _: () = assert!(STRIDE > LANES);

struct Packing<'a, T, V> {
    from: *const T,
    row: isize,
    column: isize,
    rows: usize,
    columns: usize,
    to: &'a mut [f32],
    kind: PhantomData<V>,
}

impl<T: Narrow + Wide, V: Sixteen> Work for Packing<'_, T, V> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Packing { from, row, column, rows, columns, to, .. } = self;
        let to = &mut to.as_chunks_mut::<WIDTH>().0[..rows];
        // SAFETY: who makes one vouches for the elements, and has it run where the instructions of `V` are.
        unsafe {
            for half in 0..WIDTH / LANES {
                let first = half * LANES;
                let count = columns.saturating_sub(first).min(LANES);
                let from = from.offset(first as isize * column * isize::from(count > 0));
                let mut done = 0;
                if column == 1 && count == LANES {
                    for (i, to) in to.iter_mut().enumerate() {
                        let numbers = &*from.offset(i as isize * row).cast::<[T; LANES]>();
                        T::load::<V>(numbers).store(&mut to[first..].as_chunks_mut().0[0]);
                    }
                    done = rows;
                } else if row == 1 && count > 0 {
                    for at in (0..rows - rows % LANES).step_by(LANES) {
                        let mut lanes = [V::splat(0.0); LANES];
                        for (i, lanes) in lanes[..count].iter_mut().enumerate() {
                            *lanes =
                                T::load::<V>(&*from.offset(at as isize + i as isize * column).cast::<[T; LANES]>());
                        }
                        for (i, lanes) in V::turned(lanes).into_iter().enumerate() {
                            lanes.store(&mut to[at + i][first..].as_chunks_mut().0[0]);
                        }
                    }
                    done = rows - rows % LANES;
                }
                for (i, to) in to.iter_mut().enumerate().skip(done) {
                    for c in 0..LANES {
                        let here = c < count;
                        to[first + c] =
                            if here { (*from.offset(i as isize * row + c as isize * column)).wide() } else { 0.0 };
                    }
                }
            }
        }
    }
}

/// One number as float32.
pub trait Wide: Copy {
    fn wide(self) -> f32;
}

impl Wide for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
}

impl Wide for f16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

impl Wide for bf16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

struct Arranging<'a, T> {
    from: *const T,
    row: isize,
    column: isize,
    rows: usize,
    columns: usize,
    apart: usize,
    to: &'a mut [f32],
}

impl<T: Narrow + Wide> Work for Arranging<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for i in 0..self.rows {
            let to = &mut self.to[i * self.apart..][..self.columns];
            // SAFETY: who makes one vouches for the elements.
            unsafe {
                let from = self.from.offset(i as isize * self.row);
                if self.column == 1 {
                    T::widen(std::slice::from_raw_parts(from, self.columns), to);
                } else {
                    to.iter_mut().enumerate().for_each(|(k, to)| *to = (*from.offset(k as isize * self.column)).wide());
                }
            }
        }
    }
}
