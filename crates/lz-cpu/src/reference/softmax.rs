//! Scores, softmax and the weighted sum: the heart of every attention.

use lz_model::KernelArgs;

use super::arguments::Arguments;
use super::matrix::{Matrix, dot};

/// How the product of a query and a key becomes a score.
#[derive(Clone, Copy)]
pub struct Scoring {
    scale: f64,
    softcap: f64,
}

impl Scoring {
    /// What the call says. Without a scale it is 1/sqrt(head_dim); heads of no width have only
    /// zero products, so any finite scale will do.
    pub fn of(args: &KernelArgs<'_, '_>, head_dim: i64) -> Scoring {
        let usual = 1.0 / (head_dim.max(1) as f64).sqrt();
        Scoring { scale: args.param("scale").as_float().unwrap_or(usual), softcap: args.float_or("softcap", 0.0) }
    }

    fn score(self, product: f64) -> f64 {
        let scaled = self.scale * product;
        if self.softcap > 0.0 { self.softcap * (scaled / self.softcap).tanh() } else { scaled }
    }
}

/// The weights of one query over `keys`. `bias` is what is added to a key's score, or `None` where
/// the query may not attend.
pub fn weights(query: &[f64], keys: &Matrix, scoring: Scoring, bias: impl Fn(usize) -> Option<f64>) -> Vec<f64> {
    let score = |j: usize| match bias(j) {
        None => f64::NEG_INFINITY,
        Some(bias) => scoring.score(dot(query, keys.row(j))) + bias,
    };
    let mut scores: Vec<f64> = (0..keys.rows()).map(score).collect();
    softmax(&mut scores);
    scores
}

/// Scores to weights that sum to 1. Minus infinity has no weight; where there is nothing else, all
/// weights are zero. A NaN, or plus infinity, makes every weight NaN.
pub fn softmax(scores: &mut [f64]) {
    if scores.iter().all(|&s| s == f64::NEG_INFINITY) {
        scores.fill(0.0);
        return;
    }
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut total = 0.0;
    for score in scores.iter_mut() {
        // A weight too small for a float is still one: what it weighs takes part.
        let weight = (*score - max).exp();
        *score = match (*score == f64::NEG_INFINITY, weight == 0.0) {
            (true, _) => 0.0,
            (false, true) => f64::MIN_POSITIVE,
            (false, false) => weight,
        };
        total += *score;
    }
    for score in scores {
        *score /= total;
    }
}

/// The sum of the rows of `values` by weight. A row without weight takes no part, whatever it holds.
pub fn weighted_sum(weights: &[f64], values: &Matrix) -> Vec<f64> {
    let mut sum = vec![0.0; values.cols()];
    for (row, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight != 0.0) {
        for (total, value) in sum.iter_mut().zip(values.row(row)) {
            *total += weight * value;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(scores: &[f64]) -> Vec<f64> {
        let mut weights = scores.to_vec();
        softmax(&mut weights);
        weights
    }

    #[test]
    fn weights_sum_to_one_and_do_not_overflow() {
        for scores in [&[0.0, 1.0, 2.0][..], &[1e300, 1e300], &[-1e9, 0.0], &[5.0]] {
            let sum: f64 = of(scores).iter().sum();
            assert!((sum - 1.0).abs() < 1e-12, "{scores:?}");
        }
        assert_eq!(of(&[1e300, 1e300]), [0.5, 0.5]);
    }

    #[test]
    fn nothing_to_attend_to_gives_zeros_and_nan_spreads() {
        let none = f64::NEG_INFINITY;
        assert_eq!(of(&[none, none]), [0.0, 0.0]);
        assert_eq!(of(&[none, 3.0]), [0.0, 1.0]);
        assert!(of(&[f64::NAN, 0.0]).iter().all(|w| w.is_nan()));
        assert!(of(&[none, f64::NAN])[1].is_nan());
        assert!(of(&[f64::INFINITY, 0.0])[0].is_nan());
        assert!(of(&[]).is_empty());
    }

    #[test]
    fn rows_without_weight_take_no_part() {
        let values = Matrix::gather(2, 1, |r, _| if r == 0 { f64::NAN } else { 4.0 });
        assert_eq!(weighted_sum(&[0.0, 0.5], &values), [2.0]);
    }
}
