//! Products of keys with a tile of queries, and sums of values by weight: blocks of sums that stay in registers.

use super::super::vector::{LANES, Sixteen};
use super::tile::{KEYS, Lanes};

/// The products of keys with all queries of a tile, of which `vectors` times sixteen are there. Products of the `keys` keys and of
/// those after them up to a multiple of eight are written.
#[inline(always)]
pub(super) fn products<V: Sixteen>(
    queries: &[Lanes],
    keys: &[&[f32]; KEYS],
    count: usize,
    vectors: usize,
    to: &mut [Lanes],
) {
    let mut at = 0;
    while at < vectors {
        // 16 sums; or 8 where a vector is more than one register.
        at += match vectors - at {
            2.. if V::REGISTERS == 1 => each_block::<V, 2, 8>(queries, keys, count, at, to),
            _ if V::REGISTERS == 1 => each_block::<V, 1, 8>(queries, keys, count, at, to),
            _ => each_block::<V, 1, 4>(queries, keys, count, at, to),
        };
    }
}

#[inline(always)]
fn each_block<V: Sixteen, const P: usize, const K: usize>(
    queries: &[Lanes],
    keys: &[&[f32]; KEYS],
    count: usize,
    at: usize,
    to: &mut [Lanes],
) -> usize {
    for (keys, to) in keys[..count.next_multiple_of(K)].as_chunks::<K>().0.iter().zip(to.as_chunks_mut::<K>().0) {
        block::<V, P, K>(queries, keys, at, to);
    }
    P
}

/// `K` keys and `P` vectors of queries.
#[allow(unsafe_code)]
#[inline(always)]
fn block<V: Sixteen, const P: usize, const K: usize>(
    queries: &[Lanes],
    keys: &[&[f32]; K],
    at: usize,
    to: &mut [Lanes; K],
) {
    assert!(keys.iter().all(|key| key.len() == queries.len()));
    // SAFETY: `vectorize` runs it where the instructions of `V` are; keys are as long as there are elements.
    unsafe {
        let mut sums = [[V::splat(0.0); P]; K];
        for (d, queries) in queries.iter().enumerate() {
            let queries = &queries.0.as_chunks::<LANES>().0[at..at + P];
            let mut row = [V::splat(0.0); P];
            for p in 0..P {
                row[p] = V::load(&queries[p]);
            }
            for k in 0..K {
                let x = V::splat(*keys[k].get_unchecked(d));
                for p in 0..P {
                    sums[k][p] = row[p].times(x, sums[k][p]);
                }
            }
        }
        for k in 0..K {
            let to = &mut to[k].0.as_chunks_mut::<LANES>().0[at..at + P];
            for p in 0..P {
                sums[k][p].store(&mut to[p]);
            }
        }
    }
}

/// Adds values by weight: sums[element][query] += Σ values[key][element] · weights[key][query].
#[inline(always)]
pub(super) fn add_values<V: Sixteen>(weights: &[Lanes], values: &[&[f32]], vectors: usize, sums: &mut [Lanes]) {
    let mut at = 0;
    while at < vectors {
        at += match vectors - at {
            2.. if V::REGISTERS == 1 => add_each::<V, 2, 8>(weights, values, at, sums),
            _ if V::REGISTERS == 1 => add_each::<V, 1, 8>(weights, values, at, sums),
            _ => add_each::<V, 1, 4>(weights, values, at, sums),
        };
    }
}

#[inline(always)]
fn add_each<V: Sixteen, const P: usize, const K: usize>(
    weights: &[Lanes],
    values: &[&[f32]],
    at: usize,
    sums: &mut [Lanes],
) -> usize {
    let (blocks, rest) = sums.as_chunks_mut::<K>();
    let whole = blocks.len() * K;
    for (b, sums) in blocks.iter_mut().enumerate() {
        add::<V, P, K>(weights, values, b * K, at, sums);
    }
    for (d, sums) in rest.iter_mut().enumerate() {
        add::<V, P, 1>(weights, values, whole + d, at, std::array::from_mut(sums));
    }
    P
}

/// `K` elements from `first` on, and `P` vectors of queries.
#[allow(unsafe_code)]
#[inline(always)]
fn add<V: Sixteen, const P: usize, const K: usize>(
    weights: &[Lanes],
    values: &[&[f32]],
    first: usize,
    at: usize,
    sums: &mut [Lanes; K],
) {
    assert!(values.iter().all(|value| value.len() >= first + K));
    // SAFETY: `vectorize` runs it where the instructions of `V` are; values have the elements.
    unsafe {
        let mut totals = [[V::splat(0.0); P]; K];
        for k in 0..K {
            let sums = &sums[k].0.as_chunks::<LANES>().0[at..at + P];
            for p in 0..P {
                totals[k][p] = V::load(&sums[p]);
            }
        }
        for (weights, value) in weights.iter().zip(values) {
            let weights = &weights.0.as_chunks::<LANES>().0[at..at + P];
            let mut row = [V::splat(0.0); P];
            for p in 0..P {
                row[p] = V::load(&weights[p]);
            }
            for (k, totals) in totals.iter_mut().enumerate() {
                let x = V::splat(*value.get_unchecked(first + k));
                for p in 0..P {
                    totals[p] = row[p].times(x, totals[p]);
                }
            }
        }
        for k in 0..K {
            let sums = &mut sums[k].0.as_chunks_mut::<LANES>().0[at..at + P];
            for p in 0..P {
                totals[k][p].store(&mut sums[p]);
            }
        }
    }
}
