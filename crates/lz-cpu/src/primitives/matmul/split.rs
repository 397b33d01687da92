//! Products of float32 matrices by [AMX](crate::simd::amx), which multiplies bfloat16.
//!
//! A number x is the sum of parts, each of which is a bfloat16: part 0 is x rounded, part 1 what is missing rounded, and so on. Three
//! parts of 8 bits hold all 24 bits of a float32. Of the nine products of the parts of two numbers, six are made: the others are
//! less than 2^-24 of the product. With two parts, three of four products are made, and the others are about 2^-17 of it. Sums
//! are made in float32.
//!
//! A task is some rows with a group of panels of [`WIDTH`] columns. For each block of [`DEEP`] rows of B it splits the panels, then
//! splits each tile of [`TALL`] rows and multiplies it with all of them.
//!
//! bfloat16 has the exponents of float32, so a part is as exact as its number is large: the lower parts of numbers below 2^-110
//! are 0, because AMX takes subnormal numbers for zeros. And a number above the largest bfloat16 has no first part. So tiles with
//! numbers of 2^127 or more (infinities and NaN too), and those with a row or a column whose numbers are all below 2^-60, are computed
//! in float32.

use std::ops::Range;

use lz_abi::{Args, DType, KernelError, Threads};

use super::epilogue::Epilogue;
use super::float::{self, Source};
use super::operand::Matrix;
use super::{Call, Sizes, tasks};
use crate::simd::amx::{self, Amx, HEIGHT, PAIRS, Product, ROW, STEP};
use crate::simd::packed::WIDTH;
use crate::simd::{Avx512, Isa, Work, check};

/// Rows of B of a block: a tile's parts of it, at most 26 KiB, stay in the first cache.
const DEEP: usize = 128;
/// Blocks whose products are added one after the other before their sum joins those of the blocks before: every addition rounds,
/// by a share of the sum so far.
const CHAIN: usize = 4;
/// Rows of B that one instruction multiplies.
const STEPS: usize = STEP / 2;
/// Rows of a tile.
const TALL: usize = 2 * HEIGHT;
/// Panels of a group at most: their parts of a block, at most 384 KiB, stay in the second cache.
const GROUP: usize = 16;
/// Panels of a group at least, where there are more: a tile is split again for each group.
const LEAST_GROUP: usize = 6;
/// Rows of a task at most: their sums are 1 MiB, and once more where there are several chains.
const ROWS: usize = 512;
/// Rows of a task at least, where there are more: panels are split again for each task.
const LEAST_ROWS: usize = 128;
/// Tasks for each thread, so that one which is late costs little.
const TASKS: usize = 2;

/// 2^127 and 2^-60, as bits.
const LARGE: u32 = (127 + 127) << 23;
const SMALL: u32 = (127 - 60) << 23;

/// Whether this CPU has the instructions.
pub fn is_here() -> bool {
    check::<Amx>().is_ok()
}

/// Whether a product of these dtypes is made so.
pub(super) fn takes(call: &Call<'_>) -> bool {
    let b = match call.b {
        Source::Matrix(b) => b.packed || b.dtype == DType::F32,
        Source::Windows(_) => false,
    };
    call.a.dtype == DType::F32 && b && call.sizes.k > 0
}

/// From the parts of a row to those of the next: not a multiple of a large power of two, whose lines would share places of a cache.
const fn apart(parts: usize) -> usize {
    parts * DEEP + STEPS
}

/// How a call is cut into tasks.
struct Plan {
    matrices: usize,
    groups: usize,
    pieces: usize,
    workers: usize,
    /// Numbers of the scratch memory of a thread ([`slot`]).
    slot: [usize; 5],
}

impl Plan {
    fn of(sizes: Sizes, matrices: usize, parts: usize, threads: usize) -> Plan {
        let panels = sizes.n.div_ceil(WIDTH);
        let wanted = (threads * TASKS).div_ceil(matrices.max(1));
        let groups = panels.div_ceil(GROUP).max(wanted.min(panels / LEAST_GROUP)).max(1);
        let pieces = sizes.m.div_ceil(ROWS).max(wanted.div_ceil(groups).min(sizes.m / LEAST_ROWS)).max(1);
        let tasks = matrices * pieces * groups;
        let workers = if sizes.m == 0 || panels == 0 { 0 } else { threads.min(tasks) };
        Plan { matrices, groups, pieces, workers, slot: slot(sizes, parts) }
    }
}

/// Numbers of the scratch memory of a thread: a tile or a panel in float32; the parts of a tile, and those of a group, as pairs; sums of
/// a chain, and of those before. The parts of a group are also the scratch memory of tiles in float32.
fn slot(sizes: Sizes, parts: usize) -> [usize; 5] {
    let group = sizes.n.div_ceil(WIDTH).min(GROUP);
    let rows = if sizes.k > DEEP { sizes.m.min(ROWS) } else { TALL };
    let exact = float::scratch(Sizes { m: TALL, ..sizes }, 1) / size_of::<f32>();
    let numbers = [
        DEEP * WIDTH.max(TALL),
        TALL * apart(parts) / 2,
        (group * parts * DEEP * WIDTH / 2).max(exact),
        rows * group * WIDTH,
        if sizes.k > CHAIN * DEEP { rows * group * WIDTH } else { 0 },
    ];
    numbers.map(|numbers| numbers.next_multiple_of(16))
}

/// Bytes of scratch memory.
pub(super) fn scratch(sizes: Sizes, parts: usize, threads: usize) -> usize {
    slot(sizes, parts).iter().sum::<usize>() * size_of::<f32>() * threads.max(1)
}

/// Runs a call with so many parts. This CPU has the instructions ([`is_here`]), and the call is one of those it [`takes`].
pub(super) fn run<const PARTS: usize>(args: &mut Args<'_, '_>, call: &Call<'_>) -> Result<(), KernelError> {
    let threads = args.threads();
    let plan = Plan::of(call.sizes, call.batch.len(), PARTS, threads.count());
    let slot: usize = plan.slot.iter().sum();
    let memory = args.workspace().take::<f32>(slot * plan.workers)?;
    plan.run::<PARTS>(threads, memory, call);
    Ok(())
}

impl Plan {
    fn run<const PARTS: usize>(&self, threads: Threads<'_>, memory: &mut [f32], call: &Call<'_>) {
        let Plan { matrices, groups, pieces, workers, slot: lengths } = *self;
        let (sizes, panels, tasks) = (call.sizes, call.sizes.n.div_ceil(WIDTH), matrices * pieces * groups);
        tasks::each(threads, workers, (memory, lengths.iter().sum()), tasks, |task, slot| {
            let (numbers, slot) = slot.split_at_mut(lengths[0]);
            let (row_parts, slot) = slot.split_at_mut(lengths[1]);
            let (panel_parts, slot) = slot.split_at_mut(lengths[2]);
            let (sums, totals) = slot.split_at_mut(lengths[3]);
            let part = |all: usize, at: usize, of: usize| all * at / of..all * (at + 1) / of;
            let (group, rest) = (task % groups, task / groups);
            let (piece, matrix) = (rest % pieces, rest / pieces);
            call.batch.pieces(matrix..matrix + 1, |_, [out, a, b, c]| {
                let tiles = Tiles::<PARTS> {
                    sizes,
                    a: call.a.at(a),
                    b: call.b.at(b),
                    epilogue: call.epilogue.at(out, c),
                    rows: part(sizes.m, piece, pieces),
                    panels: part(panels, group, groups),
                    numbers: &mut *numbers,
                    row_parts: &mut *row_parts,
                    panel_parts: &mut *panel_parts,
                    sums: &mut *sums,
                    totals: &mut *totals,
                };
                Amx::vectorize(tiles).expect("the caller has asked");
            });
        });
    }
}

/// A task.
struct Tiles<'a, const PARTS: usize> {
    sizes: Sizes,
    a: Matrix,
    b: Source<'a>,
    epilogue: Epilogue,
    rows: Range<usize>,
    panels: Range<usize>,
    numbers: &'a mut [f32],
    row_parts: &'a mut [f32],
    panel_parts: &'a mut [f32],
    sums: &'a mut [f32],
    totals: &'a mut [f32],
}

impl<const PARTS: usize> Work for Tiles<'_, PARTS> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let (sizes, count) = (self.sizes, self.panels.len());
        let blocks = sizes.k.div_ceil(DEEP);
        let tiles = self.rows.len().div_ceil(TALL);
        // One bit for each tile that must be computed in float32, and whether all must be.
        let (mut exact, mut all_exact) = (0u32, false);
        let mut begun = 0;
        const { assert!(ROWS / TALL <= 32) };
        for block in 0..blocks {
            let features = block * DEEP..((block + 1) * DEEP).min(sizes.k);
            let steps = features.len().div_ceil(STEPS);
            let panel_size = steps * PARTS * PAIRS / size_of::<f32>();
            for (i, panel) in self.panels.clone().enumerate() {
                all_exact |= !self.split_panel(panel, features.clone(), i * panel_size);
            }
            if all_exact {
                break;
            }
            for tile in 0..tiles {
                let mine = self.rows.len() * tile / tiles..self.rows.len() * (tile + 1) / tiles;
                let (height, first) = (mine.len(), self.rows.start + mine.start);
                exact |= u32::from(!self.split_rows(first..first + height, features.clone())) << tile;
                let place = if blocks > 1 { mine.start * count } else { 0 };
                let part = place * WIDTH..(place + height * count) * WIDTH;
                let sums = &mut self.sums[part.clone()];
                if block == CHAIN {
                    self.totals[part.clone()].copy_from_slice(sums);
                } else if block > 0 && block.is_multiple_of(CHAIN) {
                    self.totals[part.clone()].iter_mut().zip(&*sums).for_each(|(total, sum)| *total += sum);
                }
                if height != begun {
                    begun = height;
                    // SAFETY: this runs where AMX is, and a tile has from one to `TALL` rows.
                    unsafe { amx::configure(height) };
                }
                for (i, sums) in sums.chunks_exact_mut(height * WIDTH).enumerate() {
                    let pairs = &self.panel_parts[i * panel_size..][..panel_size];
                    let product = Product {
                        rows: self.row_parts.as_ptr().cast(),
                        apart: apart(PARTS) * 2,
                        pairs: pairs.as_ptr().cast(),
                        sums: sums.as_mut_ptr().cast(),
                        count: height,
                        steps,
                    };
                    const { assert!(ROW == WIDTH * size_of::<f32>()) };
                    // SAFETY: `split_rows` has written `TALL` rows, `split_panel` so many steps of each panel; the sums have
                    // `height` rows. The registers are configured for this height.
                    unsafe { amx::multiply_parts::<PARTS>(product, DEEP * 2, !block.is_multiple_of(CHAIN)) };
                }
                if block + 1 == blocks && exact & 1 << tile == 0 {
                    if block >= CHAIN {
                        sums.iter_mut().zip(&self.totals[part]).for_each(|(sum, total)| *sum += total);
                    }
                    for (sums, panel) in sums.chunks_exact_mut(height * WIDTH).zip(self.panels.clone()) {
                        let column = panel * WIDTH;
                        let sums = sums.as_chunks_mut::<WIDTH>().0;
                        // SAFETY: this runs with the instructions of AVX-512. The output has these rows and columns, which no other
                        // task has.
                        unsafe { self.epilogue.store::<Avx512>(sums, first, column, WIDTH.min(sizes.n - column)) };
                    }
                }
            }
        }
        if begun > 0 {
            // SAFETY: this runs where AMX is.
            unsafe { amx::release() };
        }
        for tile in (0..tiles).filter(|tile| all_exact || exact & 1 << tile != 0) {
            let mine = self.rows.len() * tile / tiles..self.rows.len() * (tile + 1) / tiles;
            self.in_float32(self.rows.start + mine.start..self.rows.start + mine.end);
        }
    }
}

impl<const PARTS: usize> Tiles<'_, PARTS> {
    /// Writes the parts of a block of a panel: for each step the pairs of part 0, then those of part 1, and so on. Returns whether its
    /// numbers can be split.
    #[inline(always)]
    fn split_panel(&mut self, panel: usize, features: Range<usize>, place: usize) -> bool {
        let (count, steps) = (features.len(), features.len().div_ceil(STEPS));
        let from = match self.b.packed() {
            // SAFETY: `bind` has checked the sizes of the packed weight.
            Some(packed) => unsafe {
                let start = packed.add((panel * self.sizes.k + features.start) * WIDTH);
                std::slice::from_raw_parts(start, count * WIDTH)
            },
            None => {
                let columns = panel * WIDTH..((panel + 1) * WIDTH).min(self.sizes.n);
                let to = &mut self.numbers[..count * WIDTH];
                // SAFETY: this runs with the instructions of AVX-512; B has these rows and columns.
                unsafe { self.b.pack::<Avx512>(features, columns, to) };
                to
            }
        };
        let from = from.as_chunks::<WIDTH>().0;
        let to = &mut self.panel_parts[place..][..steps * PARTS * HEIGHT * WIDTH];
        let to = to.as_chunks_mut::<WIDTH>().0;
        let (mut largest, zeros) = ([0u32; WIDTH], [0f32; WIDTH]);
        for (step, to) in to.chunks_exact_mut(PARTS * HEIGHT).enumerate() {
            for pair in 0..HEIGHT {
                let feature = (step * HEIGHT + pair) * 2;
                let (even, odd) = (from.get(feature).unwrap_or(&zeros), from.get(feature + 1).unwrap_or(&zeros));
                let (low, high) = (parts_of::<PARTS>(even), parts_of::<PARTS>(odd));
                for part in 0..PARTS {
                    let mut both = [0f32; WIDTH];
                    for lane in 0..WIDTH {
                        both[lane] = f32::from_bits(low[part][lane] >> 16 | high[part][lane]);
                    }
                    to[part * HEIGHT + pair] = both;
                }
                for lane in 0..WIDTH {
                    largest[lane] = largest[lane].max(size_of_bits(even[lane])).max(size_of_bits(odd[lane]));
                }
            }
        }
        largest.into_iter().fold(true, |can, largest| can & can_be_split(largest))
    }

    /// Writes the parts of a block of some rows. Returns whether their numbers can be split.
    #[inline(always)]
    fn split_rows(&mut self, rows: Range<usize>, features: Range<usize>) -> bool {
        let (height, count) = (rows.len(), features.len());
        let steps = count.div_ceil(STEPS);
        // SAFETY: this runs with the instructions of AVX-512; A has these rows and columns.
        unsafe { self.a.arrange::<Avx512>(rows, features, DEEP, self.numbers) };
        let mut can = true;
        for row in 0..height {
            let mut largest = [0u32; WIDTH];
            let from = &mut self.numbers[row * DEEP..][..steps * STEPS];
            from[count..].fill(0.0);
            let to = &mut self.row_parts[row * apart(PARTS) / 2..][..apart(PARTS) / 2];
            // SAFETY: any bits are numbers of either type, and a float32 is aligned for two numbers of 16 bits.
            let to = unsafe { std::slice::from_raw_parts_mut(to.as_mut_ptr().cast::<u16>(), apart(PARTS)) };
            for (step, from) in from.as_chunks::<WIDTH>().0.iter().enumerate() {
                for (part, bits) in parts_of::<PARTS>(from).iter().enumerate() {
                    let to =
                        to[part * DEEP + step * WIDTH..].first_chunk_mut::<WIDTH>().expect("a row holds all steps");
                    for lane in 0..WIDTH {
                        to[lane] = (bits[lane] >> 16) as u16;
                    }
                }
                for lane in 0..WIDTH {
                    largest[lane] = largest[lane].max(size_of_bits(from[lane]));
                }
            }
            can &= can_be_split(largest.into_iter().max().unwrap_or(0));
        }
        can
    }

    /// Computes some rows in float32.
    #[inline(never)]
    fn in_float32(&mut self, rows: Range<usize>) {
        let memory = &mut *self.panel_parts;
        float::run_rows::<Avx512>(memory, self.sizes, (self.a, self.b), self.epilogue, rows, self.panels.clone());
    }
}

const _: () = assert!(STEPS == WIDTH, "a step of a row is as wide as a panel");

/// The parts of numbers, as bits whose lower halves are 0.
#[inline(always)]
fn parts_of<const PARTS: usize>(numbers: &[f32; WIDTH]) -> [[u32; WIDTH]; PARTS] {
    let (mut parts, mut rest) = ([[0; WIDTH]; PARTS], *numbers);
    for part in &mut parts {
        for lane in 0..WIDTH {
            // The nearest number whose lower bits are 0; ties go away from 0.
            part[lane] = rest[lane].to_bits().wrapping_add(0x8000) & 0xffff_0000;
            rest[lane] -= f32::from_bits(part[lane]);
        }
    }
    parts
}

/// The bits of a number without its sign, which are ordered as sizes are.
#[inline(always)]
fn size_of_bits(number: f32) -> u32 {
    number.to_bits() & 0x7fff_ffff
}

/// Whether the numbers of a row or a column can be split, by the bits of the largest.
#[inline(always)]
fn can_be_split(largest: u32) -> bool {
    largest == 0 || (SMALL..LARGE).contains(&largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_parts_are_the_number_and_two_are_most_of_it() {
        for number in [1.0, -1.0, 0.1, 3.402_823_4e37, -7.654_321e-12, 16_777_215.0, 0.0, 1.0 / 3.0] {
            let sum = |parts: &[[u32; WIDTH]]| parts.iter().map(|part| f64::from(f32::from_bits(part[7]))).sum::<f64>();
            assert_eq!(sum(&parts_of::<3>(&[number; WIDTH])), f64::from(number));
            let off = sum(&parts_of::<2>(&[number; WIDTH])) - f64::from(number);
            assert!(off.abs() <= f64::from(number).abs() / f64::from(1 << 17), "{number} is off by {off}");
        }
    }
}
