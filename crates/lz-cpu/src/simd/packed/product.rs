//! The tiles of a product: the rows of the input by chunks, each chunk with every panel, shared among threads.

use std::marker::PhantomData;

use lz_abi::Rows;
use lz_model::{KernelArgs, KernelError};

use super::super::rms_norm::as_f32;
use super::super::{Isa, Work, check};
use super::WIDTH;
use super::engine::{DEPTH, Engine, STRIDE};
use super::epilogue::{Activation, store};
use crate::reference::arguments::Arguments;

/// The places of the arguments in the schema.
pub const INPUT: usize = 0;
const WEIGHT: usize = 1;
const BIAS: usize = 2;

/// Rows of a tile at most, of all engines.
const MOST_ROWS: usize = 32;

/// Blocks of arranged rows that are kept at a time: 1 MiB of float32, half of the second cache of today's CPUs.
const KEPT: usize = 480;
/// Rows of a chunk at least, so that a panel is not read again for too few of them.
const LEAST_ROWS: usize = 48;

/// Bytes of scratch memory: the arranged rows of a chunk, float32 at most, and the bias as float32.
pub const WORKSPACE: &str = "min(rows, max(48, 480 / max(ceil_div(in_features, 512), 1))) * ceil_div(in_features, 512) * 544 * 4 \
+ out_features * 4 + 128";

/// Multiplications below which one thread does all: about 10 µs of one core.
const ONE_THREAD: usize = 1 << 19;
/// Parts for each thread, so that one which is late costs little.
const PARTS: usize = 4;

/// Memory of which each thread writes parts of its own.
struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    memory: PhantomData<&'a mut [T]>,
}

// SAFETY: a mutable borrow of plain values, whose parts `Shared::part` gives out to one thread each.
#[allow(unsafe_code)]
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    fn new(all: &'a mut [T]) -> Shared<'a, T> {
        Shared { start: all.as_mut_ptr(), len: all.len(), memory: PhantomData }
    }

    /// # Safety
    /// Parts that are used at the same time do not overlap.
    #[allow(unsafe_code, clippy::mut_from_ref)]
    #[inline(always)]
    unsafe fn part(&self, first: usize, len: usize) -> &mut [T] {
        assert!(first <= self.len && len <= self.len - first, "{len} from {first} of {}", self.len);
        // SAFETY: inside the slice it was made of, and nobody else uses this part.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), len) }
    }
}

/// The sizes of a call.
#[derive(Clone, Copy)]
struct Sizes {
    /// Rows of the chunk, and the first of them.
    count: usize,
    first: usize,
    /// Input features, and the same with what pads the panels.
    ins: usize,
    padded: usize,
    outs: usize,
}

impl Sizes {
    /// The input features of a block that the panels have.
    #[inline(always)]
    fn block(&self, block: usize) -> std::ops::Range<usize> {
        block * DEPTH..((block + 1) * DEPTH).min(self.padded)
    }

    /// Where a row of a block of the arranged input begins.
    #[inline(always)]
    fn place(&self, block: usize, row: usize) -> usize {
        (block * self.count + row) * STRIDE
    }
}

/// Runs a call with one engine.
pub fn run<E: Engine>(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
    check::<E::Isa>()?;
    let dim = |name: &str| args.dim(name) as usize;
    let (rows, ins, outs, padded) =
        (dim("rows"), dim("in_features"), dim("out_features"), dim("groups") * E::INTERLEAVE);
    let activation = Activation::named(args.text("activation"))?;
    let args = &mut args.args;
    let (input, weight) =
        args.input(INPUT).zip(args.input(WEIGHT)).ok_or_else(|| KernelError::Failed("no input".into()))?;
    if rows == 0 || outs == 0 {
        return Ok(());
    }
    let (input, weight) = (input.rows::<E::Number>()?, weight.as_slice::<E::Number>()?);
    let (panels, blocks) = (outs.div_ceil(WIDTH), padded.div_ceil(DEPTH));
    assert_eq!(weight.len(), panels * padded * WIDTH, "the schema says so");
    let chunk = rows.min(LEAST_ROWS.max(KEPT / blocks.max(1)));
    let arranged = args.workspace().take::<E::Row>(chunk * blocks * STRIDE)?;
    let bias = match args.input(BIAS) {
        None => None,
        Some(bias) => Some(as_f32(bias, args)?),
    };
    let threads = args.threads();
    let output = Shared::new(args.outputs[0].as_slice::<E::Number>()?);
    let alone = threads.count() == 1 || rows.saturating_mul(ins).saturating_mul(outs) < ONE_THREAD;
    let (parts, row_parts) = if alone { (1, 1) } else { (panels.min(threads.count() * PARTS), threads.count()) };
    for first in (0..rows).step_by(chunk) {
        let sizes = Sizes { count: chunk.min(rows - first), first, ins, padded, outs };
        let part_of = |all: usize, part: usize, parts: usize| all * part / parts..all * (part + 1) / parts;
        let to = Shared::new(&mut *arranged);
        threads.each(if blocks == 0 { 0 } else { row_parts }, |part| {
            let rows = part_of(sizes.count, part, row_parts);
            E::Isa::vectorize(Arranging::<E> { input, rows, sizes, to: &to });
        });
        let arranged = &*arranged;
        threads.each(parts, |part| {
            let panels = part_of(panels, part, parts);
            E::Isa::vectorize(Tiles::<E> { arranged, weight, bias, activation, output: &output, panels, sizes });
        });
    }
    Ok(())
}

/// Writes rows of a chunk as the engine computes with them, block by block.
struct Arranging<'a, E: Engine> {
    input: Rows<'a, E::Number>,
    rows: std::ops::Range<usize>,
    sizes: Sizes,
    to: &'a Shared<'a, E::Row>,
}

impl<E: Engine> Work for Arranging<'_, E> {
    type Output = ();

    #[allow(unsafe_code)]
    #[inline(always)]
    fn run(self) {
        let sizes = self.sizes;
        for row in self.rows {
            let from = self.input.get(sizes.first + row);
            for block in 0..sizes.padded.div_ceil(DEPTH) {
                let features = sizes.block(block);
                // SAFETY: no other part has this row.
                let to = unsafe { self.to.part(sizes.place(block, row), features.len()) };
                E::arrange(&from[features.start..features.end.min(sizes.ins)], to);
            }
        }
    }
}

/// The tiles of some panels.
struct Tiles<'a, E: Engine> {
    arranged: &'a [E::Row],
    weight: &'a [E::Number],
    bias: Option<&'a [f32]>,
    activation: Activation,
    output: &'a Shared<'a, E::Number>,
    panels: std::ops::Range<usize>,
    sizes: Sizes,
}

impl<E: Engine> Work for Tiles<'_, E> {
    type Output = ();

    #[allow(unsafe_code)]
    #[inline(always)]
    fn run(self) {
        // Rows in tiles of about the same height: 16 rows are 8 and 8, not 12 and 4.
        let tiles = self.sizes.count.div_ceil(E::ROWS);
        let mut begun = 0;
        for panel in self.panels.clone() {
            let mut bias = [0f32; WIDTH];
            let columns = panel * WIDTH..((panel + 1) * WIDTH).min(self.sizes.outs);
            if let Some(given) = self.bias {
                bias[..columns.len()].copy_from_slice(&given[columns.clone()]);
            }
            for tile in 0..tiles {
                let rows = self.sizes.count * tile / tiles..self.sizes.count * (tile + 1) / tiles;
                if rows.len() != begun {
                    begun = rows.len();
                    // SAFETY: this runs with the instructions of `E::Isa`; a tile has from one to `E::ROWS` rows.
                    unsafe { E::begin(begun) };
                }
                self.tile(panel, rows, columns.clone(), self.bias.is_some().then_some(&bias));
            }
        }
        if begun > 0 {
            // SAFETY: as above.
            unsafe { E::end() };
        }
    }
}

impl<E: Engine> Tiles<'_, E> {
    #[allow(unsafe_code)]
    #[inline(always)]
    fn tile(
        &self,
        panel: usize,
        rows: std::ops::Range<usize>,
        columns: std::ops::Range<usize>,
        bias: Option<&[f32; WIDTH]>,
    ) {
        let sizes = self.sizes;
        let mut sums = [[0f32; WIDTH]; MOST_ROWS];
        let weight = &self.weight[panel * sizes.padded * WIDTH..(panel + 1) * sizes.padded * WIDTH];
        for block in 0..sizes.padded.div_ceil(DEPTH) {
            let features = sizes.block(block);
            let arranged = &self.arranged[sizes.place(block, rows.start)..sizes.place(block, rows.end)];
            let weight = &weight[features.start * WIDTH..features.end * WIDTH];
            // SAFETY: this runs with the instructions of `E::Isa`; a tile has from one to `E::ROWS` rows.
            unsafe { E::add_block(arranged, rows.len(), weight, &mut sums, block == 0) };
        }
        for (row, sums) in rows.zip(&mut sums) {
            let place = (sizes.first + row) * sizes.outs + columns.start;
            // SAFETY: no other part has this panel, and no other tile these rows of it.
            let to = unsafe { self.output.part(place, columns.len()) };
            if E::Isa::FUSED {
                store::<E::Number, true>(sums, bias, self.activation, to);
            } else {
                store::<E::Number, false>(sums, bias, self.activation, to);
            }
        }
    }
}
