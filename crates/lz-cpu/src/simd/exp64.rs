//! Powers of e as float64, without branches or calls, so that the compiler computes many at once.

/// 1 / n! for n from 11 down to 0.
const FACTORIALS: [f64; 12] = [
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    1.0 / 2.0,
    1.0,
    1.0,
];

/// e^x for x ≤ 0, to about 1e-14 of it. Below -700 it is e^-700.
/// `FUSED` is as of [`super::Isa`].
#[inline(always)]
pub fn exp<const FUSED: bool>(x: f64) -> f64 {
    by_series::<FUSED, _>(if x < -700.0 { -700.0 } else { x }, &[])
}

/// e^x for x ≤ 0, to about 3e-16 of it. Below -700 it is 0.
#[inline(always)]
pub fn exactly<const FUSED: bool>(x: f64) -> f64 {
    let found =
        by_series::<FUSED, _>(if x < -700.0 { -700.0 } else { x }, &[1.0 / 6_227_020_800.0, 1.0 / 479_001_600.0]);
    if x < -700.0 { 0.0 } else { found }
}

/// x = n ln 2 + r with an integer n and |r| ≤ ln 2 / 2: e^x = 2^n e^r, and e^r by its series up to r^11, with `N` more terms.
#[inline(always)]
fn by_series<const FUSED: bool, const N: usize>(x: f64, more: &[f64; N]) -> f64 {
    /// Added to a number below 2^51, it leaves the nearest integer in the lowest bits.
    const INTEGERS: f64 = 6_755_399_441_055_744.0;
    /// ln 2 in two parts, the first with 21 zeros at its end: n times it is exact.
    const LN_2: (f64, f64) = (0.693_147_180_369_123_8, 1.908_214_929_270_587_7e-10);
    let sum = |a: f64, b: f64, c: f64| if FUSED { a.mul_add(b, c) } else { a * b + c };
    let shifted = sum(x, std::f64::consts::LOG2_E, INTEGERS);
    let n = shifted - INTEGERS;
    let r = sum(n, -LN_2.1, sum(n, -LN_2.0, x));
    let mut series = 0.0;
    for factor in more {
        series = sum(series, r, *factor);
    }
    for factor in FACTORIALS {
        series = sum(series, r, factor);
    }
    let n = shifted.to_bits().wrapping_sub(INTEGERS.to_bits());
    series * f64::from_bits(n.wrapping_add(1023) << 52)
}

#[cfg(test)]
mod tests {
    use super::{exactly, exp};

    #[test]
    fn powers_of_e_are_right_to_fourteen_digits() {
        for i in 0..=700_000 {
            let x = f64::from(i) * -1e-3;
            for got in [exp::<false>(x), exp::<true>(x)] {
                assert!((got - x.exp()).abs() <= 3e-14 * x.exp(), "{x}: {got} {}", x.exp());
            }
            for got in [exactly::<false>(x), exactly::<true>(x)] {
                assert!((got - x.exp()).abs() <= 6e-16 * x.exp(), "{x}: {got} {}", x.exp());
            }
        }
        assert_eq!((exactly::<true>(0.0), exactly::<true>(f64::NEG_INFINITY)), (1.0, 0.0));
        assert!(exactly::<true>(f64::NAN).is_nan() && exactly::<false>(f64::NAN).is_nan());
        assert_eq!((exp::<true>(0.0), exp::<false>(0.0)), (1.0, 1.0));
        assert!(exp::<true>(f64::NEG_INFINITY) > 0.0 && exp::<true>(-1e300) < 1e-303);
    }
}
