//! The arithmetic of attention of many queries: a tile of queries over tiles of keys, in one pass over the keys.
//!
//! The queries of a tile are the lanes of vectors: scores are [key][query], sums of values [element][query]. A key's or value's
//! number is multiplied with all queries at once, so that keys and values are read as they lie in memory, and the largest score
//! and the sum of weights of each query are found without adding up lanes. Weights are exponentials of differences to the largest
//! score so far; when a larger one comes, what was summed before is scaled down (online softmax).

use std::marker::PhantomData;

use lz_abi::Line;

use super::exp::{exp, tanh};
use super::half_floats::Narrow;
use super::prefill_products::{add_values, products};
use super::vector::{LANES, Sixteen};
use super::{Isa, Work};

/// Queries of a tile.
pub(super) const ROWS: usize = 64;
/// Keys of a tile: its scores are 16 KiB.
pub(super) const KEYS: usize = 64;
/// The widest head.
pub(super) const WIDEST: usize = 256;
/// What is this far below the largest score has no weight: `exp` gives no smaller numbers than e^-87.
const LEAST: f32 = -87.0;

/// A number of each query of a tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Lanes(pub [f32; ROWS]);

/// Memory of a thread.
#[derive(Default)]
pub(super) struct Scratch {
    /// [element][query]
    queries: Vec<Lanes>,
    /// [key][query]: products, scores, weights.
    scores: Vec<Lanes>,
    /// [element][query]: Σ weight · value.
    sums: Vec<Lanes>,
    /// Keys and values of a tile as float32, where they are not.
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// The keys that each query of a tile may attend to.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    /// The first.
    pub first: [i32; ROWS],
    /// The last; before the first where there is none.
    pub last: [i32; ROWS],
}

/// What is added to the scores of the queries of a tile.
pub(super) trait Bias {
    /// Adds it to the scores of `keys` keys from `first` on.
    fn add(&self, first: usize, keys: usize, scores: &mut [Lanes]);
}

/// Nothing.
pub(super) struct NoBias;

impl Bias for NoBias {
    #[inline(always)]
    fn add(&self, _: usize, _: usize, _: &mut [Lanes]) {}
}

/// A tile of queries that share a key/value head.
pub(super) struct Tile<'a, T: Narrow, B> {
    pub queries: &'a [&'a [T]],
    pub keys: Line<'a, T>,
    pub values: Line<'a, T>,
    /// The first of these that is the tile's: keys are counted from there.
    pub start: usize,
    pub bounds: &'a Bounds,
    pub bias: B,
    pub scale: f32,
    /// 0 is none.
    pub softcap: f32,
    pub v_dim: usize,
    pub scratch: &'a mut Scratch,
}

impl<T: Narrow, B: Bias> Tile<'_, T, B> {
    /// Computes it with the instructions of a set that this CPU has, and gives each query's result to `write`.
    pub fn attend<I: Isa>(self, write: impl FnMut(usize, &[f32])) {
        if I::FUSED {
            I::vectorize(Attend::<_, _, I::Sixteen, true>(self, write, PhantomData));
        } else {
            I::vectorize(Attend::<_, _, I::Sixteen, false>(self, write, PhantomData));
        }
    }
}

/// A tile, computed by vectors `V`. `FUSED`: as of [`Isa`].
struct Attend<W, F, V, const FUSED: bool>(W, F, PhantomData<V>);

impl<T: Narrow, B: Bias, F: FnMut(usize, &[f32]), V: Sixteen, const FUSED: bool> Work
    for Attend<Tile<'_, T, B>, F, V, FUSED>
{
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Attend(tile, mut write, _) = self;
        let (count, v_dim) = (tile.queries.len(), tile.v_dim);
        let width = tile.queries.first().map_or(0, |query| query.len());
        let scratch = tile.scratch;
        scratch.queries.resize(width, Lanes([0.0; ROWS]));
        scratch.scores.resize(KEYS, Lanes([0.0; ROWS]));
        scratch.sums.clear();
        scratch.sums.resize(v_dim, Lanes([0.0; ROWS]));
        scratch.keys.resize(KEYS * width, 0.0);
        scratch.values.resize(KEYS * v_dim, 0.0);
        turn_in(tile.queries, &mut scratch.queries);
        let vectors = count.div_ceil(LANES);
        let (mut totals, mut largest) = ([0f32; ROWS], [f32::NEG_INFINITY; ROWS]);
        let (from, end, inner_from, inner_last) = tile.bounds.span(count);
        let mut first = from;
        while first < end {
            let n = KEYS.min(end - first);
            let none: &[f32] = &[];
            let (mut keys, mut values) = ([none; KEYS], [none; KEYS]);
            let buffers = scratch.keys.chunks_mut(width.max(1)).zip(scratch.values.chunks_mut(v_dim.max(1)));
            for (j, (key, value)) in buffers.enumerate().take(n) {
                keys[j] = T::wide(tile.keys.get(tile.start + first + j), key);
                values[j] = T::wide(tile.values.get(tile.start + first + j), value);
            }
            // Products are computed for some keys at once: these are of a key that is there.
            let one = keys[0];
            keys[n..].fill(one);
            products::<V>(&scratch.queries, &keys, n, vectors, &mut scratch.scores);
            let scores = &mut scratch.scores[..n];
            for scores in scores.iter_mut() {
                scores.0.iter_mut().for_each(|score| *score *= tile.scale);
            }
            if tile.softcap > 0.0 {
                let cap = tile.softcap;
                for scores in scores.iter_mut() {
                    scores.0.iter_mut().for_each(|score| *score = cap * tanh::<FUSED>(*score / cap));
                }
            }
            tile.bias.add(first, n, scores);
            if (first as i32) < inner_from || (first + n - 1) as i32 > inner_last {
                tile.bounds.apply(first, scores);
            }
            let factors = weights::<FUSED>(scores, &mut largest, &mut totals, vectors * LANES);
            if let Some(factors) = factors {
                for sums in &mut scratch.sums {
                    sums.0.iter_mut().zip(&factors).for_each(|(sum, factor)| *sum *= factor);
                }
            }
            add_values::<V>(scores, &values[..n], vectors, &mut scratch.sums);
            first += n;
        }
        let mut result = [0f32; WIDEST];
        for (lane, total) in totals.iter().enumerate().take(count) {
            // Nothing to attend to gives zeros.
            let factor = if *total == 0.0 { 0.0 } else { 1.0 / total };
            for (result, sums) in result.iter_mut().zip(&scratch.sums) {
                *result = sums.0[lane] * factor;
            }
            write(lane, &result[..v_dim]);
        }
    }
}

impl Bounds {
    /// The keys that some query attends to, from and to below; and the first and last of those that every query attends to.
    #[inline(always)]
    fn span(&self, count: usize) -> (usize, usize, i32, i32) {
        let (first, last) = (&self.first[..count], &self.last[..count]);
        let from = first.iter().copied().min().unwrap_or(0);
        let end = last.iter().copied().max().unwrap_or(-1);
        let inner = first.iter().copied().max().unwrap_or(0);
        (from.max(0) as usize, (end.max(-1) + 1) as usize, inner, last.iter().copied().min().unwrap_or(-1))
    }

    /// Makes the scores of keys that a query may not attend to minus infinity.
    #[inline(always)]
    fn apply(&self, first: usize, scores: &mut [Lanes]) {
        for (key, scores) in (first as i32..).zip(scores) {
            for ((score, first), last) in scores.0.iter_mut().zip(&self.first).zip(&self.last) {
                *score = if key < *first || key > *last { f32::NEG_INFINITY } else { *score };
            }
        }
    }
}

/// Queries as [element][query]. What is beside them stays what it was, and its results are not looked at.
#[inline(always)]
fn turn_in<T: Narrow>(queries: &[&[T]], to: &mut [Lanes]) {
    let mut wide = [0f32; WIDEST];
    for (lane, query) in queries.iter().enumerate() {
        for (to, x) in to.iter_mut().zip(T::wide(query, &mut wide)) {
            to.0[lane] = *x;
        }
    }
}

/// Makes weights of scores, and adds them to the totals. A score far below the largest has no weight; one that is NaN has the
/// weight NaN. Gives what sums so far are to be multiplied with, if the largest score of a query is a new one.
#[inline(always)]
fn weights<const FUSED: bool>(
    scores: &mut [Lanes],
    largest: &mut [f32; ROWS],
    totals: &mut [f32; ROWS],
    lanes: usize,
) -> Option<[f32; ROWS]> {
    let mut most = *largest;
    for scores in &*scores {
        for (most, score) in most.iter_mut().zip(&scores.0) {
            *most = if *score > *most { *score } else { *most };
        }
    }
    let (mut base, mut factors, mut is_new) = ([0f32; ROWS], [1f32; ROWS], false);
    for i in 0..ROWS {
        let distance = largest[i] - most[i];
        let factor = if distance < LEAST { 0.0 } else { exp::<FUSED>(distance) };
        let same = most[i] == largest[i];
        factors[i] = if same { 1.0 } else { factor };
        totals[i] *= factors[i];
        // If all are minus infinity, none has a weight.
        base[i] = if most[i] == f32::NEG_INFINITY { 0.0 } else { most[i] };
        is_new |= !same;
    }
    *largest = most;
    for scores in scores {
        let lanes = scores.0[..lanes].iter_mut().zip(&base).zip(totals.iter_mut());
        for ((score, base), total) in lanes {
            let distance = *score - base;
            let weight = exp::<FUSED>(distance);
            *score = if distance < LEAST { 0.0 } else { weight };
            *total += *score;
        }
    }
    is_new.then_some(factors)
}
