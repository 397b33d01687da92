//! Quantization: formats with their accuracy rank, and how scales are laid out.

use std::fmt;

use serde::{Deserialize, Serialize};

use lz_abi::DType;

/// A low-precision storage format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum QuantFormat {
    /// 8-bit integers.
    Int8,
    /// 4-bit integers.
    Int4,
    /// 8-bit floats, E4M3.
    Fp8E4m3,
    /// 8-bit floats, E5M2.
    Fp8E5m2,
    /// OCP microscaling 4-bit floats.
    Mxfp4,
    /// NVIDIA 4-bit floats.
    Nvfp4,
}

/// What is known about a [`QuantFormat`], independent of any kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantFormatSpec {
    /// Higher keeps more accuracy. The four-bit ranks are the specification's
    /// (NVFP4 10 > INT4 8 > MXFP4 5); the eight-bit formats all rank above them.
    pub accuracy_rank: u8,
    /// Elements that share a scale when the format itself fixes it.
    pub group_size: Option<u32>,
    /// Vendors whose hardware multiplies the format directly.
    pub hardware_vendors: &'static [&'static str],
    /// The element type values are stored as.
    pub dtype: DType,
}

impl QuantFormat {
    /// Every format.
    pub const ALL: [QuantFormat; 6] = [
        QuantFormat::Int8,
        QuantFormat::Int4,
        QuantFormat::Fp8E4m3,
        QuantFormat::Fp8E5m2,
        QuantFormat::Mxfp4,
        QuantFormat::Nvfp4,
    ];

    /// The facts about this format.
    pub const fn spec(self) -> QuantFormatSpec {
        let (accuracy_rank, group_size, hardware_vendors, dtype): (_, _, &'static [&'static str], _) = match self {
            QuantFormat::Int8 => (14, None, &["nvidia", "amd", "intel", "habana"], DType::I8),
            QuantFormat::Fp8E4m3 => (13, None, &["nvidia", "amd", "habana"], DType::F8E4M3),
            QuantFormat::Fp8E5m2 => (12, None, &["nvidia", "amd", "habana"], DType::F8E5M2),
            QuantFormat::Nvfp4 => (10, Some(16), &["nvidia"], DType::NvFp4),
            QuantFormat::Int4 => (8, None, &["nvidia", "amd", "intel"], DType::I4),
            QuantFormat::Mxfp4 => (5, Some(32), &["nvidia", "amd"], DType::MxFp4),
        };
        QuantFormatSpec { accuracy_rank, group_size, hardware_vendors, dtype }
    }

    /// The format that stores values as `dtype`, if `dtype` is a quantized one.
    pub fn of(dtype: DType) -> Option<QuantFormat> {
        Self::ALL.into_iter().find(|f| f.spec().dtype == dtype)
    }

    /// The format behind a code made by `self as u8`.
    pub(crate) fn from_code(code: u8) -> Option<QuantFormat> {
        Self::ALL.into_iter().find(|f| *f as u8 == code)
    }
}

impl fmt::Display for QuantFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            QuantFormat::Int8 => "int8",
            QuantFormat::Int4 => "int4",
            QuantFormat::Fp8E4m3 => "fp8_e4m3",
            QuantFormat::Fp8E5m2 => "fp8_e5m2",
            QuantFormat::Mxfp4 => "mxfp4",
            QuantFormat::Nvfp4 => "nvfp4",
        })
    }
}

/// What one scale covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Granularity {
    /// One scale for the whole tensor.
    PerTensor,
    /// One per output channel (the last dimension but the reduced one).
    PerChannel,
    /// One per attention head.
    PerHead,
    /// One per group of consecutive elements of the last dimension.
    Blockwise,
}

impl Granularity {
    /// Every granularity.
    pub const ALL: [Granularity; 4] =
        [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerHead, Granularity::Blockwise];

    /// The name used in files.
    pub const fn name(self) -> &'static str {
        match self {
            Granularity::PerTensor => "per_tensor",
            Granularity::PerChannel => "per_channel",
            Granularity::PerHead => "per_head",
            Granularity::Blockwise => "blockwise",
        }
    }
}

/// How the quantized operands of a call are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantSpec {
    /// The storage format.
    pub format: QuantFormat,
    /// What one scale covers.
    pub granularity: Granularity,
    /// Whether values are offset by a zero point.
    pub zero_point: bool,
    /// Elements per scale, for [`Granularity::Blockwise`].
    pub group_size: u16,
}

impl QuantSpec {
    /// The usual spec of a format: its own group size when it has one, else one scale per tensor.
    pub const fn of(format: QuantFormat) -> QuantSpec {
        let (granularity, group_size) = match format.spec().group_size {
            Some(n) => (Granularity::Blockwise, n as u16),
            None => (Granularity::PerTensor, 0),
        };
        QuantSpec { format, granularity, zero_point: false, group_size }
    }

    /// Packs into a word that is zero only for "not quantized".
    pub(crate) fn code(spec: Option<QuantSpec>) -> u32 {
        spec.map_or(0, |s| {
            1 << 31
                | u32::from(s.zero_point) << 24
                | (s.format as u32) << 20
                | (s.granularity as u32) << 16
                | u32::from(s.group_size)
        })
    }

    /// The inverse of [`QuantSpec::code`].
    pub(crate) fn from_code(code: u32) -> Option<QuantSpec> {
        (code >> 31 == 1).then(|| {
            let granularity = Granularity::ALL[(code >> 16 & 0x3) as usize];
            QuantFormat::from_code((code >> 20 & 0xf) as u8).map(|format| QuantSpec {
                format,
                granularity,
                zero_point: code >> 24 & 1 == 1,
                group_size: code as u16,
            })
        })?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_bit_accuracy_ranks_are_the_specifications() {
        let rank = |f: QuantFormat| f.spec().accuracy_rank;
        assert_eq!((rank(QuantFormat::Nvfp4), rank(QuantFormat::Int4), rank(QuantFormat::Mxfp4)), (10, 8, 5));
        for eight_bit in [QuantFormat::Int8, QuantFormat::Fp8E4m3, QuantFormat::Fp8E5m2] {
            assert!(rank(eight_bit) > rank(QuantFormat::Nvfp4));
        }
    }

    #[test]
    fn codes_round_trip() {
        assert_eq!(QuantSpec::from_code(QuantSpec::code(None)), None);
        for format in QuantFormat::ALL {
            for granularity in Granularity::ALL {
                for zero_point in [false, true] {
                    let spec = QuantSpec { format, granularity, zero_point, group_size: 128 };
                    assert_eq!(QuantSpec::from_code(QuantSpec::code(Some(spec))), Some(spec));
                }
            }
        }
    }
}
