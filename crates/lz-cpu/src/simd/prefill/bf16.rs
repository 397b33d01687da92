//! Tiles of attention in bfloat16, by instructions that multiply pairs of it: products and sums are float32, and so is the softmax;
//! weights are rounded to bfloat16 before they meet values.
//!
//! Both products have one form, rows of pairs times [pair][query]:
//!
//! | | rows | pairs | result |
//! |---|---|---|---|
//! | scores | keys | elements of the head | [key][query] |
//! | sums | elements of the values | keys | [element][query] |
//!
//! So keys are copied as they are, with zeros behind their elements, and values are turned: a block of [`KEYS`] keys becomes
//! [element][key]. A thread does that once for the tiles of a head that follow each other.

use std::marker::PhantomData;

use half::bf16;
use lz_abi::Line;
use lz_model::{DType, DTypeSet, InputRule, KernelArgs, KernelDescriptor, KernelError, Op};

use super::super::vector::{LANES, Sixteen};
use super::super::{Isa, Portable, Work, prefill};
use super::softmax::{Softmax, scale, turn_out};
use super::tile::{Head, KEYS, Lanes, Path, ROWS, Scratch, Tile, Write};
use super::varlen::{self, Varlen, packed};
use super::{Prefill, dense, takes_masks};
use crate::kernel::NativeKernel;

/// Numbers of a piece of a row: 64 bytes, a row of a register of AMX.
pub(super) const PIECE: usize = 32;
/// Pieces of a row of turned values of a block.
const KEY_PIECES: usize = KEYS / PIECE;
/// Keys and values of a head that a thread keeps, in bytes; those of longer heads are made again for each tile.
const KEPT: usize = 2 << 20;

/// The kernel of sequences in one tensor.
pub struct PrefillBf16<E>(PhantomData<E>);

impl<E: PairProducts> NativeKernel for PrefillBf16<E> {
    const OPS: &'static [&'static str] = Prefill::<Portable>::OPS;

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        takes_masks(described::<E>(op, prefill::PRIORITY))
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        dense::<InPairs<E>, bf16>(args)
    }
}

/// The kernel of packed sequences.
pub struct VarlenBf16<E>(PhantomData<E>);

impl<E: PairProducts> NativeKernel for VarlenBf16<E> {
    const OPS: &'static [&'static str] = Varlen::<Portable>::OPS;

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        described::<E>(op, varlen::PRIORITY)
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        packed::<InPairs<E>, bf16>(args)
    }
}

/// What the kernels of float32 take, of bfloat16 alone.
fn described<E: PairProducts>(op: &'static Op, priority: i32) -> KernelDescriptor {
    let only = DTypeSet::of(&[DType::Bf16]);
    let mut described = prefill::described::<E::Isa>(op, priority + E::PREFERENCE);
    // Keys and values have the dtype of queries, by the schema.
    described.inputs.insert("query".into(), InputRule { dtypes: Some(only), ..InputRule::default() });
    KernelDescriptor { dtypes: only, ..described }
}

/// Sixteen pairs.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Piece(pub [bf16; PIECE]);

/// A pair of each query of a tile: the first is the lower half.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct PairLanes(pub [u32; ROWS]);

/// Instructions for pairs of bfloat16.
#[allow(unsafe_code)]
pub(super) trait PairProducts {
    /// The instruction set: one with AVX-512 BF16.
    type Isa: Isa;

    /// Added to the priority of its instruction set.
    const PREFERENCE: i32;

    /// Comes before the first product of a tile.
    ///
    /// # Safety
    /// As of [`PairProducts::multiply`].
    #[inline(always)]
    unsafe fn begin() {}

    /// Comes after the last.
    ///
    /// # Safety
    /// As of [`PairProducts::multiply`].
    #[inline(always)]
    unsafe fn end() {}

    /// results[row][query] = Σ rows[row][pair] · pairs[pair][query], added to what is there if `adds`. Rows are `stride` pieces
    /// apart, of which as many count as there are pairs.
    ///
    /// # Safety
    /// The caller is work that `Self::Isa` runs, between `begin` and `end`.
    unsafe fn multiply(rows: &[Piece], stride: usize, pairs: &[PairLanes], results: &mut [Lanes], adds: bool);
}

/// The path.
pub(super) struct InPairs<E>(PhantomData<E>);

/// Memory of a thread.
#[derive(Default)]
pub(super) struct PairScratch {
    /// [pair of elements][query]
    queries: Vec<PairLanes>,
    /// [key][query]
    scores: Vec<Lanes>,
    /// [pair of keys][query]
    weights: Vec<PairLanes>,
    /// [element][query]
    sums: Vec<Lanes>,
    /// [query][element]
    rows: Vec<f32>,
    blocks: Blocks,
}

impl<E: PairProducts> Path<bf16> for InPairs<E> {
    type Isa = E::Isa;

    fn attend(tile: Tile<'_, bf16>, scratch: &mut Scratch, write: Write<'_>) {
        E::Isa::vectorize(Attend::<_, E> { tile, scratch: &mut scratch.pairs, write, by: PhantomData });
    }
}

struct Attend<'s, W, E> {
    tile: W,
    scratch: &'s mut PairScratch,
    write: Write<'s>,
    by: PhantomData<E>,
}

impl<E: PairProducts> Work for Attend<'_, Tile<'_, bf16>, E> {
    type Output = ();

    #[allow(unsafe_code)]
    #[inline(always)]
    fn run(self) {
        let Attend { tile, scratch, write, .. } = self;
        let (count, v_dim) = (tile.queries.len(), tile.v_dim);
        let width = tile.queries.first().map_or(0, |query| query.len());
        let pieces = width.div_ceil(PIECE);
        let zeros = Lanes([0.0; ROWS]);
        scratch.queries.resize(pieces * LANES, PairLanes([0; ROWS]));
        scratch.scores.resize(KEYS, zeros);
        scratch.weights.resize(KEYS / 2, PairLanes([0; ROWS]));
        scratch.sums.clear();
        scratch.sums.resize(v_dim.next_multiple_of(LANES), zeros);
        turn_in::<Vectors<E>>(tile.queries, &mut scratch.queries);
        scratch.blocks.begin(tile.head, tile.count, pieces, scratch.sums.len());
        let (vectors, mut softmax, span) = (count.div_ceil(LANES), Softmax::new(), tile.span());
        // SAFETY: `vectorize` runs it where the instructions of `E` are, and `end` comes after the last product. So below.
        unsafe { E::begin() };
        // Blocks are those of the head, not of the tile.
        for block in span.from / KEYS..span.end.div_ceil(KEYS) {
            let first = block * KEYS;
            let n = KEYS.min(span.end - first);
            let (keys, values) = scratch.blocks.get::<Vectors<E>>(block, &tile.keys, &tile.values, tile.start);
            let rows = n.next_multiple_of(LANES);
            unsafe { E::multiply(keys, pieces, &scratch.queries, &mut scratch.scores[..rows], false) };
            let scores = &mut scratch.scores[..n];
            let factor = tile.score::<Vectors<E>, true>(first, span, scores);
            if let Some(factors) = softmax.raise::<Vectors<E>>(scores, factor, vectors) {
                scale::<Vectors<E>>(&mut scratch.sums, &factors);
            }
            // Keys up to a whole piece have no weight.
            let pairs = &mut scratch.weights[..n.next_multiple_of(PIECE) / 2];
            scratch.scores[n..pairs.len() * 2].fill(Lanes([f32::NEG_INFINITY; ROWS]));
            let scores = &scratch.scores[..pairs.len() * 2];
            unsafe {
                rounded::weigh(&mut softmax, scores, factor, vectors, pairs);
                E::multiply(values, KEY_PIECES, pairs, &mut scratch.sums, true);
            }
        }
        unsafe { E::end() };
        turn_out::<Vectors<E>>(&scratch.sums, &softmax, (count, v_dim), &mut scratch.rows, write);
    }
}

type Vectors<E> = <<E as PairProducts>::Isa as Isa>::Sixteen;

/// Queries as [pair of elements][query], with zeros for queries and elements that are not there.
#[allow(unsafe_code)]
#[inline(always)]
fn turn_in<V: Sixteen>(queries: &[&[bf16]], to: &mut [PairLanes]) {
    let zeros = Piece([bf16::ZERO; PIECE]);
    for v in 0..ROWS / LANES {
        let lanes = queries.get(v * LANES..).unwrap_or_default();
        for (piece, to) in to.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let mut rows = [zeros; LANES];
            for (row, query) in rows.iter_mut().zip(lanes) {
                copy(&query[piece * PIECE..], &mut row.0);
            }
            // SAFETY: a piece is sixteen pairs of 32 bits. `vectorize` runs it where the instructions of `V` are.
            unsafe {
                let mut vectors = [V::splat(0.0); LANES];
                for (vector, row) in vectors.iter_mut().zip(&rows) {
                    *vector = V::load(&*row.0.as_ptr().cast());
                }
                for (column, to) in V::turned(vectors).into_iter().zip(to) {
                    column.store(&mut *to.0.as_mut_ptr().add(v * LANES).cast());
                }
            }
        }
    }
}

/// As many numbers as there are, up to all.
#[inline(always)]
fn copy<const N: usize>(from: &[bf16], to: &mut [bf16; N]) {
    match from.first_chunk::<N>() {
        Some(whole) => *to = *whole,
        None => to[..from.len()].copy_from_slice(from),
    }
}

/// Keys and values of a head, in blocks.
#[derive(Default)]
struct Blocks {
    /// Whose they are.
    head: Option<Head>,
    /// Which there are.
    made: Vec<bool>,
    /// How many keys the head has, pieces of a key, and elements of a value, up to a multiple of sixteen.
    count: usize,
    pieces: usize,
    elements: usize,
    /// [block][key][piece]
    keys: Vec<Piece>,
    /// [block][element][piece of keys]
    values: Vec<Piece>,
}

impl Blocks {
    #[inline(always)]
    fn begin(&mut self, head: Head, count: usize, pieces: usize, elements: usize) {
        if self.head == Some(head) {
            return;
        }
        let blocks = count.div_ceil(KEYS);
        let bytes = blocks * KEYS * (pieces * PIECE + elements) * size_of::<bf16>();
        // No place for all: each is made where the one before was.
        let places = if bytes <= KEPT { blocks } else { 1 };
        (self.count, self.pieces, self.elements) = (count, pieces, elements);
        self.head = (places == blocks).then_some(head);
        self.made.clear();
        self.made.resize(places, false);
        let zeros = Piece([bf16::ZERO; PIECE]);
        self.keys.resize((places * KEYS * pieces).max(self.keys.len()), zeros);
        self.values.resize((places * elements * KEY_PIECES).max(self.values.len()), zeros);
    }

    /// The keys of a block and its turned values. Those that are not there are zeros.
    #[inline(always)]
    fn get<V: Sixteen>(
        &mut self,
        block: usize,
        keys: &Line<'_, bf16>,
        values: &Line<'_, bf16>,
        start: usize,
    ) -> (&[Piece], &[Piece]) {
        let (kept, place) = if self.head.is_some() { (self.made[block], block) } else { (false, 0) };
        let size = (KEYS * self.pieces, self.elements * KEY_PIECES);
        let to_keys = &mut self.keys[place * size.0..][..size.0];
        let to_values = &mut self.values[place * size.1..][..size.1];
        if !kept {
            let there = KEYS.min(self.count - block * KEYS);
            let start = start + block * KEYS;
            for (j, to) in to_keys.chunks_mut(self.pieces.max(1)).enumerate() {
                let key = if j < there { keys.get(start + j) } else { &[] };
                for (piece, to) in to.iter_mut().enumerate() {
                    let rest = key.get(piece * PIECE..).unwrap_or_default();
                    to.0 = [bf16::ZERO; PIECE];
                    copy(rest, &mut to.0);
                }
            }
            turn_values::<V>(to_values, |j| if j < there { values.get(start + j) } else { &[] });
            self.made[place] = true;
        }
        (to_keys, to_values)
    }
}

/// Values of a block as [element][key].
#[allow(unsafe_code)]
#[inline(always)]
fn turn_values<'a, V: Sixteen>(to: &mut [Piece], value: impl Fn(usize) -> &'a [bf16]) {
    for (sixteen, to) in to.chunks_mut(LANES * KEY_PIECES).enumerate() {
        for piece in 0..KEY_PIECES {
            // SAFETY: `vectorize` runs it where the instructions of `V` are; a piece is sixteen pairs of 32 bits.
            unsafe {
                let mut rows = [V::splat(0.0); LANES];
                for (pair, row) in rows.iter_mut().enumerate() {
                    let (mut first, mut second) = ([bf16::ZERO; LANES], [bf16::ZERO; LANES]);
                    let key = piece * PIECE + 2 * pair;
                    copy(value(key).get(sixteen * LANES..).unwrap_or_default(), &mut first);
                    copy(value(key + 1).get(sixteen * LANES..).unwrap_or_default(), &mut second);
                    let mut both = [0f32; LANES];
                    for ((both, first), second) in both.iter_mut().zip(first).zip(second) {
                        *both = f32::from_bits(u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16);
                    }
                    *row = V::load(&both);
                }
                for (element, column) in V::turned(rows).into_iter().enumerate() {
                    column.store(&mut *to[element * KEY_PIECES + piece].0.as_mut_ptr().cast());
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod rounded {
    use std::arch::x86_64::*;
    use std::mem::transmute;

    use super::super::super::exp::TWO_TO_SHORT;
    use super::super::super::vector::{InOne, Sixteen};
    use super::{LANES, Lanes, PairLanes, Softmax};

    /// Makes weights of scores, rounded to bfloat16, and adds them to the totals as they are rounded. One that is NaN has the weight
    /// NaN.
    ///
    /// # Safety
    /// This CPU has AVX-512 BF16. There are two scores for each pair.
    #[inline(always)]
    pub unsafe fn weigh(softmax: &mut Softmax, scores: &[Lanes], factor: f32, vectors: usize, to: &mut [PairLanes]) {
        // The lower half of a register's numbers beside the upper half's.
        let mut order = [0u16; 2 * LANES];
        (0..2 * LANES).for_each(|i| order[i] = (i / 2 + i % 2 * LANES) as u16);
        for v in 0..vectors {
            let totals = &mut softmax.totals.0.as_chunks_mut::<LANES>().0[v];
            // SAFETY: the caller's.
            unsafe {
                let order = _mm512_loadu_si512(order.as_ptr().cast());
                let ones: __m512bh = transmute(_mm512_set1_epi16(0x3f80));
                let (factor, base) = (InOne::splat(factor), InOne::load(&softmax.base.0.as_chunks().0[v]));
                let mut total = _mm512_loadu_ps(totals.as_ptr());
                for (scores, to) in scores.as_chunks::<2>().0.iter().zip(&mut *to) {
                    let [low, high] = [&scores[0].0.as_chunks().0[v], &scores[1].0.as_chunks().0[v]];
                    let low = InOne::load(low).times(factor, base).exp2(&TWO_TO_SHORT);
                    let high = InOne::load(high).times(factor, base).exp2(&TWO_TO_SHORT);
                    let pairs: __m512i = transmute(_mm512_cvtne2ps_pbh(high.0, low.0));
                    let pairs = _mm512_permutexvar_epi16(order, pairs);
                    total = _mm512_dpbf16_ps(total, transmute::<__m512i, __m512bh>(pairs), ones);
                    _mm512_storeu_si512(to.0.as_mut_ptr().add(v * LANES).cast(), pairs);
                }
                _mm512_storeu_ps(totals.as_mut_ptr(), total);
            }
        }
    }
}

/// Nothing here has the instructions: no call comes this far.
#[cfg(not(target_arch = "x86_64"))]
#[allow(unsafe_code)]
mod rounded {
    use super::{Lanes, PairLanes, Softmax};

    pub unsafe fn weigh(_: &mut Softmax, _: &[Lanes], _: f32, _: usize, _: &mut [PairLanes]) {
        unreachable!("only x86-64 has AVX-512 BF16")
    }
}
