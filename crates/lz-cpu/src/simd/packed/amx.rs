//! Tiles of bfloat16 by [AMX](super::super::amx): up to 32 rows by a whole panel.

use half::bf16;

use super::super::amx::{self, Amx, HEIGHT, Product, ROW, STEP};
use super::WIDTH;
use super::engine::{Engine, Panels, STRIDE, prefetch};

/// The engine.
pub struct AmxBf16;

/// Bytes of a cache line.
const LINE: usize = 64;
/// Bytes of the weights of a step.
const WEIGHTS: usize = HEIGHT * ROW;
/// Bytes between the weights that are multiplied and those that are prefetched: four steps, which take about as long as the
/// memory.
const FAR: usize = 4 * WEIGHTS;
const _: () = assert!(ROW == WIDTH * size_of::<f32>() && ROW == 2 * WIDTH * size_of::<bf16>());

impl Engine for AmxBf16 {
    type Isa = Amx;
    type Number = bf16;
    type Weight = bf16;
    type Row = bf16;
    type Scratch = ();
    const INTERLEAVE: usize = 2;
    const ROWS: usize = 2 * HEIGHT;

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn begin(count: usize) {
        // SAFETY: the caller's.
        unsafe { amx::configure(count) };
    }

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn end() {
        // SAFETY: the caller's.
        unsafe { amx::release() };
    }

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn add_block(
        _: &mut (),
        rows: &[bf16],
        count: usize,
        weight: Panels<'_, bf16>,
        sums: &mut [[f32; WIDTH]],
        first: bool,
    ) {
        let weight = weight.only();
        let steps = size_of_val(weight) / WEIGHTS;
        assert!(rows.len() >= (count - 1) * STRIDE + weight.len() / WIDTH && sums.len() >= count);
        assert!(size_of_val(weight) == steps * WEIGHTS, "panels are padded to whole steps");
        assert!(steps * STEP <= STRIDE * size_of::<bf16>(), "a row holds all steps");
        let product = Product {
            rows: rows.as_ptr().cast(),
            apart: STRIDE * size_of::<bf16>(),
            pairs: weight.as_ptr().cast(),
            sums: sums.as_mut_ptr().cast(),
            count,
            steps,
        };
        let prefetched = |weight: *const u8| {
            // So few rows wait for the weights; more wait for the products.
            if count <= HEIGHT {
                (0..WEIGHTS / LINE).for_each(|line| prefetch(weight.wrapping_add(line * LINE), FAR));
            }
        };
        // SAFETY: all is inside the slices, whose sizes are checked above; the registers are the caller's.
        unsafe { amx::multiply(product, !first, prefetched) };
    }
}
