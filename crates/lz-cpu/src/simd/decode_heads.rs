//! The arithmetic of attention of one new query per sequence: one pass over keys and values.
//!
//! Keys are scored [`TILE`] at a time. Weights are exponentials of differences to the largest score so far; when a larger one
//! comes, what was summed before is scaled down (online softmax). The query heads that share a key/value head are computed
//! together, so that keys and values are read once for all of them and never repeated in memory.
//!
//! Where a key lies is a [`Cache`]'s business: in one tensor, or in pages.

use std::marker::PhantomData;

use lz_abi::Rows;

use super::exp::{exp, tanh};
use super::half_floats::Narrow;
use super::vector::{LANES, Sixteen};
use super::{Isa, Work};

/// Keys that are scored at a time.
const TILE: usize = 64;
/// Query heads whose sums are kept at a time; of more that share a key/value head, keys are read again.
pub(super) const HEADS: usize = 8;
/// The widest head: the sums of [`HEADS`] heads are 8 KiB, which stay in the first cache.
pub(super) const WIDEST: usize = 256;
/// What is this far below the largest score has no weight: `exp` gives no smaller numbers than e^-87.
const LEAST: f32 = -87.0;
/// How many keys before it is read a key is asked for.
const EARLY: usize = 8;

/// The tokens of a sequence that are attended to.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub first: usize,
    pub end: usize,
}

/// Where the keys and values of one sequence and head are. Asked by address, once for each tile of keys: the arithmetic is compiled
/// once for all of them.
pub(super) trait Cache<'a, T> {
    /// Those of the tokens from `first` on.
    fn read(&self, first: usize, to: &mut [(&'a [T], &'a [T])]);
}
/// Up to [`HEADS`] query heads that share a key/value head.
pub(super) struct Group<'a, 'o, T: Narrow> {
    pub queries: Rows<'o, T>,
    /// The row of the first head's query.
    pub first: usize,
    pub cache: &'o dyn Cache<'a, T>,
    pub span: Span,
    pub scale: f32,
    /// 0 is none.
    pub softcap: f32,
    pub v_dim: usize,
    /// The results of the heads, one after the other.
    pub output: &'o mut [T],
}

impl<T: Narrow> Group<'_, '_, T> {
    /// Computes it with the instructions of a set that this CPU has.
    pub fn attend<I: Isa>(self) {
        if I::FUSED {
            I::vectorize(Heads::<_, I::Sixteen, true>(self, PhantomData));
        } else {
            I::vectorize(Heads::<_, I::Sixteen, false>(self, PhantomData));
        }
    }
}

/// A group, computed by vectors `V`. `FUSED`: as of [`Isa`].
struct Heads<G, V, const FUSED: bool>(G, PhantomData<V>);

/// What is known of some heads after some keys.
struct State {
    queries: [[f32; WIDEST]; HEADS],
    /// Σ weight · value.
    sums: [[f32; WIDEST]; HEADS],
    /// Σ weight.
    totals: [f32; HEADS],
    /// The largest score, to which weights are relative.
    largest: [f32; HEADS],
}

impl<'a, T: Narrow, V: Sixteen, const FUSED: bool> Work for Heads<Group<'a, '_, T>, V, FUSED> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let heads = self.0.output.len() / self.0.v_dim;
        let width = self.0.queries.len();
        let mut state = State {
            queries: [[0.0; WIDEST]; HEADS],
            sums: [[0.0; WIDEST]; HEADS],
            totals: [0.0; HEADS],
            largest: [f32::NEG_INFINITY; HEADS],
        };
        for head in 0..heads {
            T::widen(self.0.queries.get(self.0.first + head), &mut state.queries[head][..width]);
        }
        let none: &'a [T] = &[];
        let mut tile = [(none, none); TILE];
        let mut first = self.0.span.first;
        while first < self.0.span.end {
            let tile = &mut tile[..TILE.min(self.0.span.end - first)];
            self.0.cache.read(first, tile);
            let mut head = 0;
            while head < heads {
                match heads - head {
                    1 => head += self.step::<1>(head, tile, &mut state),
                    2 | 3 => head += self.step::<2>(head, tile, &mut state),
                    _ => head += self.step::<4>(head, tile, &mut state),
                }
            }
            first += tile.len();
        }
        let mut result = [0f32; WIDEST];
        for (head, output) in self.0.output.chunks_exact_mut(self.0.v_dim).enumerate() {
            let result = &mut result[..self.0.v_dim];
            let total = state.totals[head];
            // Nothing to attend to gives zeros.
            let factor = if total == 0.0 { 0.0 } else { 1.0 / total };
            result.iter_mut().zip(&state.sums[head]).for_each(|(result, sum)| *result = sum * factor);
            T::narrow(result, output);
        }
    }
}

impl<'a, T: Narrow, V: Sixteen, const FUSED: bool> Heads<Group<'a, '_, T>, V, FUSED> {
    /// Adds the keys and values at hand to `G` heads, and says how many these are.
    #[inline(always)]
    fn step<const G: usize>(&self, head: usize, tile: &[(&'a [T], &'a [T])], state: &mut State) -> usize {
        let queries: [&[f32; WIDEST]; G] = std::array::from_fn(|g| &state.queries[head + g]);
        let mut scores = [[f32::NEG_INFINITY; TILE]; G];
        for (j, (key, _)) in tile.iter().enumerate() {
            if head == 0 {
                // Rows of different heads or pages are apart, which no CPU foresees.
                tile.get(j.wrapping_add(EARLY)).iter().for_each(|next| prefetch(next.0));
                prefetch(tile[j].1);
            }
            let products = products::<T, V, G>(queries, key);
            for (scores, product) in scores.iter_mut().zip(products) {
                scores[j] = product * self.0.scale;
            }
        }
        for (g, scores) in scores.iter_mut().enumerate() {
            let g = head + g;
            if self.0.softcap > 0.0 {
                let cap = self.0.softcap;
                scores[..tile.len()].iter_mut().for_each(|score| *score = cap * tanh::<FUSED>(*score / cap));
            }
            let before = state.largest[g];
            let largest = largest::<V>(scores, before);
            if largest > before {
                if before - largest < LEAST {
                    state.totals[g] = 0.0;
                    state.sums[g][..self.0.v_dim].fill(0.0);
                } else {
                    let factor = exp::<FUSED>(before - largest);
                    state.totals[g] *= factor;
                    state.sums[g][..self.0.v_dim].iter_mut().for_each(|sum| *sum *= factor);
                }
                state.largest[g] = largest;
            }
            state.totals[g] += weights::<V, FUSED>(scores, largest);
        }
        let mut chunk = 0;
        while chunk + 2 <= self.0.v_dim / LANES {
            add_values::<T, V, G, 2>(&scores, tile, &mut state.sums[head..head + G], chunk);
            chunk += 2;
        }
        if chunk < self.0.v_dim / LANES {
            add_values::<T, V, G, 1>(&scores, tile, &mut state.sums[head..head + G], chunk);
            chunk += 1;
        }
        let start = chunk * LANES;
        if start < self.0.v_dim {
            for (j, (_, value)) in tile.iter().enumerate() {
                let mut wide = [0f32; LANES];
                let rest = &value[start..];
                T::widen(rest, &mut wide[..rest.len()]);
                for (g, scores) in scores.iter().enumerate() {
                    let weight = scores[j];
                    let sums = state.sums[head + g][start..self.0.v_dim].iter_mut();
                    sums.zip(&wide).for_each(|(total, value)| *total += weight * value);
                }
            }
        }
        G
    }
}

/// Adds the values at hand by weight to `G` sums: their numbers from 16 · `chunk` on, `P` times sixteen.
#[allow(unsafe_code)]
#[inline(always)]
fn add_values<T: Narrow, V: Sixteen, const G: usize, const P: usize>(
    weights: &[[f32; TILE]; G],
    tile: &[(&[T], &[T])],
    sums: &mut [[f32; WIDEST]],
    chunk: usize,
) {
    // SAFETY: `vectorize` runs it where the instructions of `V` are.
    unsafe {
        let mut totals = [[V::splat(0.0); P]; G];
        for (totals, sums) in totals.iter_mut().zip(&*sums) {
            for (total, sums) in totals.iter_mut().zip(&sums.as_chunks().0[chunk..]) {
                *total = V::load(sums);
            }
        }
        for (j, (_, value)) in tile.iter().enumerate() {
            let mut wide = [V::splat(0.0); P];
            for (wide, value) in wide.iter_mut().zip(&value.as_chunks().0[chunk..]) {
                *wide = T::load(value);
            }
            for (totals, weights) in totals.iter_mut().zip(weights) {
                let weight = V::splat(weights[j]);
                for (total, wide) in totals.iter_mut().zip(wide) {
                    *total = wide.times(weight, *total);
                }
            }
        }
        for (totals, sums) in totals.iter().zip(sums) {
            for (total, sums) in totals.iter().zip(&mut sums.as_chunks_mut().0[chunk..]) {
                total.store(sums);
            }
        }
    }
}

/// Asks for a row before it is read.
#[inline(always)]
fn prefetch<T>(row: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in row.chunks((64 / size_of::<T>()).max(1)) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: it reads nothing, and every x86-64 has it.
        #[allow(unsafe_code)]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = row;
}

/// The products of a key with several queries.
#[allow(unsafe_code)]
#[inline(always)]
fn products<T: Narrow, V: Sixteen, const G: usize>(queries: [&[f32; WIDEST]; G], key: &[T]) -> [f32; G] {
    let (chunks, rest) = key.as_chunks::<LANES>();
    let mut found = [0f32; G];
    // SAFETY: `vectorize` runs it where the instructions of `V` are.
    unsafe {
        let mut sums = [V::splat(0.0); G];
        for (c, chunk) in chunks.iter().enumerate() {
            let key: V = T::load(chunk);
            for g in 0..G {
                sums[g] = V::load(&queries[g].as_chunks().0[c]).times(key, sums[g]);
            }
        }
        for g in 0..G {
            found[g] = sums[g].added();
        }
    }
    if !rest.is_empty() {
        let mut wide = [0f32; LANES];
        T::widen(rest, &mut wide[..rest.len()]);
        for (found, query) in found.iter_mut().zip(queries) {
            let query = &query[key.len() - rest.len()..key.len()];
            *found += wide.iter().zip(query).map(|(key, query)| key * query).sum::<f32>();
        }
    }
    found
}

/// The largest of the scores and of one more. Where a score is NaN, it does not count.
#[allow(unsafe_code)]
#[inline(always)]
fn largest<V: Sixteen>(scores: &[f32; TILE], other: f32) -> f32 {
    let mut all = [0f32; LANES];
    // SAFETY: `vectorize` runs it where the instructions of `V` are.
    unsafe {
        let mut most = V::splat(other);
        for chunk in scores.as_chunks().0 {
            most = V::load(chunk).or_larger(most);
        }
        most.store(&mut all);
    }
    all.into_iter().fold(other, f32::max)
}

/// Makes weights of scores, and gives their sum. A score far below the largest has no weight; one that is NaN has the weight NaN.
#[allow(unsafe_code)]
#[inline(always)]
fn weights<V: Sixteen, const FUSED: bool>(scores: &mut [f32; TILE], largest: f32) -> f32 {
    // If all are minus infinity, none has a weight.
    let base = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
    for score in scores.iter_mut() {
        let distance = *score - base;
        let weight = exp::<FUSED>(distance);
        *score = if distance < LEAST { 0.0 } else { weight };
    }
    // SAFETY: `vectorize` runs it where the instructions of `V` are.
    unsafe {
        let mut total = V::splat(0.0);
        for chunk in scores.as_chunks().0 {
            total = V::load(chunk).plus(total);
        }
        total.added()
    }
}
