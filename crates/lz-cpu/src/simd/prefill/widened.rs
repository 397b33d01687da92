//! Tiles of attention computed in float32, whatever the dtype: the queries of a tile are written as [element][query] once, and each
//! number of a key or value is multiplied with all queries at once, so that keys and values are read as they lie in memory.

use std::marker::PhantomData;

use super::super::half_floats::Narrow;
use super::super::vector::{LANES, Sixteen};
use super::super::{Isa, Work};
use super::products::{add_values, products};
use super::softmax::{Softmax, scale, turn_out};
use super::tile::{KEYS, Lanes, Path, ROWS, Scratch, Tile, Write};

/// The path, for an instruction set.
pub(super) struct Widened<I>(PhantomData<I>);

/// Memory of a thread.
#[derive(Default)]
pub(super) struct WideScratch {
    /// [element][query]
    queries: Vec<Lanes>,
    /// [key][query]: products, scores, weights.
    scores: Vec<Lanes>,
    /// [element][query]: Σ weight · value.
    sums: Vec<Lanes>,
    /// Keys and values of a block as float32, where they are not.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// [query][element]
    rows: Vec<f32>,
}

impl<I: Isa, T: Narrow> Path<T> for Widened<I> {
    type Isa = I;

    fn attend(tile: Tile<'_, T>, scratch: &mut Scratch, write: Write<'_>) {
        let scratch = &mut scratch.wide;
        if I::FUSED {
            I::vectorize(Attend::<_, I::Sixteen, true> { tile, scratch, write, vectors: PhantomData });
        } else {
            I::vectorize(Attend::<_, I::Sixteen, false> { tile, scratch, write, vectors: PhantomData });
        }
    }
}

/// A tile, computed by vectors `V`. `FUSED`: as of [`Isa`].
struct Attend<'s, W, V, const FUSED: bool> {
    tile: W,
    scratch: &'s mut WideScratch,
    write: Write<'s>,
    vectors: PhantomData<V>,
}

impl<T: Narrow, V: Sixteen, const FUSED: bool> Work for Attend<'_, Tile<'_, T>, V, FUSED> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Attend { tile, scratch, write, .. } = self;
        let (count, v_dim) = (tile.queries.len(), tile.v_dim);
        let width = tile.queries.first().map_or(0, |query| query.len());
        let zeros = Lanes([0.0; ROWS]);
        scratch.queries.resize(width.next_multiple_of(LANES), zeros);
        scratch.scores.resize(KEYS, zeros);
        scratch.sums.clear();
        scratch.sums.resize(v_dim.next_multiple_of(LANES), zeros);
        scratch.keys.resize(KEYS * width, 0.0);
        scratch.values.resize(KEYS * v_dim, 0.0);
        turn_in::<T, V>(tile.queries, &mut scratch.queries);
        let (vectors, mut softmax, span) = (count.div_ceil(LANES), Softmax::new(), tile.span());
        let mut first = span.from;
        while first < span.end {
            let n = KEYS.min(span.end - first);
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
            products::<V>(&scratch.queries[..width], &keys, n, vectors, &mut scratch.scores);
            let scores = &mut scratch.scores[..n];
            let factor = tile.score::<V, FUSED>(first, span, scores);
            if let Some(factors) = softmax.raise::<V>(scores, factor, vectors) {
                scale::<V>(&mut scratch.sums, &factors);
            }
            softmax.weigh::<V>(scores, factor, vectors);
            add_values::<V>(scores, &values[..n], vectors, &mut scratch.sums[..v_dim]);
            first += n;
        }
        turn_out::<V>(&scratch.sums, &softmax, (count, v_dim), &mut scratch.rows, write);
    }
}

/// Queries as [element][query], with zeros for queries and elements that are not there.
#[allow(unsafe_code)]
#[inline(always)]
fn turn_in<T: Narrow, V: Sixteen>(queries: &[&[T]], to: &mut [Lanes]) {
    for (v, lanes) in queries.chunks(LANES).enumerate() {
        for (block, to) in to.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            // SAFETY: `vectorize` runs it where the instructions of `V` are.
            unsafe {
                let mut rows = [V::splat(0.0); LANES];
                for (row, query) in rows.iter_mut().zip(lanes) {
                    let rest = &query[block * LANES..];
                    *row = match rest.first_chunk::<LANES>() {
                        Some(whole) => T::load(whole),
                        None => {
                            let mut part = [0f32; LANES];
                            T::widen(rest, &mut part[..rest.len()]);
                            V::load(&part)
                        }
                    };
                }
                for (column, to) in V::turned(rows).into_iter().zip(to) {
                    column.store(&mut to.0.as_chunks_mut().0[v]);
                }
            }
        }
    }
}
