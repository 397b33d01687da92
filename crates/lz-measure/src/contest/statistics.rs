//! Medians, deviations and the normal distribution.

/// The middle of the values; the mean of the two in the middle for an even number. `None` without values.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    median_of(&mut values.to_vec())
}

/// The same, in the place of the values, which are in another order then.
pub(crate) fn median_of(values: &mut [f64]) -> Option<f64> {
    let middle = values.len() / 2;
    if values.is_empty() {
        return None;
    }
    let even = values.len().is_multiple_of(2);
    let (below, &mut above, _) = values.select_nth_unstable_by(middle, f64::total_cmp);
    if !even {
        return Some(above);
    }
    let below = below.iter().copied().max_by(f64::total_cmp)?;
    Some(below + (above - below) / 2.0)
}

/// The value below which a share of the values lies, between neighbours in proportion. `None` without values.
pub(crate) fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let place = share * sorted.len().checked_sub(1)? as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    Some(below + (above - below) * place.fract())
}

/// How far the values are from `center`: the 70th percentile of the distances, scaled so that it is the standard deviation
/// of normal noise. Three in ten may be outliers; the median of the distances would bear more, but of few values it is
/// too often next to nothing.
pub(crate) fn deviation(values: &[f64], center: f64) -> Option<f64> {
    let distances: Vec<f64> = values.iter().map(|v| (v - center).abs()).collect();
    quantile(&distances, 0.7).map(|d| d / 1.0364)
}

/// The variance of a sample; 0 for fewer than two values.
pub(crate) fn variance(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (values.len() - 1) as f64
}

/// The probability that a standard normal variable is at most `x`, to about 1e-7 (Abramowitz and Stegun 26.2.17).
pub(crate) fn normal_cdf(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.2316419 * x.abs());
    let poly = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))));
    let tail = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt() * poly;
    if x >= 0.0 { 1.0 - tail } else { tail }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_samples_by_hand() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(quantile(&[0.0, 10.0, 20.0, 30.0, 40.0], 0.95), Some(38.0));
        assert_eq!(quantile(&[7.0], 0.95), Some(7.0));
        assert_eq!(deviation(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 99.0, 99.0], 5.0), Some(4.0 / 1.0364));
        assert_eq!(variance(&[1.0, 2.0, 3.0, 4.0]), 5.0 / 3.0);
        assert_eq!(variance(&[5.0]), 0.0);
    }

    #[test]
    fn the_normal_distribution_has_its_known_values() {
        // Tables to nine digits.
        for (x, p) in [(0.0, 0.5), (1.0, 0.841344746), (1.96, 0.975002105), (-2.575829304, 0.005), (6.0, 0.999999999)] {
            assert!((normal_cdf(x) - p).abs() < 2e-7, "{x}: {}", normal_cdf(x));
        }
    }
}
