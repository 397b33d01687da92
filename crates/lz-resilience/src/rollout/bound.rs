//! What can be said of a rate after so many samples.

/// One-sided 99%. A rate is looked at after every sample, not once, so 95% would call noise a fault far too often.
const Z: f64 = 2.326;

/// The rate that is exceeded with 99% confidence after `hits` in `samples` (Wilson's lower bound).
pub(crate) fn at_least(hits: u64, samples: u64) -> f64 {
    if hits == 0 || samples == 0 {
        return 0.0;
    }
    let n = samples as f64;
    let p = (hits as f64 / n).min(1.0);
    let z2 = Z * Z;
    let spread = Z * (p * (1.0 - p) / n + z2 / (4.0 * n * n)).sqrt();
    ((p + z2 / (2.0 * n) - spread) / (1.0 + z2 / n)).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_wilsons() {
        // Against scipy.stats.norm.ppf(0.99) ≈ 2.326 in Wilson's formula.
        assert!((at_least(3, 50) - 0.017_36).abs() < 5e-4, "{}", at_least(3, 50));
        assert!((at_least(50, 50) - 50.0 / (50.0 + Z * Z)).abs() < 1e-12);
        assert!((0..10_000).all(|samples| at_least(0, samples) == 0.0), "not even by rounding");
    }

    #[test]
    fn it_stays_below_the_rate_and_grows_with_hits_and_samples() {
        for n in 1..200 {
            for k in 1..=n {
                let bound = at_least(k, n);
                assert!(bound > 0.0 && bound < k as f64 / n as f64, "{k} of {n}: {bound}");
                assert!(bound > at_least(k - 1, n), "{k} of {n}");
                assert!(at_least(2 * k, 2 * n) > bound, "{k} of {n}");
            }
        }
    }
}
