//! From times to places along an axis.

/// Times that differ by more than this are drawn on a logarithmic axis.
const LOG_FROM: f64 = 20.0;

/// An axis from its left end, 0 %, to its right, 100 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scale {
    /// From zero.
    Linear { max: f64 },
    /// Between two times.
    Log { low: f64, high: f64 },
}

impl Scale {
    /// The axis for bars as long as `times` that also shows `others` (ends of whiskers, a floor). All are positive.
    pub fn of(times: &[f64], others: &[f64]) -> Scale {
        let (least, most) = times.iter().fold((f64::INFINITY, 0.0_f64), |(l, m), t| (l.min(*t), m.max(*t)));
        let (first, last) = others.iter().fold((least, most), |(l, m), t| (l.min(*t), m.max(*t)));
        if most > least * LOG_FROM {
            // The shortest bar is still a bar; a floor far below it is at the left end.
            return Scale::Log { low: first.max(least * 1e-3) * 0.7, high: last * 1.1 };
        }
        Scale::Linear { max: if last > 0.0 { last * 1.02 } else { 1.0 } }
    }

    /// Whether it is logarithmic.
    pub fn is_log(self) -> bool {
        matches!(self, Scale::Log { .. })
    }

    /// Where a time is, in percent of the axis.
    pub fn at(self, us: f64) -> f64 {
        let part = match self {
            Scale::Linear { max } => us / max,
            Scale::Log { low, high } => (us / low).ln() / (high / low).ln(),
        };
        if part.is_nan() { 0.0 } else { part.clamp(0.0, 1.0) * 100.0 }
    }

    /// Round times along it: few enough to be written side by side.
    pub fn ticks(self) -> Vec<f64> {
        match self {
            Scale::Linear { max } => {
                let step = nice(max / 3.0);
                (0..7).map(|i| f64::from(i) * step).take_while(|t| *t <= max).collect()
            }
            Scale::Log { low, high } => {
                let (first, last) = (low.log10().ceil() as i32, high.log10().floor() as i32);
                if last - first < 2 {
                    let steps = (first - 1..=last).flat_map(|e| [1.0, 3.0].map(|m| m * 10f64.powi(e)));
                    return steps.filter(|t| (low..=high).contains(t)).collect();
                }
                let every = ((last - first + 2) / 3).max(1);
                (first..=last).step_by(every as usize).map(|e| 10f64.powi(e)).collect()
            }
        }
    }
}

/// The next of 1, 2, 2.5 and 5 times a power of ten.
fn nice(value: f64) -> f64 {
    if !value.is_normal() || value < 0.0 {
        return 1.0;
    }
    let unit = 10f64.powf(value.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0].map(|m| m * unit).into_iter().find(|step| *step >= value).unwrap_or(10.0 * unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn axes_are_logarithmic_when_times_are_far_apart() {
        assert_eq!(Scale::of(&[10.0, 100.0], &[]), Scale::Linear { max: 102.0 });
        assert_eq!(Scale::of(&[1.0, 10.0], &[0.001]), Scale::Linear { max: 10.2 });
        assert_eq!(Scale::of(&[4.0, 100.0], &[2.0]), Scale::Log { low: 1.4, high: 110.00000000000001 });
        assert_eq!(Scale::of(&[4.0, 100.0], &[2.0]).ticks(), [3.0, 10.0, 30.0, 100.0]);
        assert_eq!(Scale::of(&[10.0, 100.0], &[]).ticks(), [0.0, 50.0, 100.0]);
        assert_eq!(Scale::of(&[0.5, 1e7], &[]).ticks(), [1.0, 1e3, 1e6]);
    }

    proptest! {
        #[test]
        fn every_time_is_on_the_axis_in_order(
            times in prop::collection::vec(-8.0..9.0f64, 1..12),
            others in prop::collection::vec(-8.0..9.0f64, 0..4),
        ) {
            let times: Vec<f64> = times.into_iter().map(|e| 10f64.powf(e)).collect();
            let others: Vec<f64> = others.into_iter().map(|e| 10f64.powf(e)).collect();
            let scale = Scale::of(&times, &others);
            let mut sorted = times.clone();
            sorted.sort_by(f64::total_cmp);
            let places: Vec<f64> = sorted.iter().map(|t| scale.at(*t)).collect();
            prop_assert!(places.windows(2).all(|w| w[0] <= w[1]));
            // Distinguishable times have distinguishable bars, all of them visible and none cut off.
            prop_assert!(places[0] > 0.0 && *places.last().unwrap() < 100.0, "{scale:?} {places:?}");
            let ticks = scale.ticks();
            prop_assert!((1..=5).contains(&ticks.len()), "{ticks:?}");
            prop_assert!(ticks.windows(2).all(|w| w[0] < w[1]));
        }
    }
}
