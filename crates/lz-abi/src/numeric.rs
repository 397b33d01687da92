//! Bits to numbers and back, for every dtype. Clear rather than fast: references use it.

use half::{bf16, f16};

use crate::dtype::DType;

/// A small float format without a hardware type.
struct Mini {
    exponent_bits: u32,
    mantissa_bits: u32,
    bias: i32,
    /// The largest finite value.
    max: f64,
    /// Whether the format has infinities (and the usual NaN space).
    has_inf: bool,
    /// Whether the format can hold a NaN at all.
    has_nan: bool,
}

const E4M3: Mini = Mini { exponent_bits: 4, mantissa_bits: 3, bias: 7, max: 448.0, has_inf: false, has_nan: true };
const E5M2: Mini = Mini { exponent_bits: 5, mantissa_bits: 2, bias: 15, max: 57_344.0, has_inf: true, has_nan: true };
const E2M1: Mini = Mini { exponent_bits: 2, mantissa_bits: 1, bias: 1, max: 6.0, has_inf: false, has_nan: false };

impl Mini {
    fn bits(&self) -> u32 {
        1 + self.exponent_bits + self.mantissa_bits
    }

    fn decode(&self, code: u8) -> f64 {
        let magnitude = u32::from(code) & ((1 << (self.bits() - 1)) - 1);
        let sign = if u32::from(code) >> (self.bits() - 1) & 1 == 1 { -1.0 } else { 1.0 };
        let exponent = (magnitude >> self.mantissa_bits) as i32;
        let mantissa = f64::from(magnitude & ((1 << self.mantissa_bits) - 1)) / f64::from(1u32 << self.mantissa_bits);
        let all_ones = (1 << self.exponent_bits) - 1;
        if self.has_inf && exponent == all_ones {
            return if mantissa == 0.0 { sign * f64::INFINITY } else { f64::NAN };
        }
        if self.has_nan && !self.has_inf && magnitude == (1 << (self.bits() - 1)) - 1 {
            return f64::NAN;
        }
        let value = match exponent {
            0 => mantissa * f64::from(1 - self.bias).exp2(),
            e => (1.0 + mantissa) * f64::from(e - self.bias).exp2(),
        };
        sign * value
    }

    /// Nearest code, half to even. Values beyond the largest saturate, except that a format with
    /// infinities keeps them, and a NaN stays one where the format has it.
    fn encode(&self, value: f64) -> u8 {
        let sign = u8::from(value.is_sign_negative()) << (self.bits() - 1);
        let top = ((1u32 << (self.bits() - 1)) - 1) as u8;
        if value.is_nan() {
            return if self.has_nan { sign | top } else { sign };
        }
        if value.is_infinite() && self.has_inf {
            return sign | top & !((1 << self.mantissa_bits) - 1);
        }
        // Codes of positive finite values ascend with the value: search the two neighbours.
        let wanted = value.abs().min(self.max);
        let finite = (0..=top).take_while(|&c| self.decode(c).is_finite()).last().unwrap_or(0);
        let below = (0..=finite).rev().find(|&c| self.decode(c) <= wanted).unwrap_or(0);
        let above = finite.min(below + 1);
        let (low, high) = (wanted - self.decode(below), self.decode(above) - wanted);
        let nearest = if high < low || (high == low && below % 2 == 1) { above } else { below };
        sign | nearest
    }
}

fn mini(dtype: DType) -> Option<&'static Mini> {
    match dtype {
        DType::F8E4M3 => Some(&E4M3),
        DType::F8E5M2 => Some(&E5M2),
        DType::MxFp4 | DType::NvFp4 => Some(&E2M1),
        _ => None,
    }
}

/// The largest finite value of a dtype, as quantization uses it.
pub fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::I8 => 127.0,
        DType::I4 => 7.0,
        DType::U8 => 255.0,
        DType::I16 => f64::from(i16::MAX),
        DType::I32 => f64::from(i32::MAX),
        DType::I64 => i64::MAX as f64,
        DType::Bool => 1.0,
        DType::F16 => f16::MAX.to_f64(),
        DType::Bf16 => bf16::MAX.to_f64(),
        DType::F32 | DType::Tf32 => f64::from(f32::MAX),
        DType::F64 => f64::MAX,
        DType::F8E4M3 | DType::F8E5M2 | DType::MxFp4 | DType::NvFp4 => mini(dtype).map_or(0.0, |m| m.max),
    }
}

/// The smallest value of a dtype (not the smallest positive one).
pub fn lowest(dtype: DType) -> f64 {
    match dtype {
        DType::U8 | DType::Bool => 0.0,
        DType::I8 | DType::I4 | DType::I16 | DType::I32 | DType::I64 => -largest(dtype) - 1.0,
        _ => -largest(dtype),
    }
}

/// `value` as the dtype would store it.
pub fn rounded(dtype: DType, value: f64) -> f64 {
    let mut bytes = [0; 8];
    store(dtype, &mut bytes, 0, value);
    load(dtype, &bytes, 0)
}

/// Element `index` of a buffer of `dtype`. Panics when the buffer is too short.
pub fn load(dtype: DType, bytes: &[u8], index: usize) -> f64 {
    fn at<const N: usize>(bytes: &[u8], index: usize) -> [u8; N] {
        bytes[index * N..(index + 1) * N].try_into().expect("a slice of N bytes")
    }
    match dtype {
        DType::F64 => f64::from_le_bytes(at(bytes, index)),
        DType::F32 | DType::Tf32 => f64::from(f32::from_le_bytes(at(bytes, index))),
        DType::F16 => f16::from_le_bytes(at(bytes, index)).to_f64(),
        DType::Bf16 => bf16::from_le_bytes(at(bytes, index)).to_f64(),
        DType::F8E4M3 | DType::F8E5M2 => mini(dtype).expect("an 8-bit float").decode(bytes[index]),
        DType::MxFp4 | DType::NvFp4 => E2M1.decode(nibble(bytes, index)),
        DType::I4 => f64::from(((nibble(bytes, index) << 4) as i8) >> 4),
        DType::I8 => f64::from(bytes[index] as i8),
        DType::U8 => f64::from(bytes[index]),
        DType::Bool => f64::from(u8::from(bytes[index] != 0)),
        DType::I64 | DType::I32 | DType::I16 => load_int(dtype, bytes, index) as f64,
    }
}

/// Element `index` as an integer: exact for every integer dtype, truncated for floats.
pub fn load_int(dtype: DType, bytes: &[u8], index: usize) -> i64 {
    match dtype {
        DType::I64 => i64::from_le_bytes(bytes[index * 8..index * 8 + 8].try_into().expect("eight bytes")),
        DType::I32 => i64::from(i32::from_le_bytes(bytes[index * 4..index * 4 + 4].try_into().expect("four bytes"))),
        DType::I16 => i64::from(i16::from_le_bytes(bytes[index * 2..index * 2 + 2].try_into().expect("two bytes"))),
        _ => load(dtype, bytes, index) as i64,
    }
}

/// Stores `value` as element `index`, rounded to nearest, half to even; integers saturate.
pub fn store(dtype: DType, bytes: &mut [u8], index: usize, value: f64) {
    match dtype {
        DType::F64 => put(bytes, index, value.to_le_bytes()),
        DType::F32 | DType::Tf32 => put(bytes, index, (value as f32).to_le_bytes()),
        DType::F16 => put(bytes, index, f16::from_f64(to_precision(value, 10, -14)).to_le_bytes()),
        DType::Bf16 => put(bytes, index, bf16::from_f64(to_precision(value, 7, -126)).to_le_bytes()),
        DType::F8E4M3 | DType::F8E5M2 => bytes[index] = mini(dtype).expect("an 8-bit float").encode(value),
        DType::MxFp4 | DType::NvFp4 => put_nibble(bytes, index, E2M1.encode(value)),
        DType::I4 => put_nibble(bytes, index, value.round_ties_even().clamp(-8.0, 7.0) as i8 as u8),
        DType::I8 => bytes[index] = value.round_ties_even() as i8 as u8,
        DType::U8 => bytes[index] = value.round_ties_even() as u8,
        DType::Bool => bytes[index] = u8::from(value != 0.0),
        DType::I64 => put(bytes, index, (value.round_ties_even() as i64).to_le_bytes()),
        DType::I32 => put(bytes, index, (value.round_ties_even() as i32).to_le_bytes()),
        DType::I16 => put(bytes, index, (value.round_ties_even() as i16).to_le_bytes()),
    }
}

/// Stores an integer as element `index`: the lowest bits for integer types, whether it is not 0 for truth values, rounded for floats.
pub fn store_int(dtype: DType, bytes: &mut [u8], index: usize, value: i64) {
    match dtype {
        DType::I64 => put(bytes, index, value.to_le_bytes()),
        DType::I32 => put(bytes, index, (value as i32).to_le_bytes()),
        DType::I16 => put(bytes, index, (value as i16).to_le_bytes()),
        DType::I8 | DType::U8 => bytes[index] = value as u8,
        DType::I4 => put_nibble(bytes, index, value as u8),
        DType::Bool => bytes[index] = u8::from(value != 0),
        DType::F32 | DType::Tf32 => put(bytes, index, (value as f32).to_le_bytes()),
        _ => store(dtype, bytes, index, value as f64),
    }
}

/// Rounds to a binary format's mantissa, half to even, so that the conversion that follows is exact.
/// (The `half` crate's own conversion drops the low bits first, which loses ties.)
fn to_precision(value: f64, mantissa_bits: i32, min_exponent: i32) -> f64 {
    if !value.is_finite() || value == 0.0 {
        return value;
    }
    let exponent = (value.to_bits() >> 52 & 0x7ff) as i32 - 1023;
    let unit = f64::from(exponent.max(min_exponent) - mantissa_bits).exp2();
    (value / unit).round_ties_even() * unit
}

fn put<const N: usize>(bytes: &mut [u8], index: usize, value: [u8; N]) {
    bytes[index * N..(index + 1) * N].copy_from_slice(&value);
}

/// Two to a byte, the even element in the low half.
fn nibble(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 2] >> (4 * (index % 2)) & 0xf
}

fn put_nibble(bytes: &mut [u8], index: usize, value: u8) {
    let shift = 4 * (index % 2);
    let byte = &mut bytes[index / 2];
    *byte = *byte & !(0xf << shift) | (value & 0xf) << shift;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_values_of_the_small_floats() {
        // OCP FP8 and MX specifications: smallest subnormal, largest normal, specials.
        assert_eq!(E4M3.decode(0x01), 2f64.powi(-9));
        assert_eq!(E4M3.decode(0x7e), 448.0);
        assert!(E4M3.decode(0x7f).is_nan());
        assert_eq!(E5M2.decode(0x01), 2f64.powi(-16));
        assert_eq!(E5M2.decode(0x7b), 57_344.0);
        assert_eq!(E5M2.decode(0x7c), f64::INFINITY);
        let e2m1: Vec<f64> = (0..8).map(|c| E2M1.decode(c)).collect();
        assert_eq!(e2m1, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
    }

    #[test]
    fn every_code_survives_a_round_trip() {
        for (format, codes) in [(&E4M3, 256u32), (&E5M2, 256), (&E2M1, 16)] {
            for code in 0..codes {
                let value = format.decode(code as u8);
                let back = format.decode(format.encode(value));
                assert!(back == value || back.is_nan() && value.is_nan(), "{code:#x}: {value} became {back}");
            }
        }
    }

    #[test]
    fn rounding_is_half_to_even_and_saturates() {
        assert_eq!(rounded(DType::MxFp4, 2.5), 2.0);
        assert_eq!(rounded(DType::MxFp4, 3.5), 4.0);
        assert_eq!(rounded(DType::MxFp4, -100.0), -6.0);
        assert_eq!(rounded(DType::F8E4M3, 1e9), 448.0);
        assert_eq!(rounded(DType::I8, 2.5), 2.0);
        assert_eq!(rounded(DType::I8, 1e9), 127.0);
        assert_eq!(rounded(DType::I4, -100.0), -8.0);
        assert!(rounded(DType::F8E5M2, f64::NAN).is_nan());
    }

    #[test]
    fn halves_round_once_even_just_above_a_tie() {
        let just_above = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(rounded(DType::F16, just_above), 1.0 + 2f64.powi(-10));
        assert_eq!(rounded(DType::F16, 1.0 + 2f64.powi(-11)), 1.0);
        assert_eq!(rounded(DType::Bf16, 1.0 + 2f64.powi(-8) + 2f64.powi(-40)), 1.0 + 2f64.powi(-7));
        assert_eq!(rounded(DType::F16, 2f64.powi(-25) + 2f64.powi(-60)), 2f64.powi(-24));
        assert_eq!(rounded(DType::F16, 65_520.0), f64::INFINITY);
        assert_eq!(rounded(DType::F16, 65_519.9), 65_504.0);
    }

    #[test]
    fn nibbles_do_not_disturb_their_neighbour() {
        let mut bytes = [0u8; 2];
        for (i, v) in [-8.0, 7.0, -1.0].into_iter().enumerate() {
            store(DType::I4, &mut bytes, i, v);
        }
        let read: Vec<f64> = (0..3).map(|i| load(DType::I4, &bytes, i)).collect();
        assert_eq!(read, [-8.0, 7.0, -1.0]);
    }

    #[test]
    fn large_integers_are_exact() {
        let mut bytes = [0; 8];
        put(&mut bytes, 0, i64::MAX.to_le_bytes());
        assert_eq!(load_int(DType::I64, &bytes, 0), i64::MAX);
    }
}
