//! Functions of float32 numbers without branches or calls, so that the compiler computes many at once.
//!
//! `FUSED` is as of [`super::Isa`].

/// a · b + c.
#[inline(always)]
pub fn sum<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// e^x to about 2 units in the last place.
/// x = n ln 2 + r with an integer n and |r| ≤ ln 2 / 2: e^x = 2^n e^r, and e^r by its series up to r^7. Below -87 it is
/// e^-87, and above 88.72, where float32 ends, infinity.
#[inline(always)]
pub fn exp<const FUSED: bool>(x: f32) -> f32 {
    /// Added to a number below 2^22, it leaves the nearest integer in the lowest bits.
    const INTEGERS: f32 = 12_582_912.0;
    /// ln 2 in two parts, the first of few digits: n times it is exact.
    const LN_2: (f32, f32) = (0.693_359_4, -2.121_944_4e-4);
    /// ln of the largest float32, rounded down.
    const LARGEST: f32 = 88.722_83;
    let within = if x.is_nan() { x } else { x.clamp(-87.0, LARGEST) };
    let shifted = sum::<FUSED>(within, std::f32::consts::LOG2_E, INTEGERS);
    let n = shifted - INTEGERS;
    let r = sum::<FUSED>(n, -LN_2.1, sum::<FUSED>(n, -LN_2.0, within));
    const FACTORIALS: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0, 1.0, 1.0];
    let series = FACTORIALS.into_iter().fold(1.0 / 5040.0, |series, factor| sum::<FUSED>(series, r, factor));
    // 2^n by halves: n may be 128, and 2^128 is no float32.
    let n = shifted.to_bits().wrapping_sub(INTEGERS.to_bits());
    let half = (n as i32 >> 1) as u32;
    let power = |n: u32| f32::from_bits(n.wrapping_add(127) << 23);
    if x > LARGEST { f32::INFINITY } else { series * power(half) * power(n.wrapping_sub(half)) }
}

/// 2^r for |r| ≤ 1/2, highest power first, for [`super::vector::Sixteen::exp2`]: a minimax fit, off by 2e-9 of the result beside
/// what rounding adds.
pub const TWO_TO: [f32; 7] =
    [1.534_581_1e-4, 1.339_993_1e-3, 9.618_489e-3, 5.550_328_6e-2, 2.402_264_6e-1, std::f32::consts::LN_2, 1.0];

/// The same, off by 2.6e-6 of the result: for weights that become bfloat16, which has steps of 3.9e-3.
pub const TWO_TO_SHORT: [f32; 5] = [9.570_101e-3, 5.591_786e-2, 2.402_474_4e-1, 6.931_218e-1, 9.999_993e-1];

/// The error function, to about 2e-7: x times a polynomial of x^2, a Chebyshev fit up to the point where float32 rounds the
/// function to 1. Beyond it, it is exactly 1. A quotient of shorter polynomials is as exact, but dividing takes longer than they do.
#[inline(always)]
pub fn erf<const FUSED: bool>(x: f32) -> f32 {
    /// Beyond it the function is 1 to the last digit of float32. At this number the polynomial is, with and without `FUSED`.
    const END: f32 = 3.833_222_2;
    /// x^2 becomes a number from -1 to 1.
    const TO_ONE: f32 = 0.136_164_57;
    const FIT: [f32; 16] = [
        -6.099_033e-4,
        1.437_705_8e-3,
        -9.220_962_5e-4,
        1.734_725_7e-3,
        -6.442_662e-3,
        1.170_793_1e-2,
        -1.732_961e-2,
        2.710_911_3e-2,
        -4.074_57e-2,
        5.615_341_7e-2,
        -7.288_428e-2,
        9.080_413e-2,
        -1.106_781_4e-1,
        1.367_474_4e-1,
        -1.841_142_8e-1,
        3.689_580_3e-1,
    ];
    // Not `clamp`: a NaN stays one without a further instruction.
    let x = if x > END { END } else { x };
    let x = if x < -END { -END } else { x };
    let place = sum::<FUSED>(x * x, TO_ONE, -1.0);
    x * FIT[1..].iter().fold(FIT[0], |found, &next| sum::<FUSED>(found, place, next))
}

/// The hyperbolic tangent, to about 4 units in the last place: x P(x^2) / Q(x^2), a minimax fit up to the point where
/// float32 rounds it to 1.
#[inline(always)]
pub fn tanh<const FUSED: bool>(x: f32) -> f32 {
    /// Beyond it the function is 1 to the last digit of float32.
    const END: f32 = 9.0;
    const P: [f32; 7] = [
        -2.760_768_5e-16,
        2.000_188e-13,
        -8.604_672e-11,
        5.122_297_1e-8,
        1.485_722_4e-5,
        6.372_619_3e-4,
        4.893_524_6e-3,
    ];
    const Q: [f32; 4] = [1.198_258_4e-6, 1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3];
    let square = x * x;
    let polynomial = |of: &[f32]| of.iter().fold(0.0, |found, &next| sum::<FUSED>(found, square, next));
    let found = x * polynomial(&P) / polynomial(&Q);
    if x.abs() > END || found.abs() > 1.0 { 1f32.copysign(x) } else { found }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_e_are_right_to_the_last_places() {
        for i in -870_000..=887_228 {
            let x = i as f32 * 1e-4;
            let wanted = f64::from(x).exp();
            for got in [exp::<false>(x), exp::<true>(x)].map(f64::from) {
                assert!((got - wanted).abs() <= 2.5e-7 * wanted, "{x}: {got} {wanted}");
            }
        }
        assert!(exp::<true>(f32::NAN).is_nan() && exp::<false>(f32::NAN).is_nan());
        assert!(exp::<true>(-1e30) < 2e-38 && exp::<true>(f32::INFINITY) == f32::INFINITY);
    }

    #[test]
    fn the_error_function_is_right_to_the_last_places() {
        for i in -60_000..=60_000 {
            let x = i as f32 * 1e-4;
            let wanted = libm::erf(f64::from(x));
            for got in [erf::<false>(x), erf::<true>(x)].map(f64::from) {
                assert!((got - wanted).abs() <= 3e-7, "{x}: {got} {wanted}");
            }
        }
        for x in [3.833_222_2, 4.0, 1e9, f32::INFINITY] {
            assert_eq!([erf::<true>(x), erf::<false>(x), erf::<true>(-x), erf::<false>(-x)], [1.0, 1.0, -1.0, -1.0]);
        }
        assert!(erf::<true>(f32::NAN).is_nan() && erf::<false>(f32::NAN).is_nan());
    }

    #[test]
    fn the_hyperbolic_tangent_is_right_to_the_last_places() {
        for i in -100_000..=100_000 {
            let x = i as f32 * 1e-4;
            let wanted = f64::from(x).tanh();
            for got in [tanh::<false>(x), tanh::<true>(x)].map(f64::from) {
                assert!((got - wanted).abs() <= 5e-7 * wanted.abs(), "{x}: {got} {wanted}");
            }
        }
        assert_eq!((tanh::<true>(f32::INFINITY), tanh::<false>(-3e38)), (1.0, -1.0));
        assert!(tanh::<true>(f32::NAN).is_nan());
    }
}
