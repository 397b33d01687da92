//! Products of float64.
//!
//! A task is some rows with a group of [`GROUP`] panels of [`PANEL`] columns. For each block of [`DEPTH`] rows of B it packs the panels
//! (128 KiB, which stay in the second cache), then adds the products of every row to its sums, a tile in registers at a time. A is
//! read where it lies. Threads take tasks until none is left, each with scratch memory of its own.

use std::ops::Range;

use lz_abi::{Args, KernelError};

use super::float::Source;
use super::operand::Matrix;
use super::{Call, Products, Sizes, tasks};
use crate::primitives::doubles::tile::{PANEL, Strided, multiply};
use crate::simd::Work;
use crate::simd::vector::doubles::Eight;

/// Panels that are packed together.
const GROUP: usize = 4;
/// Rows of B of a block.
const DEPTH: usize = 256;
/// Rows of a task at most: their sums are 256 KiB.
const ROWS: usize = 512;
/// Rows of a task at least, where there are more: below it, packing takes longer than multiplying.
const LEAST_ROWS: usize = 64;
/// Multiplications below which one thread does all: about 5 µs of one core.
const ONE_THREAD: usize = 1 << 16;
/// Rows up to which columns of B that lie one after the other are multiplied as they lie: packing them would take longer.
const FEW: usize = 3;
/// Numbers that are multiplied side by side there.
const LANES: usize = 8;

/// Numbers of one thread's scratch memory: packed panels, sums.
fn numbers(sizes: Sizes) -> [usize; 2] {
    let panels = GROUP.min(sizes.n.div_ceil(PANEL));
    [panels * PANEL * sizes.k.min(DEPTH), panels * PANEL * sizes.m.min(ROWS)]
}

/// Bytes of scratch memory.
pub fn scratch(sizes: Sizes, threads: usize) -> usize {
    numbers(sizes).iter().sum::<usize>() * size_of::<f64>() * threads.max(1)
}

/// Runs a call. The sums are multiplied with `alpha`, and `beta` times C is added.
pub fn run<I: Products>(
    args: &mut Args<'_, '_>,
    call: &Call<'_>,
    (alpha, beta): (f64, f64),
) -> Result<(), KernelError> {
    let (sizes, matrices, threads) = (call.sizes, call.batch.len(), args.threads());
    let Source::Matrix(b) = call.b else { unreachable!("windows of float64 have kernels of their own") };
    let work = sizes.m.saturating_mul(sizes.n).saturating_mul(sizes.k).saturating_mul(matrices);
    let workers = if work < ONE_THREAD { 1 } else { threads.count() };
    let groups = sizes.n.div_ceil(PANEL).div_ceil(GROUP);
    let enough = (workers * 4).div_ceil((groups * matrices).max(1));
    let pieces = sizes.m.div_ceil(ROWS).max(enough.min(sizes.m / LEAST_ROWS)).max(1);
    let tasks = if sizes.m == 0 { 0 } else { matrices * pieces * groups };
    let workers = workers.min(tasks);
    let parts = numbers(sizes);
    let slot: usize = parts.iter().sum();
    let memory = args.workspace().take::<f64>(slot * workers)?;
    tasks::each(threads, workers, (memory, slot), tasks, |task, slot| {
        let (packed, sums) = slot.split_at_mut(parts[0]);
        let (group, rest) = (task % groups, task / groups);
        let (piece, matrix) = (rest % pieces, rest / pieces);
        call.batch.pieces(matrix..matrix + 1, |_, [out, a_place, b_place, c]| {
            let tiles = Tiles::<I> {
                sizes,
                a: call.a.at(a_place),
                b: b.at(b_place),
                store: Store { alpha, beta, to: call.epilogue.at(out, c) },
                rows: sizes.m * piece / pieces..sizes.m * (piece + 1) / pieces,
                columns: group * GROUP * PANEL..((group + 1) * GROUP * PANEL).min(sizes.n),
                packed: &mut *packed,
                sums: sums.as_chunks_mut::<PANEL>().0,
                set: std::marker::PhantomData,
            };
            // SAFETY: `run_on` says that the CPU has the instructions. The matrices have these rows and columns, and no other
            // task has them together.
            unsafe { I::call(tiles) };
        });
    });
    Ok(())
}

/// What becomes of sums.
struct Store {
    alpha: f64,
    beta: f64,
    to: super::epilogue::Epilogue,
}

/// A task.
struct Tiles<'a, I> {
    sizes: Sizes,
    a: Matrix,
    b: Matrix,
    store: Store,
    rows: Range<usize>,
    columns: Range<usize>,
    packed: &'a mut [f64],
    sums: &'a mut [[f64; PANEL]],
    set: std::marker::PhantomData<I>,
}

/// The address of an element.
#[inline(always)]
fn place(matrix: &Matrix, row: usize, column: usize) -> *const f64 {
    matrix.start.cast::<f64>().wrapping_offset(row as isize * matrix.row + column as isize * matrix.column)
}

impl<I: Products> Work for Tiles<'_, I> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Tiles { sizes, a, b, store, rows, columns, packed, sums, .. } = self;
        let (height, panels) = (rows.len(), columns.len().div_ceil(PANEL));
        let width = |panel: usize| (columns.len() - panel * PANEL).min(PANEL);
        let sums = &mut sums[..panels * height];
        let left = Strided { start: place(&a, rows.start, 0), row: a.row, step: a.column };
        if sizes.k == 0 {
            sums.fill([0.0; PANEL]);
        } else if height <= FEW && b.row == 1 && a.column == 1 {
            for (panel, sums) in sums.chunks_exact_mut(height).enumerate() {
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (j, sum) in sums.iter_mut().enumerate().take(width(panel)) {
                        let column = columns.start + panel * PANEL + j;
                        // SAFETY: the elements of a row of A and of a column of B follow each other.
                        *sum = unsafe {
                            let row = std::slice::from_raw_parts(left.at(i, 0).start, sizes.k);
                            dot::<I>(row, std::slice::from_raw_parts(place(&b, 0, column), sizes.k))
                        };
                    }
                }
            }
        } else {
            let packed = packed.as_chunks_mut::<PANEL>().0;
            for first in (0..sizes.k).step_by(DEPTH) {
                let depth = DEPTH.min(sizes.k - first);
                let mut right = [(std::ptr::null(), PANEL as isize); GROUP];
                for (panel, right) in right[..panels].iter_mut().enumerate() {
                    let from = place(&b, first, columns.start + panel * PANEL);
                    // One tile of rows reads whole panels where they lie.
                    if height <= I::Eight::ROWS && b.column == 1 && width(panel) == PANEL {
                        *right = (from, b.row);
                        continue;
                    }
                    let to = &mut packed[panel * depth..][..depth];
                    // SAFETY: B has these elements.
                    unsafe { pack(from, &b, width(panel), to) };
                    right.0 = to.as_ptr().cast();
                }
                for tile in (0..height).step_by(I::Eight::ROWS) {
                    let count = (height - tile).min(I::Eight::ROWS);
                    for (&right, sums) in right.iter().zip(sums.chunks_exact_mut(height)) {
                        let sums = &mut sums[tile..tile + count];
                        // SAFETY: this runs with the instructions of `I`; A has these rows.
                        unsafe { multiply::<I>(left.at(tile, first), right, depth, sums, first > 0) };
                    }
                }
            }
        }
        for (panel, sums) in sums.chunks_exact_mut(height).enumerate() {
            for (i, sums) in sums.iter_mut().enumerate() {
                // SAFETY: the output has this row and these columns, which no other task has.
                unsafe { store.row(&mut sums[..width(panel)], rows.start + i, columns.start + panel * PANEL) };
            }
        }
    }
}

/// The sum of products, added in [`LANES`] sums.
#[inline(always)]
fn dot<I: Products>(a: &[f64], b: &[f64]) -> f64 {
    let times = |a: f64, b: f64, sum: f64| if I::FUSED { a.mul_add(b, sum) } else { a * b + sum };
    let mut sums = [[0f64; LANES]; 4];
    let (of_a, rest_a) = a.as_chunks::<{ 4 * LANES }>();
    let (of_b, rest_b) = b.as_chunks::<{ 4 * LANES }>();
    for (a, b) in of_a.iter().zip(of_b) {
        for (chain, sums) in sums.iter_mut().enumerate() {
            for (lane, sum) in sums.iter_mut().enumerate() {
                *sum = times(a[chain * LANES + lane], b[chain * LANES + lane], *sum);
            }
        }
    }
    let rest = rest_a.iter().zip(rest_b).fold(0.0, |sum, (a, b)| times(*a, *b, sum));
    rest + sums.as_flattened().iter().sum::<f64>()
}

/// Copies some columns of a block of B, and zeros beside them.
///
/// # Safety
/// B has these elements.
#[inline(always)]
unsafe fn pack(from: *const f64, b: &Matrix, width: usize, to: &mut [[f64; PANEL]]) {
    if b.column == 1 && width == PANEL {
        for (i, to) in to.iter_mut().enumerate() {
            // SAFETY: the caller's.
            *to = unsafe { *from.wrapping_offset(i as isize * b.row).cast::<[f64; PANEL]>() };
        }
        return;
    }
    for column in 0..PANEL {
        let from = from.wrapping_offset(column as isize * b.column);
        for (i, to) in to.iter_mut().enumerate() {
            // SAFETY: the caller's.
            to[column] = if column < width { unsafe { *from.wrapping_offset(i as isize * b.row) } } else { 0.0 };
        }
    }
}

impl Store {
    /// Stores the sums of a part of a row.
    ///
    /// # Safety
    /// The matrices have these elements, and nobody else uses those of the output.
    #[inline(always)]
    unsafe fn row(&self, sums: &mut [f64], row: usize, column: usize) {
        let to = &self.to;
        // SAFETY: the caller's.
        unsafe {
            if self.alpha != 1.0 {
                sums.iter_mut().for_each(|sum| *sum *= self.alpha);
            }
            if let Some(bias) = &to.bias {
                // A bias of float64 is one number for each column.
                sums.iter_mut().enumerate().for_each(|(j, sum)| *sum += *place(bias, 0, column + j));
            }
            if to.activation != super::Activation::None {
                let activation = to.activation.exact();
                sums.iter_mut().for_each(|sum| *sum = activation(*sum));
            }
            if self.beta != 0.0 {
                sums.iter_mut().enumerate().for_each(|(j, sum)| *sum += self.beta * *place(&to.c, row, column + j));
            }
            let out = place(&to.out, row, column).cast_mut();
            std::slice::from_raw_parts_mut(out, sums.len()).copy_from_slice(sums);
        }
    }
}
