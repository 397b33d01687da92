//! Numbers, and how people read them.

/// The geometric mean; `None` of nothing.
pub(crate) fn geomean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (sum, n) = values.into_iter().fold((0.0, 0u32), |(sum, n), value: f64| (sum + value.ln(), n + 1));
    (n > 0).then(|| (sum / f64::from(n)).exp())
}

/// The middle value; `None` of nothing.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[half]),
        _ => Some((values[half - 1] + values[half]) / 2.0),
    }
}

/// A positive number with three significant digits, and no more than it has.
pub(crate) fn digits(value: f64) -> String {
    let magnitude = value.abs();
    match magnitude {
        m if !m.is_finite() => "–".to_owned(),
        m if m >= 1e15 => format!("{value:.2e}"),
        m if m >= 99.95 => format!("{value:.0}"),
        m if m >= 9.995 => format!("{value:.1}"),
        m if m >= 0.0995 || m == 0.0 => format!("{value:.2}"),
        m if m >= 0.000_995 => format!("{value:.4}"),
        _ => format!("{value:.1e}"),
    }
}

/// A time in microseconds, in the unit that keeps it short.
pub(crate) fn time(us: f64) -> String {
    let (scale, unit) = match us.abs() {
        t if t >= 999_500.0 => (1e6, "s"),
        t if t >= 999.5 => (1e3, "ms"),
        t if t >= 0.0995 || t == 0.0 => (1.0, "µs"),
        _ => (1e-3, "ns"),
    };
    format!("{} {unit}", digits(us / scale))
}

/// A round time, for an axis: without digits it does not need.
pub(crate) fn tick(us: f64) -> String {
    if us == 0.0 {
        return "0".to_owned();
    }
    let text = time(us);
    let Some((number, unit)) = text.split_once(' ') else { return text };
    let number = if number.contains('.') && !number.contains('e') {
        number.trim_end_matches('0').trim_end_matches('.')
    } else {
        number
    };
    format!("{number} {unit}")
}

/// A ratio: `1.84×`.
pub(crate) fn ratio(value: f64) -> String {
    match value {
        v if v > 0.0 && v < 0.001 => "<0.001×".to_owned(),
        v if v > 0.0 && v < 0.0995 => format!("{v:.3}×"),
        v => format!("{}×", digits(v)),
    }
}

/// A ratio close to one, where the second decimal is not enough: `1.004×`.
pub(crate) fn fine_ratio(value: f64) -> String {
    if (0.9..1.0995).contains(&value) { format!("{value:.3}×") } else { ratio(value) }
}

/// A part of a whole: `71 %`.
pub(crate) fn percent(part: f64) -> String {
    if part > 0.0 && part < 0.005 { "< 1 %".to_owned() } else { format!("{:.0} %", part * 100.0) }
}

/// A dtype's name as people abbreviate it: `bf16`.
pub(crate) fn short(dtype: &str) -> &str {
    match dtype {
        "bfloat16" => "bf16",
        "float16" => "fp16",
        "float32" => "fp32",
        "float64" => "fp64",
        other => other,
    }
}

/// `1 call`, `2 calls`.
pub(crate) fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// A moment, in UTC: `2026-03-01 12:34`.
pub(crate) fn moment(unix_ms: i64) -> String {
    let minutes = unix_ms.div_euclid(60_000);
    let (days, minute) = (minutes.div_euclid(1440), minutes.rem_euclid(1440));
    // Howard Hinnant's civil_from_days: years begin in March, so that leap days come last.
    let z = days + 719_468;
    let (era, doe) = (z.div_euclid(146_097), z.rem_euclid(146_097));
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}", minute / 60, minute % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits_and_a_unit_that_fits() {
        let texts = [
            (0.0123, "12.3 ns"),
            (0.5, "0.50 µs"),
            (1.0, "1.00 µs"),
            (12.345, "12.3 µs"),
            (99.96, "100 µs"),
            (999.6, "1.00 ms"),
            (123_456.0, "123 ms"),
            (1e7, "10.0 s"),
            (0.0, "0.00 µs"),
        ];
        for (us, text) in texts {
            assert_eq!(time(us), text, "{us}");
        }
        assert_eq!((tick(20.0), tick(2500.0), tick(100.0)), ("20 µs".into(), "2.5 ms".into(), "100 µs".into()));
    }

    #[test]
    fn moments_are_those_of_the_calendar() {
        let moments = [
            (0, "1970-01-01 00:00"),
            (951_826_500_000, "2000-02-29 12:15"),
            (1_772_368_440_000, "2026-03-01 12:34"),
            (-60_000, "1969-12-31 23:59"),
        ];
        for (ms, text) in moments {
            assert_eq!(moment(ms), text);
        }
    }

    #[test]
    fn means_are_means() {
        assert_eq!(geomean([]), None);
        assert!((geomean([1.0, 4.0, 2.0]).unwrap() - 2.0).abs() < 1e-12);
        assert_eq!((median([]), median([3.0]), median([4.0, 1.0, 2.0, 3.0])), (None, Some(3.0), Some(2.5)));
    }
}
