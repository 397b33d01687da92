//! Functions of float32 numbers beside those of [`crate::simd::exp`], without branches or calls, so that the compiler computes many
//! at once.

use crate::simd::exp::{exp, sum};

/// The natural logarithm, to about 2 units in the last place.
/// x = 2^e m with √½ ≤ m < √2, and ln m = 2 artanh(s) = 2 (s + s³/3 + s⁵/5 + …) with s = (m - 1) / (m + 1), |s| < 0.172.
#[inline(always)]
pub fn ln<const FUSED: bool>(x: f32) -> f32 {
    /// ln 2 in two parts, the first of few digits: e times it is exact.
    const LN_2: (f32, f32) = (0.693_359_4, -2.121_944_4e-4);
    /// 2^24, which makes a denormal number a normal one.
    const UP: f32 = 16_777_216.0;
    let small = x < f32::MIN_POSITIVE;
    let bits = (if small { x * UP } else { x }).to_bits();
    // The exponent of x / √½, so that m begins at √½.
    let shifted = bits.wrapping_sub(std::f32::consts::FRAC_1_SQRT_2.to_bits());
    let e = (shifted as i32 >> 23) - if small { 24 } else { 0 };
    let m = f32::from_bits((shifted & 0x7f_ffff) + std::f32::consts::FRAC_1_SQRT_2.to_bits());
    let f = m - 1.0;
    let s = f / (m + 1.0);
    let z = s * s;
    let odd = sum::<FUSED>(sum::<FUSED>(sum::<FUSED>(z, 2.0 / 9.0, 2.0 / 7.0), z, 2.0 / 5.0), z, 2.0 / 3.0) * z;
    // ln m = f - s (f - R) with R = 2 (ln m / 2s - 1): f is exact, and the rest is small beside it.
    let e = e as f32;
    let small_part = sum::<FUSED>(e, LN_2.1, -s * (f - odd));
    let found = sum::<FUSED>(e, LN_2.0, f + small_part);
    if x > 0.0 {
        if x == f32::INFINITY { x } else { found }
    } else if x == 0.0 {
        f32::NEG_INFINITY
    } else {
        f32::NAN
    }
}

/// Beyond it, sine and cosine are not computed here: x · 2/π is no longer exact enough.
pub const LARGEST_ANGLE: f32 = 1.0e6;

/// Sine, and cosine where `COSINE`, of |x| ≤ [`LARGEST_ANGLE`], to about 2 units in the last place.
/// x = n π/2 + r with |r| ≤ π/4, computed as float64, where r loses nothing; then the series of r.
#[inline(always)]
pub fn sine<const FUSED: bool, const COSINE: bool>(x: f32) -> f32 {
    /// Added to a number below 2^51, it leaves the nearest integer in the lowest bits.
    const INTEGERS: f64 = 6_755_399_441_055_744.0;
    let wide = f64::from(x);
    let shifted = wide * std::f64::consts::FRAC_2_PI + INTEGERS;
    let n = shifted - INTEGERS;
    let r = (wide - n * std::f64::consts::FRAC_PI_2) as f32;
    let quarter = (shifted.to_bits() as u32).wrapping_add(u32::from(COSINE));
    let z = r * r;
    const SINE: [f32; 4] = [-1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0, 0.0];
    const COSINES: [f32; 4] = [-1.0 / 720.0, 1.0 / 24.0, -0.5, 1.0];
    let series = |first: f32, of: [f32; 4]| of.into_iter().fold(first, |found, next| sum::<FUSED>(found, z, next));
    // sin r = r + r (z (…)); cos r = 1 - z/2 + ….
    let sine = sum::<FUSED>(series(1.0 / 362_880.0, SINE), r, r);
    let cosine = series(1.0 / 40_320.0, COSINES);
    let found = if quarter & 1 == 0 { sine } else { cosine };
    f32::from_bits(found.to_bits() ^ (quarter & 2) << 30)
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid<const FUSED: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FUSED>(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Units in the last place of `wanted` that `got` is off.
    fn off(got: f32, wanted: f64) -> f64 {
        let unit =
            f64::from(f32::from_bits((wanted as f32).abs().to_bits().max(1) + 1)) - f64::from((wanted as f32).abs());
        (f64::from(got) - wanted).abs() / unit
    }

    #[test]
    fn logarithms_are_right_to_the_last_places() {
        // Every exponent, and mantissas around 1 and √2.
        for bits in (1u32..0x7f80_0000).step_by(4099).chain(0x3f7f_0000..0x3f81_0000).chain(0x3fb5_0000..0x3fb5_1000) {
            let x = f32::from_bits(bits);
            for got in [ln::<false>(x), ln::<true>(x)] {
                assert!(off(got, f64::from(x).ln()) <= 2.5, "{x:e}: {got:e} {:e}", f64::from(x).ln());
            }
        }
        assert_eq!([ln::<true>(0.0), ln::<true>(-0.0)], [f32::NEG_INFINITY; 2]);
        assert_eq!((ln::<true>(f32::INFINITY), ln::<false>(1.0)), (f32::INFINITY, 0.0));
        assert!([-1.0, f32::NEG_INFINITY, f32::NAN].into_iter().all(|x| ln::<true>(x).is_nan()));
    }

    #[test]
    fn sines_and_cosines_are_right_to_the_last_places() {
        for i in -400_000..=400_000 {
            for x in [i as f32 * 1e-4, i as f32 * 2.5, i as f32 * 1e-9] {
                for (got, wanted) in [
                    (sine::<false, false>(x), f64::from(x).sin()),
                    (sine::<true, false>(x), f64::from(x).sin()),
                    (sine::<false, true>(x), f64::from(x).cos()),
                    (sine::<true, true>(x), f64::from(x).cos()),
                ] {
                    assert!(
                        off(got, wanted) <= 2.5 || (f64::from(got) - wanted).abs() < 1e-9,
                        "{x:e}: {got:e} {wanted:e}"
                    );
                }
            }
        }
        assert!([f32::INFINITY, f32::NAN].into_iter().all(|x| sine::<true, true>(x).is_nan()));
    }
}
