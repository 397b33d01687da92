//! Tiles of integer weights by the instructions for bfloat16: a block of a panel becomes bfloat16 once, for all rows.
//!
//! Integers of up to 8 bits are bfloat16 numbers, so that nothing is rounded. The sum of a group of input features is multiplied
//! with the scale of the group, and joins the sums of the groups before.

use std::marker::PhantomData;

use half::bf16;

use super::super::Isa;
use super::super::amx::STEP;
use super::super::vector::{LANES, Sixteen};
use super::WIDTH;
use super::dequantized::Dequantize;
use super::engine::{AHEAD, DEPTH, Engine, Panels, STRIDE, prefetch};

/// Input features that one instruction of AMX multiplies.
const FEATURES: usize = STEP / size_of::<bf16>();
/// Rows of a tile at most.
const ROWS: usize = 32;
/// Bytes of a cache line.
const LINE: usize = 64;

/// The engine that multiplies, and the dtype of weights.
pub struct Expanded<E, W>(PhantomData<(E, W)>);

/// The block of a panel that was expanded last, and room for the sums of a group.
#[repr(align(64))]
pub struct Block {
    numbers: [bf16; DEPTH * WIDTH],
    sums: [[f32; WIDTH]; ROWS],
    /// The address of its integers; 0 of none.
    of: usize,
}

impl Default for Block {
    #[inline(always)]
    fn default() -> Block {
        Block { numbers: [bf16::ZERO; DEPTH * WIDTH], sums: [[0.0; WIDTH]; ROWS], of: 0 }
    }
}

impl<E, W> Engine for Expanded<E, W>
where
    E: Engine<Number = bf16, Weight = bf16, Row = bf16, Scratch = ()>,
    W: Dequantize,
{
    type Isa = E::Isa;
    type Number = bf16;
    type Weight = W;
    type Row = bf16;
    type Scratch = Block;
    const INTERLEAVE: usize = W::INTERLEAVE;
    const STEP: usize = FEATURES;
    const ROWS: usize = E::ROWS;

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn begin(count: usize) {
        // SAFETY: the caller's.
        unsafe { E::begin(count) };
    }

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn end() {
        // SAFETY: the caller's.
        unsafe { E::end() };
    }

    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn add_block(
        block: &mut Block,
        rows: &[bf16],
        count: usize,
        weight: Panels<'_, W>,
        sums: &mut [[f32; WIDTH]],
        first: bool,
    ) {
        let (from, scales) = (weight.only(), weight.scales);
        assert!(rows.len() >= count * STRIDE && sums.len() >= count && count <= ROWS);
        if block.of != from.as_ptr().addr() {
            // SAFETY: the caller's.
            unsafe { expand::<<E::Isa as Isa>::Sixteen, W>(from, weight.features, &mut block.numbers) };
            block.of = from.as_ptr().addr();
        }
        for (group, begin) in (0..weight.features).step_by(scales.group).enumerate() {
            let features = scales.group.min(weight.features - begin).next_multiple_of(FEATURES);
            let numbers = &block.numbers[begin * WIDTH..(begin + features) * WIDTH];
            let weight = Panels {
                weight: numbers,
                block: numbers.len(),
                apart: 0,
                count: 1,
                features,
                scales: Default::default(),
            };
            // SAFETY: the caller's; the rows have the features of the block, and zeros behind them.
            unsafe { E::add_block(&mut (), &rows[begin..], count, weight, &mut block.sums, true) };
            let scale: &[f32; WIDTH] = &scales.numbers[group * WIDTH..].as_chunks::<WIDTH>().0[0];
            let begins = first && group == 0;
            // SAFETY: the caller's.
            unsafe { join::<<E::Isa as Isa>::Sixteen>(&block.sums[..count], scale, begins, sums) };
        }
    }
}

/// Adds the sums of a group, times its scales, to those of the groups before, or begins them.
///
/// # Safety
/// As for [`Sixteen`].
#[allow(unsafe_code)]
#[inline(always)]
unsafe fn join<V: Sixteen>(group: &[[f32; WIDTH]], scale: &[f32; WIDTH], begins: bool, sums: &mut [[f32; WIDTH]]) {
    let scale = scale.as_chunks::<LANES>().0;
    for (sums, group) in sums.iter_mut().zip(group) {
        for ((sums, group), scale) in sums.as_chunks_mut().0.iter_mut().zip(group.as_chunks().0).zip(scale) {
            // SAFETY: the caller's.
            unsafe {
                let before = if begins { V::splat(0.0) } else { V::load(sums) };
                V::load(group).times(V::load(scale), before).store(sums);
            }
        }
    }
}

/// Writes the integers of a block as pairs of bfloat16, and zeros behind them up to a multiple of [`FEATURES`].
///
/// # Safety
/// As for [`Sixteen`].
#[allow(unsafe_code)]
#[inline(always)]
unsafe fn expand<V: Sixteen, W: Dequantize>(from: &[W], features: usize, to: &mut [bf16; DEPTH * WIDTH]) {
    let step = WIDTH * W::INTERLEAVE;
    // A pair of input features is part of a step, or two steps. Steps have what pads them.
    let both = W::STEP.max(2);
    let count = if W::STEP == 1 { features / 2 } else { features.div_ceil(W::STEP) };
    assert!(features <= DEPTH && from.len() >= features.div_ceil(W::STEP) * step);
    let pairs = to.as_chunks_mut::<{ 2 * LANES }>().0;
    for i in 0..count {
        let from = from.as_ptr().wrapping_add(i * both / W::STEP * step);
        (0..both / W::STEP * step * size_of::<W>()).step_by(LINE).for_each(|line| prefetch(from, AHEAD + line));
        for pair in 0..both / 2 {
            for half in 0..2 {
                // SAFETY: the caller's; the step is inside the block, whose size is checked above.
                let of = |feature: usize| unsafe {
                    let step = feature / W::STEP * step + half * LANES * W::INTERLEAVE;
                    W::integers::<V>(from.wrapping_add(step), feature % W::STEP)
                };
                // SAFETY: the caller's.
                unsafe { V::store_pairs(of(2 * pair), of(2 * pair + 1), &mut pairs[i * both + 2 * pair + half]) };
            }
        }
    }
    let mut done = count * both;
    if done < features {
        for half in 0..2 {
            // SAFETY: as above; it is the last step.
            unsafe {
                let last = W::integers::<V>(from.as_ptr().wrapping_add(done * step + half * LANES), 0);
                V::store_pairs(last, V::splat(0.0), &mut pairs[done + half]);
            }
        }
        done += 2;
    }
    pairs[done..features.next_multiple_of(FEATURES)].fill([bf16::ZERO; 2 * LANES]);
}
