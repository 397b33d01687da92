//! Softmax of a tile of queries, in one pass over blocks of keys. Weights are powers of two of differences to the largest score so
//! far; when a larger one comes, what was summed before is scaled down (online softmax).

use super::super::exp::TWO_TO;
use super::super::vector::{LANES, Sixteen};
use super::tile::{Lanes, ROWS, Write};

/// What is known of each query's scores so far.
pub(super) struct Softmax {
    /// The largest.
    largest: Lanes,
    /// Minus the exponent of the largest: weights are 2^(score · factor + base).
    pub base: Lanes,
    /// The sum of weights.
    pub totals: Lanes,
}

impl Softmax {
    /// Of no scores.
    #[inline(always)]
    pub fn new() -> Softmax {
        Softmax { largest: Lanes([f32::NEG_INFINITY; ROWS]), base: Lanes([0.0; ROWS]), totals: Lanes([0.0; ROWS]) }
    }

    /// Looks for larger scores in a block. `factor` makes exponents of 2 of scores. Gives what sums so far are to be multiplied
    /// with, if that is not 1 for all.
    #[allow(unsafe_code)]
    #[inline(always)]
    pub fn raise<V: Sixteen>(&mut self, scores: &[Lanes], factor: f32, vectors: usize) -> Option<Lanes> {
        let (mut scaling, mut is_new) = (Lanes([1.0; ROWS]), false);
        for v in 0..vectors {
            let before = &mut self.largest.0.as_chunks_mut::<LANES>().0[v];
            let mut found = [0f32; LANES];
            // SAFETY: `vectorize` runs it where the instructions of `V` are. So below.
            unsafe {
                // Four at a time, since each waits for the one before. A NaN is not larger.
                let mut most = [V::load(before); 4];
                let (fours, rest) = scores.as_chunks::<4>();
                for four in fours {
                    for (most, scores) in most.iter_mut().zip(four) {
                        *most = V::load(&scores.0.as_chunks().0[v]).or_larger(*most);
                    }
                }
                for scores in rest {
                    most[0] = V::load(&scores.0.as_chunks().0[v]).or_larger(most[0]);
                }
                most[0].or_larger(most[1]).or_larger(most[2].or_larger(most[3])).store(&mut found);
            }
            let base = &mut self.base.0.as_chunks_mut::<LANES>().0[v];
            let mut exponents = [0f32; LANES];
            for i in 0..LANES {
                let (old, new) = (before[i], found[i]);
                // If all are minus infinity, none has a weight.
                let to = if new == f32::NEG_INFINITY { 0.0 } else { -(new * factor) };
                // Before the first score there are no sums.
                let moves = new != old && old != f32::NEG_INFINITY;
                exponents[i] = if moves { to - base[i] } else { 0.0 };
                base[i] = to;
                is_new |= moves;
            }
            *before = found;
            let scaling = &mut scaling.0.as_chunks_mut::<LANES>().0[v];
            let totals = &mut self.totals.0.as_chunks_mut::<LANES>().0[v];
            unsafe { V::load(&exponents).exp2(&TWO_TO).store(scaling) };
            totals.iter_mut().zip(scaling).for_each(|(total, scaling)| *total *= *scaling);
        }
        is_new.then_some(scaling)
    }

    /// Makes weights of scores, and adds them to the totals. One that is NaN has the weight NaN.
    #[allow(unsafe_code)]
    #[inline(always)]
    pub fn weigh<V: Sixteen>(&mut self, scores: &mut [Lanes], factor: f32, vectors: usize) {
        for v in 0..vectors {
            let totals = &mut self.totals.0.as_chunks_mut::<LANES>().0[v];
            // SAFETY: as above.
            unsafe {
                let (factor, base) = (V::splat(factor), V::load(&self.base.0.as_chunks().0[v]));
                let mut total = V::load(totals);
                for scores in scores.iter_mut() {
                    let score = &mut scores.0.as_chunks_mut().0[v];
                    let weight = V::load(score).times(factor, base).exp2(&TWO_TO);
                    total = total.plus(weight);
                    weight.store(score);
                }
                total.store(totals);
            }
        }
    }

    /// What sums of values are to be divided by, as factors; 0 where there was nothing to attend to.
    #[inline(always)]
    pub fn shares(&self) -> Lanes {
        Lanes(self.totals.0.map(|total| if total == 0.0 { 0.0 } else { 1.0 / total }))
    }
}

/// Multiplies sums of values, [element][query], with a factor for each query.
#[allow(unsafe_code)]
#[inline(always)]
pub(super) fn scale<V: Sixteen>(sums: &mut [Lanes], factors: &Lanes) {
    for (v, factors) in factors.0.as_chunks().0.iter().enumerate() {
        // SAFETY: as above. A product and minus zero are the product.
        unsafe {
            let factors = V::load(factors);
            for sums in sums.iter_mut() {
                let sum = &mut sums.0.as_chunks_mut().0[v];
                V::load(sum).times(factors, V::splat(-0.0)).store(sum);
            }
        }
    }
}

/// Gives each query's sums times its share to `write`. `sums` are [element][query], a multiple of sixteen of them; `rows` is memory.
#[allow(unsafe_code)]
#[inline(always)]
pub(super) fn turn_out<V: Sixteen>(
    sums: &[Lanes],
    softmax: &Softmax,
    (count, v_dim): (usize, usize),
    rows: &mut Vec<f32>,
    write: Write<'_>,
) {
    let width = sums.len();
    rows.resize(ROWS * width, 0.0);
    let shares = softmax.shares();
    for v in 0..count.div_ceil(LANES) {
        for (block, sums) in sums.as_chunks::<LANES>().0.iter().enumerate() {
            // SAFETY: as above.
            unsafe {
                let share = V::load(&shares.0.as_chunks().0[v]);
                let mut columns = [share; LANES];
                for (column, sums) in columns.iter_mut().zip(sums) {
                    *column = V::load(&sums.0.as_chunks().0[v]).times(share, V::splat(-0.0));
                }
                for (lane, row) in V::turned(columns).into_iter().enumerate() {
                    let at = (v * LANES + lane) * width + block * LANES;
                    row.store(&mut rows[at..].as_chunks_mut().0[0]);
                }
            }
        }
    }
    for lane in 0..count {
        let row = &mut rows[lane * width..][..v_dim];
        // Nothing to attend to gives zeros, even if a value is NaN.
        if softmax.totals.0[lane] == 0.0 {
            row.fill(0.0);
        }
        write(lane, row);
    }
}
