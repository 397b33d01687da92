//! What is done with sums before they are stored: alpha, bias, activation, C, rounding.

use std::marker::PhantomData;
use std::ops::Range;

use super::operand::{Matrix, Wide, with_narrow};
use super::{Activation, Products};
use crate::simd::Work;
use crate::simd::gelu::{by_erf, by_tanh};
use crate::simd::half_floats::Narrow;
use crate::simd::packed::WIDTH;
use crate::simd::silu_mul::silu;

/// How a call stores its sums.
#[derive(Clone, Copy)]
pub struct Epilogue {
    pub alpha: f32,
    pub beta: f32,
    pub activation: Activation,
    /// A row; or, where its elements are apart along rows alone, a column.
    pub bias: Option<Matrix>,
    pub c: Matrix,
    pub out: Matrix,
    /// Columns that follow each other in the output, and how far it is from the first of them to the next first.
    pub image: usize,
    pub images: isize,
}

/// Columns that follow each other in the output: the first of them in the tile, its place, how many.
type Run = (usize, isize, usize);

impl Epilogue {
    /// The same for the matrices at these places.
    #[inline(always)]
    pub fn at(self, out: isize, c: isize) -> Epilogue {
        let bias = self.bias.map(|bias| if bias.row == 0 { bias } else { bias.at(c) });
        Epilogue { out: self.out.at(out), c: if self.beta == 0.0 { self.c } else { self.c.at(c) }, bias, ..self }
    }

    /// Stores the sums of `rows` rows from `first` on, of at most [`WIDTH`] columns from `column` on.
    ///
    /// # Safety
    /// This CPU has the instructions of `I`. The matrices have these elements, and nobody else uses those of the output.
    #[inline(always)]
    pub unsafe fn store<I: Products>(&self, sums: &mut [[f32; WIDTH]], first: usize, column: usize, columns: usize) {
        let (row, at) = (first as isize, column as isize);
        let out = self.out.at(row * self.out.row);
        let c = self.c.at(row * self.c.row + at * self.c.column);
        let bias = self.bias.map(|bias| bias.at(row * bias.row + at * bias.column));
        let to = Epilogue { out, c, bias, ..*self };
        // SAFETY: the caller's.
        unsafe {
            if column + columns <= self.image {
                return to.put::<I>(sums, columns, &[(0, at, columns)]);
            }
            let mut runs = [(0, 0, 0); WIDTH];
            let count = self.runs(column..column + columns, &mut runs);
            to.put::<I>(sums, columns, &runs[..count]);
        }
    }

    /// Stores sums of rows, whose first is that of the matrices, in runs.
    ///
    /// # Safety
    /// As of [`Epilogue::store`].
    unsafe fn put<I: Products>(self, sums: &mut [[f32; WIDTH]], columns: usize, runs: &[Run]) {
        // SAFETY: the caller's.
        unsafe {
            with_narrow!(self.out.dtype, T => match I::FUSED {
                true => I::call(Storing::<T, true> { sums, columns, runs, to: self, dtype: PhantomData }),
                false => I::call(Storing::<T, false> { sums, columns, runs, to: self, dtype: PhantomData }),
            });
        }
    }

    /// The runs of some columns.
    fn runs(&self, columns: Range<usize>, to: &mut [Run; WIDTH]) -> usize {
        let (mut count, mut lane) = (0, 0);
        while lane < columns.len() {
            let (image, place) = ((columns.start + lane) / self.image, (columns.start + lane) % self.image);
            let len = (self.image - place).min(columns.len() - lane);
            to[count] = (lane, image as isize * self.images + place as isize, len);
            (count, lane) = (count + 1, lane + len);
        }
        count
    }
}

struct Storing<'a, T, const FUSED: bool> {
    sums: &'a mut [[f32; WIDTH]],
    columns: usize,
    runs: &'a [Run],
    to: Epilogue,
    dtype: PhantomData<T>,
}

/// Some numbers of a row as float32.
#[inline(always)]
unsafe fn numbers<T: Narrow + Wide>(from: *const T, step: isize, to: &mut [f32]) {
    // SAFETY: the caller's.
    unsafe {
        match step {
            1 => T::widen(std::slice::from_raw_parts(from, to.len()), to),
            _ => to.iter_mut().enumerate().for_each(|(i, to)| *to = (*from.offset(i as isize * step)).wide()),
        }
    }
}

impl<T: Narrow + Wide, const FUSED: bool> Work for Storing<'_, T, FUSED> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Storing { sums, columns, runs, to, .. } = self;
        let mut bias = [0f32; WIDTH];
        // SAFETY: who makes one vouches for the elements.
        unsafe {
            if let Some(from) = to.bias.filter(|bias| bias.row == 0) {
                with_narrow!(from.dtype, B => numbers::<B>(from.start.cast(), from.column, &mut bias[..columns]));
            }
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            if to.alpha != 1.0 {
                sums.iter_mut().for_each(|sum| *sum *= to.alpha);
            }
            if let Some(from) = to.bias {
                if from.row != 0 {
                    let from = from.at(i as isize * from.row);
                    // SAFETY: as above.
                    bias.fill(unsafe { with_narrow!(from.dtype, B => (*from.start.cast::<B>()).wide()) });
                }
                sums.iter_mut().zip(&bias).for_each(|(sum, bias)| *sum += bias);
            }
            match to.activation {
                Activation::None => {}
                // NaN is not below zero, and stays.
                Activation::Relu => sums.iter_mut().for_each(|sum| *sum = if *sum < 0.0 { 0.0 } else { *sum }),
                Activation::Gelu => sums.iter_mut().for_each(|sum| *sum = by_erf::<FUSED>(*sum)),
                Activation::GeluTanh => sums.iter_mut().for_each(|sum| *sum = by_tanh::<FUSED>(*sum)),
                Activation::Silu => sums.iter_mut().for_each(|sum| *sum = silu::<FUSED>(*sum)),
            }
            // SAFETY: as above.
            unsafe {
                if to.beta != 0.0 {
                    let mut c = [0f32; WIDTH];
                    numbers::<T>(to.c.at(i as isize * to.c.row).start.cast(), to.c.column, &mut c[..columns]);
                    sums.iter_mut().zip(&c).for_each(|(sum, c)| *sum += to.beta * c);
                }
                let out = to.out.at(i as isize * to.out.row).start.cast::<T>().cast_mut();
                for &(lane, place, len) in runs {
                    T::narrow(&sums[lane..lane + len], std::slice::from_raw_parts_mut(out.offset(place), len));
                }
            }
        }
    }
}
