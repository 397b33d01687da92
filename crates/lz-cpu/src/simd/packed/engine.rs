//! What computes a tile of a product.

use half::{bf16, f16};
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

/// Bytes between the weights that are multiplied and those that are prefetched meanwhile. A CPU's own prefetching ends at
/// each page of 4 KiB and waits for a few misses in the next one: it reaches half of the bandwidth.
pub const AHEAD: usize = 2048;

/// Asks for the cache line so many bytes ahead of an address. It may lie behind the weight: nothing is read then.
#[allow(unsafe_code)]
#[inline(always)]
pub fn prefetch<T>(from: *const T, ahead: usize) {
    let ahead = from.cast::<u8>().wrapping_add(ahead);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which every CPU of the architecture has, and which never fails.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(ahead.cast())
    };
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) ahead, options(nostack, readonly, preserves_flags))
    };
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = ahead;
}

/// A dtype of packed weights.
pub trait Packed: Scalar {
    /// Input features in one number: two integers of 4 bits are a byte.
    const FEATURES: usize = 1;
    /// Whether scales make numbers of them.
    const SCALED: bool = false;
}

impl Packed for f32 {}
impl Packed for f16 {}
impl Packed for bf16 {}

impl Packed for i8 {
    const SCALED: bool = true;
}

impl Packed for u8 {
    const FEATURES: usize = 2;
    const SCALED: bool = true;
}

/// Numbers of the input that an engine computes with as `R`.
pub trait ArrangedAs<R>: Sized {
    /// Writes the same numbers. Both slices have one length.
    fn arrange(from: &[Self], to: &mut [R]);
}

impl<T: Narrow> ArrangedAs<f32> for T {
    #[inline(always)]
    fn arrange(from: &[T], to: &mut [f32]) {
        T::widen(from, to);
    }
}

impl ArrangedAs<bf16> for bf16 {
    #[inline(always)]
    fn arrange(from: &[bf16], to: &mut [bf16]) {
        to.copy_from_slice(from);
    }
}

/// Writes a piece of a row of the input as an engine computes with it, and zeros behind it.
#[inline(always)]
pub fn arrange<T: ArrangedAs<R>, R: Scalar + Default>(from: &[T], to: &mut [R]) {
    let (to, rest) = to.split_at_mut(from.len());
    T::arrange(from, to);
    rest.fill(R::default());
}

/// The scales of a block of neighbouring panels.
#[derive(Clone, Copy, Default)]
pub struct Scales<'a> {
    /// From those of the first group of the block in the first panel on: [`WIDTH`] for each group.
    pub numbers: &'a [f32],
    /// Numbers from a panel to the next.
    pub apart: usize,
    /// Input features of a group.
    pub group: usize,
}

/// The same block of neighbouring panels.
#[derive(Clone, Copy)]
pub struct Panels<'a, T> {
    /// From the block of the first panel to the end of that of the last one.
    pub weight: &'a [T],
    /// Numbers of a block.
    pub block: usize,
    /// Numbers from a panel to the next.
    pub apart: usize,
    /// How many panels.
    pub count: usize,
    /// Input features of the block, without what pads it.
    pub features: usize,
    /// Where the weight is scaled.
    pub scales: Scales<'a>,
}

impl<'a, T> Panels<'a, T> {
    /// The block, where there is one panel.
    #[inline(always)]
    pub fn only(self) -> &'a [T] {
        assert!(self.count == 1 && self.weight.len() == self.block, "one panel at a time");
        self.weight
    }
}

/// Instructions that compute tiles.
#[allow(unsafe_code)]
pub trait Engine {
    /// The instruction set it is compiled for.
    type Isa: Isa;
    /// The dtype of input and result.
    type Number: Narrow + ArrangedAs<Self::Row>;
    /// The dtype of the weight.
    type Weight: Packed;
    /// The dtype the input is arranged in.
    type Row: Scalar + Default;

    /// What a thread keeps from one tile to the next.
    type Scratch: Default;

    /// Numbers of the weight side by side.
    const INTERLEAVE: usize;
    /// Input features that arranged rows are padded to a multiple of, with zeros.
    const STEP: usize = 1;
    /// Rows of the input a tile has at most.
    const ROWS: usize;

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

    /// Panels that a tile of `count` rows is computed with at the same time, side by side. One stream of weights and two
    /// registers of sums do not keep the memory busy.
    #[inline(always)]
    fn abreast(count: usize) -> usize {
        let _ = count;
        1
    }

    /// Adds the products of a block to the tiles of some panels, or begins them.
    ///
    /// `rows` are `count` rows of a block, [`STRIDE`] apart. `weight` is the same block of a panel, at most [`DEPTH`] input
    /// features deep, and those of the panels behind it. `sums` has `count` rows of the first panel, then those of the next.
    /// `first`: there is no sum yet.
    ///
    /// # Safety
    /// The caller is work that `Self::Isa` runs; `count` is from 1 to [`Engine::ROWS`], and [`Engine::begin`] was called for it.
    unsafe fn add_block(
        scratch: &mut Self::Scratch,
        rows: &[Self::Row],
        count: usize,
        weight: Panels<'_, Self::Weight>,
        sums: &mut [[f32; WIDTH]],
        first: bool,
    );
}
