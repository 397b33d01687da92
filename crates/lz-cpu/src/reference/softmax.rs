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

/// The weights of one query over `keys`, and the logarithm of the sum of the exponentials of its scores. `bias` is what is
/// added to a key's score, or `None` where the query may not attend. A `sink` joins the sum of the weights, not the
/// logarithm.
pub fn attend(
    query: &[f64],
    keys: &Matrix,
    scoring: Scoring,
    sink: Option<f64>,
    bias: impl Fn(usize) -> Option<f64>,
) -> (Vec<f64>, f64) {
    let score = |j: usize| match bias(j) {
        None => f64::NEG_INFINITY,
        Some(bias) => scoring.score(dot(query, keys.row(j))) + bias,
    };
    let mut scores: Vec<f64> = (0..keys.rows()).map(score).collect();
    let lse = softmax(&mut scores);
    if let Some(sink) = sink {
        // exp(lse) / (exp(lse) + exp(sink))
        let share = 1.0 / (1.0 + (sink - lse).exp());
        scores.iter_mut().filter(|weight| **weight != 0.0).for_each(|weight| *weight *= share);
    }
    (scores, lse)
}

/// The same without a sink, the weights alone.
pub fn weights(query: &[f64], keys: &Matrix, scoring: Scoring, bias: impl Fn(usize) -> Option<f64>) -> Vec<f64> {
    attend(query, keys, scoring, None, bias).0
}

/// Scores to weights that sum to 1, and the logarithm of the sum of their exponentials. Minus infinity has no weight; where
/// there is nothing else, all weights are zero. A NaN, or plus infinity, makes every weight NaN.
pub fn softmax(scores: &mut [f64]) -> f64 {
    if scores.iter().all(|&s| s == f64::NEG_INFINITY) {
        scores.fill(0.0);
        return f64::NEG_INFINITY;
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
    max + total.ln()
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
    fn the_logarithm_of_the_sum() {
        let lse = |scores: &[f64]| softmax(&mut scores.to_vec());
        assert!((lse(&[3f64.ln(), 0.0]) - 4f64.ln()).abs() < 1e-12);
        assert!((lse(&[1000.0, 1000.0]) - 1000.0 - 2f64.ln()).abs() < 1e-12);
        assert_eq!(lse(&[f64::NEG_INFINITY]), f64::NEG_INFINITY);
        assert!(lse(&[f64::NAN, 0.0]).is_nan());
    }

    #[test]
    fn a_sink_is_a_score_without_a_value() {
        let keys = Matrix::gather(2, 1, |r, _| r as f64 * 3f64.ln());
        let scoring = Scoring { scale: 1.0, softcap: 0.0 };
        // exp: 1, 3 and the sink's 4.
        let (weights, lse) = attend(&[1.0], &keys, scoring, Some(4f64.ln()), |_| Some(0.0));
        assert!((weights[0] - 0.125).abs() < 1e-12 && (weights[1] - 0.375).abs() < 1e-12);
        assert!((lse - 4f64.ln()).abs() < 1e-12);
        assert_eq!(attend(&[1.0], &keys, scoring, Some(0.0), |_| None).0, [0.0, 0.0]);
    }

    #[test]
    fn rows_without_weight_take_no_part() {
        let values = Matrix::gather(2, 1, |r, _| if r == 0 { f64::NAN } else { 4.0 });
        assert_eq!(weighted_sum(&[0.0, 0.5], &values), [2.0]);
    }
}
