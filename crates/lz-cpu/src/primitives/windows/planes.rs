//! How a plane is filled.

use lz_abi::{DType, TensorRef};

use super::Geometry;
use crate::primitives::matmul::epilogue::Epilogue;
use crate::primitives::matmul::operand::{Matrix, Wide, with_narrow};
use crate::primitives::matmul::{Activation, Products};
use crate::simd::half_floats::Narrow;
use crate::simd::packed::WIDTH;
use crate::simd::{Isa, Work};

/// Numbers behind the last plane: whole registers are read from it.
pub const SLACK: usize = 64;

/// The planes of a tensor (images, channels, rows, columns).
#[derive(Clone, Copy)]
pub struct Planes {
    /// Its first element.
    pub start: *const u8,
    /// Its element type: float32, float16 or bfloat16.
    pub dtype: DType,
    /// From an element to the next along each axis.
    pub steps: [isize; 4],
}

// SAFETY: an address; who uses it vouches for it.
unsafe impl Sync for Planes {}

/// From an element to the next along images, channels, rows and columns.
pub fn steps(tensor: &TensorRef<'_>) -> [isize; 4] {
    match *tensor.strides() {
        [n, c, x] => [n as isize, c as isize, 0, x as isize],
        [n, c, y, x] => [n as isize, c as isize, y as isize, x as isize],
        _ => [0; 4],
    }
}

impl Planes {
    /// The address of a plane.
    pub fn at(&self, image: usize, channel: usize) -> *const u8 {
        let place = image as isize * self.steps[0] + channel as isize * self.steps[1];
        self.start.wrapping_offset(place * (self.dtype.bits() / 8) as isize)
    }

    /// Copies a plane, with a number where the tensor is not.
    ///
    /// # Safety
    /// This CPU has the instructions of `I`, and the tensor has this plane.
    pub unsafe fn copy<I: Isa>(
        &self,
        (image, channel): (usize, usize),
        windows: &Geometry,
        outside: f32,
        to: &mut [f32],
    ) {
        let (from, steps) = (self.at(image, channel), [self.steps[2], self.steps[3]]);
        // SAFETY: the caller's.
        unsafe {
            with_narrow!(self.dtype, T => I::call(Copying::<T> { from: from.cast(), steps, windows, outside, to }));
        }
    }
}

struct Copying<'a, T> {
    from: *const T,
    steps: [isize; 2],
    windows: &'a Geometry,
    outside: f32,
    to: &'a mut [f32],
}

impl<T: Narrow + Wide> Work for Copying<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Copying { from, steps, windows, outside, to } = self;
        let ([height, width], [top, left]) = (windows.input, windows.padding);
        let (stride, phase) = (windows.stride[1], windows.phase());
        if windows.row() == 0 {
            return;
        }
        for (row, to) in to.chunks_exact_mut(windows.row()).take(windows.rows()).enumerate() {
            // No window has a tap in this row.
            if row % windows.stride[0] > windows.reach(0) {
                continue;
            }
            let Some(y) = row.checked_sub(top).filter(|&y| y < height) else {
                to.fill(outside);
                continue;
            };
            for (p, to) in to.chunks_exact_mut(phase).enumerate() {
                // Number i is column i · stride + p - left.
                let first = left.saturating_sub(p).div_ceil(stride).min(phase);
                let end = (width + left).saturating_sub(p).div_ceil(stride).clamp(first, phase);
                to[..first].fill(outside);
                to[end..].fill(outside);
                let to = &mut to[first..end];
                if to.is_empty() {
                    continue;
                }
                let (column, step) = ((first * stride + p - left) as isize, stride as isize * steps[1]);
                // SAFETY: who makes one says that the tensor has the plane, of which these are elements.
                unsafe {
                    let from = from.offset(y as isize * steps[0] + column * steps[1]);
                    if step == 1 {
                        T::widen(std::slice::from_raw_parts(from, to.len()), to);
                    } else {
                        to.iter_mut().enumerate().for_each(|(i, to)| *to = (*from.offset(i as isize * step)).wide());
                    }
                }
            }
        }
    }
}

/// Writes the numbers of a plane to a row of the output, put through an activation.
///
/// # Safety
/// This CPU has the instructions of `I`. The output has these elements, which nobody else uses.
pub unsafe fn store<I: Products>(numbers: &mut [f32], activation: Activation, to: Matrix) {
    let to = Epilogue { alpha: 1.0, beta: 0.0, activation, bias: None, c: to, out: to, image: usize::MAX, images: 0 };
    let (rows, rest) = numbers.as_chunks_mut::<WIDTH>();
    let whole = rows.len();
    // SAFETY: the caller's. As a matrix its rows are panels wide.
    unsafe {
        let to = Epilogue { out: Matrix { row: WIDTH as isize, ..to.out }, ..to };
        to.store::<I>(rows, 0, 0, WIDTH);
        if !rest.is_empty() {
            let mut row = [[0f32; WIDTH]];
            row[0][..rest.len()].copy_from_slice(rest);
            to.store::<I>(&mut row, whole, 0, rest.len());
        }
    }
}
