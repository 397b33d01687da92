//! What computes a tile of a product.

use lz_abi::Scalar;

use super::super::Isa;
use super::super::half_floats::Narrow;
use super::WIDTH;

/// Input features whose products are added one after the other before their sum joins those of the blocks before: it
/// bounds the error of long sums, and keeps a tile's share of the input (at most 32 rows of 2 KiB) in the first cache.
pub const DEPTH: usize = 512;

/// Numbers from one row of a block of the arranged input to the next. Rows that are a multiple of 4 KiB apart would fall
/// into the same lines of the first cache.
pub const STRIDE: usize = DEPTH + 32;

/// Instructions that compute tiles.
#[allow(unsafe_code)]
pub trait Engine {
    /// The instruction set it is compiled for.
    type Isa: Isa;
    /// The dtype of input, weight and result.
    type Number: Narrow;
    /// The dtype the input is arranged in.
    type Row: Scalar;

    /// Rows of the input a tile has at most.
    const ROWS: usize;

    /// Input features side by side in the packed weight.
    const INTERLEAVE: usize;

    /// Writes a piece of a row of the input as it is computed with, and zeros behind it.
    fn arrange(from: &[Self::Number], to: &mut [Self::Row]);

    /// Comes before tiles of `count` rows, where those before had another number.
    ///
    /// # Safety
    /// As of [`Engine::add_block`].
    #[inline(always)]
    unsafe fn begin(count: usize) {
        let _ = count;
    }

    /// Comes after the last tile of a thread, where there was one.
    ///
    /// # Safety
    /// As of [`Engine::add_block`].
    #[inline(always)]
    unsafe fn end() {}

    /// Adds the products of a block to a tile, or begins it.
    ///
    /// `rows` are `count` rows of a block, [`STRIDE`] apart. `weight` is the same block of a panel, at most [`DEPTH`] input
    /// features deep. `first`: there is no sum yet.
    ///
    /// # Safety
    /// The caller is work that `Self::Isa` runs; `count` is from 1 to [`Engine::ROWS`], and [`Engine::begin`] was called for it.
    unsafe fn add_block(
        rows: &[Self::Row],
        count: usize,
        weight: &[Self::Number],
        sums: &mut [[f32; WIDTH]],
        first: bool,
    );
}
