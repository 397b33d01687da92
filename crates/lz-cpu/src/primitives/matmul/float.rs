//! Products of floats.
//!
//! A task is some rows with a group of [`GROUP`] panels of [`WIDTH`] columns. For each block of [`DEPTH`] rows of B it packs the
//! panels (256 KiB of float32, which stay in the second cache), then adds the products of every tile of rows to its sums. Threads
//! take tasks until none is left, each with scratch memory of its own.

use std::ops::Range;

use lz_abi::{Args, KernelError, Threads};

use super::epilogue::Epilogue;
use super::operand::Matrix;
use super::{Call, Products, Sizes, tasks};
use crate::primitives::windows::source::Windows;
use crate::simd::Work;
use crate::simd::packed::WIDTH;
use crate::simd::packed::engine::{DEPTH, Engine, Panels, STRIDE, Scales};
use crate::simd::packed::widened::Widened;

/// Panels that are packed together.
const GROUP: usize = 4;
/// Rows of a task at most: their sums are 512 KiB.
const ROWS: usize = 1024;
/// Rows of a task at least where there are more: below it, packing takes longer than multiplying.
const LEAST_ROWS: usize = 96;
/// Rows of a tile at most, of any instruction set.
pub const HEIGHT: usize = 12;
/// Multiplications below which one thread does all: about 5 µs of one core.
const ONE_THREAD: usize = 1 << 18;

/// float32 numbers of one thread's scratch memory: packed panels, arranged rows, sums.
fn numbers(sizes: Sizes) -> [usize; 3] {
    let panels = GROUP.min(sizes.n.div_ceil(WIDTH));
    let deep = sizes.k > DEPTH;
    let rows = if deep { sizes.m.min(ROWS) } else { HEIGHT.min(sizes.m) };
    [panels * WIDTH * sizes.k.min(DEPTH), HEIGHT.min(sizes.m) * STRIDE, rows * panels * WIDTH]
}

/// Bytes of scratch memory.
pub fn scratch(sizes: Sizes, threads: usize) -> usize {
    let slot: usize = numbers(sizes).iter().map(|numbers| (numbers * size_of::<f32>()).next_multiple_of(64)).sum();
    slot * threads.max(1)
}

/// Where B is.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// A matrix as it lies, or packed.
    Matrix(Matrix),
    /// The windows of a convolution.
    Windows(Windows<'a>),
}

impl Source<'_> {
    /// The same some elements further on.
    pub(super) fn at(self, place: isize) -> Self {
        match self {
            Source::Matrix(matrix) => Source::Matrix(matrix.at(place)),
            Source::Windows(windows) => Source::Windows(windows.at(place)),
        }
    }

    /// Where its panels are, if it is packed.
    #[inline(always)]
    pub(super) fn packed(&self) -> Option<*const f32> {
        match self {
            Source::Matrix(matrix) if matrix.packed => Some(matrix.start.cast()),
            _ => None,
        }
    }

    /// As [`Matrix::pack`].
    ///
    /// # Safety
    /// The same.
    pub(super) unsafe fn pack<I: Products>(&self, rows: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
        // SAFETY: the caller's.
        unsafe {
            match self {
                Source::Matrix(matrix) => matrix.pack::<I>(rows, columns, to),
                Source::Windows(windows) => windows.pack::<I>(rows, columns, to),
            }
        }
    }
}

/// Runs a call.
pub fn run<I: Products>(args: &mut Args<'_, '_>, call: &Call<'_>) -> Result<(), KernelError> {
    let threads = args.threads();
    let plan = Plan::of(call, threads);
    let memory = args.workspace().take::<f32>(plan.slot.iter().sum::<usize>() * plan.workers)?;
    plan.run::<I>(threads, memory, call);
    Ok(())
}

/// Runs a call in scratch memory of [`scratch`] bytes.
pub fn run_in<I: Products>(threads: Threads<'_>, memory: &mut [f32], call: &Call<'_>) {
    Plan::of(call, threads).run::<I>(threads, memory, call);
}

/// Computes some rows of some panels in scratch memory of [`scratch`] bytes for so many rows. This CPU has the instructions, and nobody
/// else uses these parts of the output.
pub fn run_rows<I: Products>(
    memory: &mut [f32],
    sizes: Sizes,
    (a, b): (Matrix, Source<'_>),
    epilogue: Epilogue,
    rows: Range<usize>,
    panels: Range<usize>,
) {
    let parts = numbers(Sizes { m: rows.len(), ..sizes }).map(|numbers| numbers.next_multiple_of(16));
    let (packed, rest) = memory.split_at_mut(parts[0]);
    let (arranged, sums) = rest.split_at_mut(parts[1]);
    for first in panels.clone().step_by(GROUP) {
        let tiles = Tiles::<I> {
            sizes,
            a,
            b,
            epilogue,
            rows: rows.clone(),
            panels: first..(first + GROUP).min(panels.end),
            packed: &mut *packed,
            arranged: &mut *arranged,
            sums: sums.as_chunks_mut::<WIDTH>().0,
            set: std::marker::PhantomData,
        };
        // SAFETY: the caller's.
        unsafe { I::call(tiles) };
    }
}

/// How a call is cut into tasks.
struct Plan {
    matrices: usize,
    groups: usize,
    pieces: usize,
    workers: usize,
    /// Numbers of the scratch memory of a thread.
    slot: [usize; 3],
}

impl Plan {
    fn of(call: &Call<'_>, threads: Threads<'_>) -> Plan {
        let (sizes, matrices) = (call.sizes, call.batch.len());
        let work = sizes.m.saturating_mul(sizes.n).saturating_mul(sizes.k).saturating_mul(matrices);
        let workers = if work < ONE_THREAD { 1 } else { threads.count() };
        let groups = sizes.n.div_ceil(WIDTH).div_ceil(GROUP);
        let enough = (workers * 4).div_ceil((groups * matrices).max(1));
        let pieces = sizes.m.div_ceil(ROWS).max(enough.min(sizes.m / LEAST_ROWS)).max(1);
        let workers = if sizes.m == 0 { 0 } else { workers.min(matrices * pieces * groups) };
        let slot = numbers(sizes).map(|numbers| numbers.next_multiple_of(16));
        Plan { matrices, groups, pieces, workers, slot }
    }

    fn run<I: Products>(&self, threads: Threads<'_>, memory: &mut [f32], call: &Call<'_>) {
        let Plan { matrices, groups, pieces, workers, slot: parts } = *self;
        let (sizes, panels, tasks) = (call.sizes, call.sizes.n.div_ceil(WIDTH), matrices * pieces * groups);
        tasks::each(threads, workers, (memory, parts.iter().sum()), tasks, |task, slot| {
            let (packed, slot) = slot.split_at_mut(parts[0]);
            let (arranged, sums) = slot.split_at_mut(parts[1]);
            let (group, rest) = (task % groups, task / groups);
            let (piece, matrix) = (rest % pieces, rest / pieces);
            let panels = group * GROUP..((group + 1) * GROUP).min(panels);
            let rows = sizes.m * piece / pieces..sizes.m * (piece + 1) / pieces;
            call.batch.pieces(matrix..matrix + 1, |_, [out, a, b, c]| {
                let tiles = Tiles::<I> {
                    sizes,
                    a: call.a.at(a),
                    b: call.b.at(b),
                    epilogue: call.epilogue.at(out, c),
                    rows: rows.clone(),
                    panels: panels.clone(),
                    packed: &mut *packed,
                    arranged: &mut *arranged,
                    sums: sums.as_chunks_mut::<WIDTH>().0,
                    set: std::marker::PhantomData,
                };
                // SAFETY: `run_on` says that the CPU has the instructions. The matrices have these rows and panels, and no other
                // task has them together.
                unsafe { I::call(tiles) };
            });
        });
    }
}

/// A task.
struct Tiles<'a, I> {
    sizes: Sizes,
    a: Matrix,
    b: Source<'a>,
    epilogue: Epilogue,
    rows: Range<usize>,
    panels: Range<usize>,
    packed: &'a mut [f32],
    arranged: &'a mut [f32],
    sums: &'a mut [[f32; WIDTH]],
    set: std::marker::PhantomData<I>,
}

impl<I: Products> Work for Tiles<'_, I> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Tiles { sizes, a, b, epilogue, rows, panels, packed, arranged, sums, .. } = self;
        let count = panels.len();
        let blocks = sizes.k.div_ceil(DEPTH).max(1);
        let tiles = rows.len().div_ceil(<Widened<I, f32> as Engine>::ROWS);
        for block in 0..blocks {
            let features = block * DEPTH..((block + 1) * DEPTH).min(sizes.k);
            let depth = features.len() * WIDTH;
            // A packed weight is read where it is.
            let (weight, apart): (&[f32], usize) = if let Some(packed) = b.packed() {
                let apart = sizes.k * WIDTH;
                let start = panels.start * apart + features.start * WIDTH;
                let len = (count - 1) * apart + depth;
                // SAFETY: `bind` has checked the sizes of the packed weight.
                (unsafe { std::slice::from_raw_parts(packed.add(start), len) }, apart)
            } else {
                for (i, panel) in panels.clone().enumerate() {
                    let columns = panel * WIDTH..((panel + 1) * WIDTH).min(sizes.n);
                    // SAFETY: this runs with the instructions of `I`; B has these rows and columns.
                    unsafe { b.pack::<I>(features.clone(), columns, &mut packed[i * depth..][..depth]) };
                }
                (&packed[..count * depth], depth)
            };
            for tile in 0..tiles {
                let mine = rows.len() * tile / tiles..rows.len() * (tile + 1) / tiles;
                let height = mine.len();
                let (first, place) = (rows.start + mine.start, if blocks > 1 { mine.start * count } else { 0 });
                let sums = &mut sums[place..][..height * count];
                if features.is_empty() {
                    sums.fill([0.0; WIDTH]);
                } else {
                    // SAFETY: as above, of A.
                    unsafe { a.arrange::<I>(first..first + height, features.clone(), STRIDE, arranged) };
                    add::<I>(arranged, height, (weight, apart, depth, count), sums, block == 0);
                }
                if block + 1 == blocks {
                    for (sums, panel) in sums.chunks_exact_mut(height).zip(panels.clone()) {
                        let column = panel * WIDTH;
                        // SAFETY: as above, of the output, whose rows and columns no other task has.
                        unsafe { epilogue.store::<I>(sums, first, column, WIDTH.min(sizes.n - column)) };
                    }
                }
            }
        }
    }
}

/// Adds the products of a tile's rows with some panels to its sums.
#[inline(always)]
fn add<I: Products>(
    rows: &[f32],
    height: usize,
    (weight, apart, depth, panels): (&[f32], usize, usize, usize),
    sums: &mut [[f32; WIDTH]],
    first: bool,
) {
    let abreast = <Widened<I, f32> as Engine>::abreast(height);
    let at_once = if panels.is_multiple_of(abreast) { abreast } else { 1 };
    for panel in (0..panels).step_by(at_once) {
        let weight = &weight[panel * apart..][..(at_once - 1) * apart + depth];
        let some =
            Panels { weight, block: depth, apart, count: at_once, features: depth / WIDTH, scales: Scales::default() };
        let sums = &mut sums[panel * height..][..at_once * height];
        // SAFETY: this runs with the instructions of `I`, and a tile has from one to `ROWS` rows.
        unsafe { Widened::<I, f32>::add_block(&mut (), rows, height, some, sums, first) };
    }
}
