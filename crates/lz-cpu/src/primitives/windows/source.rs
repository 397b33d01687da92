//! Windows as the columns of a matrix, whose rows are the taps of every channel.

use std::marker::PhantomData;
use std::ops::Range;

use crate::primitives::matmul::Products;
use crate::simd::packed::WIDTH;
use crate::simd::vector::{LANES, Sixteen};
use crate::simd::{Isa, Work};

/// The windows of some images.
#[derive(Clone, Copy)]
pub struct Windows<'a> {
    /// The first plane.
    pub start: *const f32,
    /// Numbers from there on that may be read.
    pub readable: usize,
    /// From an image to the next, from a channel to the next, and from a row of windows to the next.
    pub steps: [usize; 3],
    /// Rows and columns of windows of an image.
    pub output: [usize; 2],
    /// The place of each tap.
    pub taps: &'a [i64],
}

// SAFETY: an address; who uses it vouches for it.
unsafe impl Sync for Windows<'_> {}

/// Windows of a row, one after the other: the column of the panel they begin at, their place, and how many.
type Run = (usize, usize, usize);

impl Windows<'_> {
    /// Those of the channels from a place on.
    pub fn at(self, place: isize) -> Self {
        let readable = self.readable - place as usize;
        Windows { start: self.start.wrapping_offset(place), readable, ..self }
    }

    /// The runs of some columns.
    #[inline(always)]
    fn runs(&self, columns: Range<usize>, to: &mut [Run; WIDTH]) -> usize {
        let (width, size) = (self.output[1], self.output[0] * self.output[1]);
        let (mut count, mut lane) = (0, 0);
        while lane < columns.len() {
            let (image, window) = ((columns.start + lane) / size, (columns.start + lane) % size);
            let (y, x) = (window / width, window % width);
            let len = (width - x).min(columns.len() - lane);
            to[count] = (lane, image * self.steps[0] + y * self.steps[2] + x, len);
            (count, lane) = (count + 1, lane + len);
        }
        count
    }

    /// Writes a panel of columns: [`WIDTH`] numbers for each row of a range. What is behind the last column has no meaning.
    ///
    /// # Safety
    /// This CPU has the instructions of `I`, and the windows are there.
    pub unsafe fn pack<I: Products>(&self, rows: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
        let mut runs = [(0, 0, 0); WIDTH];
        let count = self.runs(columns, &mut runs);
        // SAFETY: the caller's.
        unsafe {
            I::Simple::call(Packing::<<I::Simple as Isa>::Sixteen> {
                windows: self,
                runs: &runs[..count],
                rows,
                to,
                set: PhantomData,
            });
        }
    }
}

struct Packing<'a, V> {
    windows: &'a Windows<'a>,
    runs: &'a [Run],
    rows: Range<usize>,
    to: &'a mut [f32],
    set: PhantomData<V>,
}

impl<V: Sixteen> Work for Packing<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Packing { windows, runs, rows, to, .. } = self;
        let taps = windows.taps;
        let (mut channel, mut tap) = (rows.start / taps.len(), rows.start % taps.len());
        let last = rows.len().saturating_sub(1);
        assert!(to.len() >= rows.len() * WIDTH);
        for row in 0..rows.len() {
            let place = channel * windows.steps[1] + taps[tap] as usize;
            for &(lane, at, len) in runs {
                let (at, whole) = (place + at, len.next_multiple_of(LANES));
                // SAFETY: the windows are there. What is copied in excess is in the next row, which is written after this one.
                unsafe {
                    let (from, to) = (windows.start.add(at), to.as_mut_ptr().add(row * WIDTH + lane));
                    if row < last && at + whole <= windows.readable {
                        for done in (0..whole).step_by(LANES) {
                            V::load(&*from.add(done).cast()).store(&mut *to.add(done).cast());
                        }
                    } else {
                        std::ptr::copy_nonoverlapping(from, to, len);
                    }
                }
            }
            tap += 1;
            if tap == taps.len() {
                (channel, tap) = (channel + 1, 0);
            }
        }
    }
}
