//! The weights of a row of logits, by bins of descending logits: where a sum of weights, or of tokens, is reached, without
//! sorting the row.

use super::BLOCK;
use super::half_floats::Narrow;
use super::sample_row::each_group;

/// How many bins a row is divided into.
pub(super) const BINS: usize = 1024;
/// The bins end so far below the largest logit: the last one has all that is less likely than e^-32 of the most likely token.
const RANGE: f32 = 32.0;
/// Sums of each bin, of which each takes every fourth token: equal logits follow each other, and a sum waits for the one before.
const WAYS: usize = 4;

/// The last bin.
const LAST: f32 = (BINS - 1) as f32;
/// Added to a number below 2^22, it leaves the nearest integer in the lowest bits.
const INTEGERS: f32 = 12_582_912.0;

/// From a logit to its bin. A larger logit is never in a later bin: rounding keeps the order of numbers.
#[derive(Clone, Copy)]
pub(super) struct Bins {
    largest: f32,
    scale: f32,
}

/// What is in each bin.
pub(super) struct Contents {
    /// Sums of weights.
    pub masses: [f64; BINS],
    /// Numbers of tokens.
    pub counts: [usize; BINS],
}

impl Bins {
    /// For a row of logits, of which the largest is a finite number.
    #[inline(always)]
    pub fn new<T: Narrow>(row: &[T], largest: f32) -> Bins {
        let (mut wide, mut least) = ([0f32; BLOCK], [largest; 16]);
        for block in row.chunks(BLOCK) {
            let (groups, rest) = T::wide(block, &mut wide).as_chunks::<16>();
            for group in groups {
                for i in 0..16 {
                    least[i] = if group[i] < least[i] { group[i] } else { least[i] };
                }
            }
            rest.iter().for_each(|&x| least[0] = least[0].min(x));
        }
        let range = (largest - least.into_iter().fold(largest, f32::min)).min(RANGE);
        Bins { largest, scale: if range > 0.0 { (BINS - 1) as f32 / range } else { 0.0 } }
    }

    /// Those of at most [`BLOCK`] logits.
    #[inline(always)]
    fn of<'b>(self, logits: &[f32], to: &'b mut [u32; BLOCK]) -> &'b [u32] {
        let to = &mut to[..logits.len()];
        for (to, logit) in to.iter_mut().zip(logits) {
            let place = (self.largest - logit) * self.scale;
            let place = if place < LAST { place } else { LAST };
            *to = (place + INTEGERS).to_bits() & (BINS as u32 - 1);
        }
        to
    }

    /// Adds up a row, with one weight for each logit. Tokens are counted if `COUNTED`.
    #[inline(always)]
    pub fn contents<T: Narrow, const COUNTED: bool>(self, row: &[T], weights: &[f64]) -> Contents {
        let (mut wide, mut bins) = ([0f32; BLOCK], [0u32; BLOCK]);
        let (mut masses, mut counts) = ([[0f64; WAYS]; BINS], [[0u32; WAYS]; BINS]);
        for (block, weights) in row.chunks(BLOCK).zip(weights.chunks(BLOCK)) {
            let bins = self.of(T::wide(block, &mut wide), &mut bins);
            for (i, (&bin, weight)) in bins.iter().zip(weights).enumerate() {
                let bin = bin as usize % BINS;
                masses[bin][i % WAYS] += weight;
                if COUNTED {
                    counts[bin][i % WAYS] += 1;
                }
            }
        }
        let mut contents = Contents { masses: [0.0; BINS], counts: [0; BINS] };
        for bin in 0..BINS {
            contents.masses[bin] = masses[bin].iter().sum();
            contents.counts[bin] = counts[bin].iter().map(|&n| n as usize).sum();
        }
        contents
    }

    /// Calls a function with each token of a bin and its logit.
    #[inline(always)]
    pub fn each_in<T: Narrow>(self, row: &[T], bin: usize, mut found: impl FnMut(usize, f32)) {
        let (mut wide, mut bins) = ([0f32; BLOCK], [0u32; BLOCK]);
        for (b, block) in row.chunks(BLOCK).enumerate() {
            let wide = T::wide(block, &mut wide);
            let bins = self.of(wide, &mut bins);
            each_group(bins, |of| of == bin as u32, |i| found(b * BLOCK + i, wide[i]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_in_the_bin_its_logit_says() {
        let row: Vec<f32> = (0..5000).map(|i| ((i * 7919) % 5000) as f32 * 0.01 - 20.0).collect();
        let weights: Vec<f64> = (0..5000).map(f64::from).collect();
        let bins = Bins::new(&row, 29.99);
        let contents = bins.contents::<f32, true>(&row, &weights);
        let (mut before, mut seen) = (f32::INFINITY, 0);
        for bin in 0..BINS {
            let (mut mass, mut count, mut most, mut least) = (0.0, 0, f32::NEG_INFINITY, f32::INFINITY);
            bins.each_in(&row, bin, |id, logit| {
                assert_eq!(row[id], logit);
                (mass, count, most, least) = (mass + weights[id], count + 1, logit.max(most), logit.min(least));
            });
            assert_eq!((contents.masses[bin], contents.counts[bin]), (mass, count));
            assert!(most <= before, "bin {bin}");
            (before, seen) = (least.min(before), seen + count);
        }
        assert_eq!(seen, 5000);
    }

    #[test]
    fn rows_without_a_range_have_one_bin() {
        for row in [[1.0f32, 1.0, 1.0], [3e38, -3e38, f32::NEG_INFINITY]] {
            let contents = Bins::new(&row, row[0]).contents::<f32, false>(&row, &[1.0, 2.0, 4.0]);
            assert_eq!(contents.masses.iter().sum::<f64>(), 7.0);
            assert!(contents.masses[0] >= 1.0);
        }
    }
}
