//! The tiles of a product: the rows of the input by chunks, each chunk with every panel, shared among threads.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use lz_abi::{Rows, Threads};
use lz_model::{KernelArgs, KernelError};

use super::super::rms_norm::as_f32;
use super::super::{Isa, Work, check};
use super::WIDTH;
use super::engine::{DEPTH, Engine, Packed, Panels, STRIDE, Scales, arrange};
use super::epilogue::{Activation, store};
use crate::reference::arguments::Arguments;

/// The places of the arguments in the schema.
pub const INPUT: usize = 0;
const WEIGHT: usize = 1;
const BIAS: usize = 2;
const SCALES: usize = 3;

/// Rows of a chunk at most: a block of them is 0.6 MiB of float32, which the second cache of today's CPUs holds.
const CHUNK: usize = 264;
/// Blocks of arranged rows of a chunk at most: 8 MiB of float32.
const KEPT: usize = 3840;
/// Rows of a chunk at least, so that a panel is not read again for too few of them.
const LEAST_ROWS: usize = 48;
/// Blocks of arranged rows that every panel may read again: 1 MiB of float32. Where there are more, panels are computed in
/// groups of so many, and each block of rows is multiplied with all panels of a group before the next block.
const NEAR: usize = 480;
const GROUP: usize = 16;

/// Bytes of scratch memory: the arranged rows of a chunk, float32 at most, their sums, and the bias as float32.
pub const WORKSPACE: &str = "min(rows, max(80, min(296, 3840 / max(ceil_div(in_features, 512), 1) + 32))) \
* (ceil_div(in_features, 512) * 544 * 4 + ceil_div(out_features, 32) * 128) + out_features * 4 + 192";

/// Rows of a chunk: all chunks of about the same size, in whole tiles of `height`.
fn chunk(rows: usize, blocks: usize, height: usize) -> usize {
    let most = CHUNK.min(KEPT / blocks.max(1)).max(LEAST_ROWS);
    rows.min(rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(height))
}

/// Multiplications below which one thread does all: about 10 µs of one core.
const ONE_THREAD: usize = 1 << 19;
/// Bytes of a weight from which all threads read it, each a part, however few rows there are: one thread takes about 15 µs to read so
/// many bytes that are not in its own cache.
const READ_BY_ALL: usize = 1 << 19;
/// Numbers of the input below which one thread arranges them all.
const ARRANGED_BY_ONE: usize = 1 << 14;
/// Rows of a thread that are worth reading a weight of up to 8 times as many outputs on every core.
const MANY_ROWS: usize = 96;
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
    fn block(&self, block: usize) -> Range<usize> {
        block * DEPTH..((block + 1) * DEPTH).min(self.padded)
    }

    /// Where a row of a block of the arranged input begins.
    #[inline(always)]
    fn place(&self, block: usize, row: usize) -> usize {
        (block * self.count + row) * STRIDE
    }
}

/// The scales of a weight.
#[derive(Clone, Copy)]
struct AllScales<'a> {
    numbers: &'a [f32],
    /// Groups of a panel.
    groups: usize,
    /// Input features of a group; 0 where a panel has one group.
    group: usize,
}

impl<'a> AllScales<'a> {
    /// Those of some panels, from an input feature on, with which a group begins.
    #[inline(always)]
    fn at(&self, panel: usize, feature: usize) -> Scales<'a> {
        let before = feature.checked_div(self.group).unwrap_or(0);
        let first = ((panel * self.groups + before) * WIDTH).min(self.numbers.len());
        // Where one scale covers all input features, a block is a group.
        let group = if self.group == 0 { DEPTH } else { self.group };
        Scales { numbers: &self.numbers[first..], apart: self.groups * WIDTH, group }
    }
}

/// Numbers that a panel has for so many input features.
#[inline(always)]
fn stored<E: Engine>(features: usize) -> usize {
    features * WIDTH / E::Weight::FEATURES
}

/// Runs a call with one engine.
pub fn run<E: Engine>(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
    check::<E::Isa>()?;
    let dim = |name: &str| args.dim(name) as usize;
    let (rows, ins, outs) = (dim("rows"), dim("in_features"), dim("out_features"));
    let padded = dim("groups") * E::INTERLEAVE * E::Weight::FEATURES;
    let (group, groups) = if E::Weight::SCALED { (dim("group_size"), dim("scale_groups")) } else { (0, 0) };
    let activation = Activation::named(args.text("activation"))?;
    let args = &mut args.args;
    let (input, weight) =
        args.input(INPUT).zip(args.input(WEIGHT)).ok_or_else(|| KernelError::Failed("no input".into()))?;
    if rows == 0 || outs == 0 {
        return Ok(());
    }
    let (input, weight) = (input.rows::<E::Number>()?, weight.as_slice::<E::Weight>()?);
    let (panels, blocks) = (outs.div_ceil(WIDTH), padded.div_ceil(DEPTH));
    assert_eq!(weight.len(), panels * stored::<E>(padded), "the schema says so");
    let scales = match args.input(SCALES) {
        Some(scales) if E::Weight::SCALED => scales.as_slice::<f32>()?,
        _ => &[],
    };
    assert_eq!(scales.len(), panels * groups * WIDTH, "the schema says so");
    let scales = AllScales { numbers: scales, groups, group };
    let chunk = chunk(rows, blocks, E::ROWS);
    let arranged = args.workspace().take::<E::Row>(chunk * blocks * STRIDE)?;
    let sums = args.workspace().take::<f32>(panels * chunk * WIDTH)?;
    let bias = match args.input(BIAS) {
        None => None,
        Some(bias) => Some(as_f32(bias, args)?),
    };
    let threads = args.threads();
    let output = Shared::new(args.outputs[0].as_slice::<E::Number>()?);
    let little = rows.saturating_mul(ins).saturating_mul(outs) < ONE_THREAD && size_of_val(weight) < READ_BY_ALL;
    let alone = threads.count() == 1 || little;
    let whole = Whole::<E> {
        input,
        weight,
        scales,
        bias,
        activation,
        output: &output,
        sizes: Sizes { count: rows, first: 0, ins, padded, outs },
    };
    match rows_of_thread::<E>(&whole.sizes, chunk, threads.count()) {
        Some(each) if !alone => whole.by_rows(threads, each, arranged, sums),
        _ => whole.by_panels(if alone { Threads::ONE } else { threads }, chunk, arranged, sums),
    }
    Ok(())
}

/// Rows that a thread arranges for itself and multiplies with all panels, where that is faster than arranging them together.
///
/// Rows that another thread arranged lie in that core's cache, and fetching them from there is slow. By rows, no thread needs
/// another's, but every thread reads the whole weight. So it pays where there are many rows for the weight's outputs. Panels of
/// integers are unpacked by who reads them, so they are shared.
fn rows_of_thread<E: Engine>(sizes: &Sizes, chunk: usize, threads: usize) -> Option<usize> {
    let (rows, outs) = (sizes.count, sizes.outs);
    let most = chunk / threads / E::ROWS * E::ROWS;
    let each = rows.div_ceil(threads * 2).max(LEAST_ROWS).next_multiple_of(E::ROWS).min(most);
    let many = rows * 2 >= outs || rows >= threads * MANY_ROWS && rows * 8 > outs;
    (!E::Weight::SCALED && many && most >= LEAST_ROWS && rows >= threads * LEAST_ROWS).then_some(each)
}

/// A call.
struct Whole<'a, E: Engine> {
    input: Rows<'a, E::Number>,
    weight: &'a [E::Weight],
    scales: AllScales<'a>,
    bias: Option<&'a [f32]>,
    activation: Activation,
    output: &'a Shared<'a, E::Number>,
    sizes: Sizes,
}

impl<E: Engine> Whole<'_, E> {
    fn panels(&self) -> usize {
        self.sizes.outs.div_ceil(WIDTH)
    }

    /// The rows from `first` on, `count` at most.
    fn piece(&self, first: usize, count: usize) -> Sizes {
        Sizes { count: count.min(self.sizes.count - first), first, ..self.sizes }
    }

    /// Writes some rows of a piece as the engine computes with them.
    fn arrange(&self, sizes: Sizes, rows: Range<usize>, to: &Shared<'_, E::Row>) {
        if sizes.padded > 0 {
            E::Isa::vectorize(Arranging::<E> { input: self.input, rows, sizes, to });
        }
    }

    /// Multiplies the arranged rows of a piece with some panels. `sums` has room for `room` rows of each.
    fn multiply(
        &self,
        sizes: Sizes,
        (panels, abreast): (Range<usize>, usize),
        arranged: &[E::Row],
        (sums, room): (&Shared<'_, f32>, usize),
    ) {
        let Whole { weight, scales, bias, activation, output, .. } = *self;
        let tiles = Tiles::<E> {
            arranged,
            weight,
            scales,
            bias,
            activation,
            output,
            sums,
            chunk: room,
            panels,
            abreast,
            sizes,
        };
        E::Isa::vectorize(tiles);
    }

    /// Panels that are computed side by side.
    fn abreast(sizes: Sizes) -> usize {
        // Rows of one tile are computed with several panels at a time, which therefore are not parted.
        if sizes.count > E::ROWS { 1 } else { E::abreast(sizes.count) }
    }

    /// Each thread takes `each` rows at a time, arranges them, and multiplies them with all panels.
    #[allow(unsafe_code)]
    fn by_rows(&self, threads: Threads<'_>, each: usize, arranged: &mut [E::Row], sums: &mut [f32]) {
        let (workers, pieces) = (threads.count(), self.sizes.count.div_ceil(each));
        let (rows_room, sums_room) = (arranged.len() / workers, sums.len() / workers);
        let (arranged, sums, next) = (Shared::new(arranged), Shared::new(sums), AtomicUsize::new(0));
        threads.each(workers.min(pieces), |worker| {
            // SAFETY: every worker has parts of its own.
            let (arranged, sums) =
                unsafe { (arranged.part(worker * rows_room, rows_room), sums.part(worker * sums_room, sums_room)) };
            let sums = Shared::new(sums);
            loop {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                if piece >= pieces {
                    return;
                }
                let sizes = self.piece(piece * each, each);
                self.arrange(sizes, 0..sizes.count, &Shared::new(&mut *arranged));
                self.multiply(sizes, (0..self.panels(), Self::abreast(sizes)), arranged, (&sums, each));
            }
        });
    }

    /// All threads arrange the rows of a chunk; then each takes some panels at a time, and multiplies all rows with them.
    fn by_panels(&self, threads: Threads<'_>, chunk: usize, arranged: &mut [E::Row], sums: &mut [f32]) {
        let (panels, sums) = (self.panels(), Shared::new(sums));
        let part_of = |all: usize, part: usize, parts: usize| all * part / parts..all * (part + 1) / parts;
        for first in (0..self.sizes.count).step_by(chunk) {
            let sizes = self.piece(first, chunk);
            let to = Shared::new(&mut *arranged);
            let row_parts = if sizes.count * sizes.ins < ARRANGED_BY_ONE { 1 } else { threads.count() };
            threads.each(row_parts, |part| self.arrange(sizes, part_of(sizes.count, part, row_parts), &to));
            let (arranged, abreast) = (&*arranged, Self::abreast(sizes));
            let units = panels.div_ceil(abreast);
            let parts = if threads.count() == 1 { 1 } else { units.min(threads.count() * PARTS) };
            threads.each(parts, |part| {
                let units = part_of(units, part, parts);
                let panels = units.start * abreast..(units.end * abreast).min(panels);
                self.multiply(sizes, (panels, abreast), arranged, (&sums, chunk));
            });
        }
    }
}

/// Writes rows of a chunk as the engine computes with them, block by block.
struct Arranging<'a, E: Engine> {
    input: Rows<'a, E::Number>,
    rows: Range<usize>,
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
                let to = unsafe { self.to.part(sizes.place(block, row), features.len().next_multiple_of(E::STEP)) };
                arrange(&from[features.start..features.end.min(sizes.ins)], to);
            }
        }
    }
}

/// The tiles of some panels.
struct Tiles<'a, E: Engine> {
    arranged: &'a [E::Row],
    weight: &'a [E::Weight],
    scales: AllScales<'a>,
    bias: Option<&'a [f32]>,
    activation: Activation,
    output: &'a Shared<'a, E::Number>,
    /// For each panel the sums of a chunk's rows.
    sums: &'a Shared<'a, f32>,
    chunk: usize,
    panels: Range<usize>,
    /// Panels that are computed at a time.
    abreast: usize,
    sizes: Sizes,
}

impl<E: Engine> Work for Tiles<'_, E> {
    type Output = ();

    #[allow(unsafe_code)]
    #[inline(always)]
    fn run(self) {
        let Sizes { count, padded, .. } = self.sizes;
        let blocks = padded.div_ceil(DEPTH);
        let group = if count * blocks <= NEAR { self.abreast } else { GROUP.max(self.abreast) };
        // Every group uses the sums of the first one, which stay in a cache.
        let room = self.chunk * WIDTH;
        // SAFETY: no other part has these panels.
        let sums = unsafe { self.sums.part(self.panels.start * room, self.panels.len().min(group) * room) };
        let sums = sums.as_chunks_mut::<WIDTH>().0;
        // Rows in tiles of about the same height: 16 rows are 8 and 8, not 12 and 4.
        let tiles = count.div_ceil(E::ROWS);
        let mut begun = 0;
        let mut scratch = E::Scratch::default();
        for group in self.panels.clone().step_by(group).map(|first| first..(first + group).min(self.panels.end)) {
            // Without input features there is one block, of nothing.
            for block in 0..blocks.max(1) {
                for panel in group.clone().step_by(self.abreast) {
                    let panels = panel..(panel + self.abreast).min(group.end);
                    let sums = &mut sums[(panel - group.start) * count..][..panels.len() * count];
                    for tile in 0..tiles {
                        let rows = count * tile / tiles..count * (tile + 1) / tiles;
                        if rows.len() != begun {
                            begun = rows.len();
                            // SAFETY: this runs with the instructions of `E::Isa`; a tile has from one to `E::ROWS` rows.
                            unsafe { E::begin(begun) };
                        }
                        self.add(&mut scratch, panels.clone(), rows, block, sums);
                    }
                    if block + 1 >= blocks {
                        self.store(panels, sums);
                    }
                }
            }
        }
        if begun > 0 {
            // SAFETY: as above.
            unsafe { E::end() };
        }
    }
}

impl<E: Engine> Tiles<'_, E> {
    /// Adds a block to the sums of some rows, for one panel, or for several that have no other rows.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn add(
        &self,
        scratch: &mut E::Scratch,
        panels: Range<usize>,
        rows: Range<usize>,
        block: usize,
        sums: &mut [[f32; WIDTH]],
    ) {
        let sizes = self.sizes;
        let (features, apart) = (sizes.block(block), stored::<E>(sizes.padded));
        if features.is_empty() {
            return sums.fill([0.0; WIDTH]);
        }
        let arranged = &self.arranged[sizes.place(block, rows.start)..sizes.place(block, rows.end)];
        let size = stored::<E>(features.len());
        let real = features.end.min(sizes.ins) - features.start;
        // As many panels as the engine has code for: all of them, or one after the other.
        let at_once = if panels.len() == self.abreast { self.abreast } else { 1 };
        for panel in panels.clone().step_by(at_once) {
            let start = panel * apart + stored::<E>(features.start);
            let scales = self.scales.at(panel, features.start);
            let weight = &self.weight[start..start + (at_once - 1) * apart + size];
            let weight = Panels { weight, block: size, apart, count: at_once, features: real, scales };
            let sums = &mut sums[(panel - panels.start) * sizes.count + rows.start..];
            // SAFETY: this runs with the instructions of `E::Isa`; a tile has from one to `E::ROWS` rows.
            unsafe { E::add_block(scratch, arranged, rows.len(), weight, sums, block == 0) };
        }
    }

    /// Writes the sums of some panels to their places in the result.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn store(&self, panels: Range<usize>, sums: &mut [[f32; WIDTH]]) {
        let sizes = self.sizes;
        for (panel, sums) in panels.zip(sums.chunks_exact_mut(sizes.count)) {
            let mut bias = [0f32; WIDTH];
            let columns = panel * WIDTH..((panel + 1) * WIDTH).min(sizes.outs);
            if let Some(given) = self.bias {
                bias[..columns.len()].copy_from_slice(&given[columns.clone()]);
            }
            let bias = self.bias.is_some().then_some(&bias);
            for (row, sums) in sums.iter_mut().enumerate() {
                let place = (sizes.first + row) * sizes.outs + columns.start;
                // SAFETY: no other part has this panel.
                let to = unsafe { self.output.part(place, columns.len()) };
                if E::Isa::FUSED {
                    store::<E::Number, true>(sums, bias, self.activation, to);
                } else {
                    store::<E::Number, false>(sums, bias, self.activation, to);
                }
            }
        }
    }
}
