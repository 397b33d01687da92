//! Element types: every precision LayerZero can describe, and sets of them.

use std::fmt;
use std::str::FromStr;

use crate::nearest::nearest;

/// The element type of a tensor.
///
/// The names are torch's where torch has one (`float16`, `bfloat16`, `float8_e4m3fn`);
/// [`FromStr`] also accepts the usual short forms (`fp16`, `half`, `bf16`, `fp8_e4m3`, …).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum DType {
    /// IEEE double precision.
    F64,
    /// IEEE single precision.
    F32,
    /// Single precision storage, multiplied on tensor cores with a 10-bit mantissa.
    Tf32,
    /// IEEE half precision.
    F16,
    /// Brain float: the upper half of a single-precision float.
    Bf16,
    /// 8-bit float, 4 exponent bits, no infinities, largest value 448.
    F8E4M3,
    /// 8-bit float, 5 exponent bits, largest finite value 57344.
    F8E5M2,
    /// 4-bit float (E2M1) in groups of 32 with a power-of-two scale per group.
    MxFp4,
    /// 4-bit float (E2M1) in groups of 16 with an E4M3 scale per group.
    NvFp4,
    /// Signed 64-bit integer.
    I64,
    /// Signed 32-bit integer.
    I32,
    /// Signed 16-bit integer.
    I16,
    /// Signed 8-bit integer.
    I8,
    /// Signed 4-bit integer, two per byte.
    I4,
    /// Unsigned 8-bit integer.
    U8,
    /// Boolean, one byte each.
    Bool,
}

/// One row of the dtype table: everything that is known about a dtype, in one place.
struct Row(DType, &'static str, u32, &'static [&'static str]);

use DType::*;
const TABLE: [Row; 16] = [
    Row(F64, "float64", 64, &["f64", "fp64", "double"]),
    Row(F32, "float32", 32, &["f32", "fp32", "float", "single"]),
    Row(Tf32, "tf32", 32, &["tensorfloat32"]),
    Row(F16, "float16", 16, &["f16", "fp16", "half"]),
    Row(Bf16, "bfloat16", 16, &["bf16"]),
    Row(F8E4M3, "float8_e4m3fn", 8, &["fp8_e4m3", "f8e4m3", "float8_e4m3", "e4m3"]),
    Row(F8E5M2, "float8_e5m2", 8, &["fp8_e5m2", "f8e5m2", "e5m2"]),
    Row(MxFp4, "mxfp4", 4, &[]),
    Row(NvFp4, "nvfp4", 4, &[]),
    Row(I64, "int64", 64, &["i64", "long"]),
    Row(I32, "int32", 32, &["i32", "int"]),
    Row(I16, "int16", 16, &["i16", "short"]),
    Row(I8, "int8", 8, &["i8"]),
    Row(I4, "int4", 4, &["i4"]),
    Row(U8, "uint8", 8, &["u8", "byte"]),
    Row(Bool, "bool", 8, &[]),
];

impl DType {
    /// Every dtype, in declaration order.
    pub fn all() -> impl Iterator<Item = DType> {
        TABLE.iter().map(|row| row.0)
    }

    /// The dtype whose discriminant this is. Panics on a number that is none.
    pub fn from_code(code: u8) -> DType {
        TABLE[code as usize].0
    }

    /// The canonical name.
    pub fn name(self) -> &'static str {
        TABLE[self as usize].1
    }

    /// Size of one element in bits; four-bit formats are two to a byte.
    pub fn bits(self) -> u32 {
        TABLE[self as usize].2
    }

    /// Bytes that the address of an element is a multiple of.
    pub fn align(self) -> usize {
        (self.bits() as usize / 8).max(1)
    }

    /// Bytes that `elements` contiguous elements occupy.
    pub fn bytes_for(self, elements: usize) -> usize {
        (elements * self.bits() as usize).div_ceil(8)
    }

    /// Whether this is a floating-point format of any width.
    pub fn is_float(self) -> bool {
        (self as u8) <= (NvFp4 as u8)
    }

    /// Whether two elements share a byte.
    pub fn is_sub_byte(self) -> bool {
        self.bits() < 8
    }

    /// Whether every value of `self` is exactly representable in `to`.
    pub fn widens_to(self, to: DType) -> bool {
        self == to
            || matches!(
                (self, to),
                (F16 | Bf16 | F8E4M3 | F8E5M2, F32 | F64)
                    | (F32 | Tf32, F64)
                    | (F8E4M3 | F8E5M2, F16)
                    | (F8E4M3, Bf16)
                    | (F8E5M2, Bf16)
                    | (I8 | U8, I16 | I32 | I64)
                    | (I16, I32 | I64)
                    | (I32, I64)
            )
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no dtype.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype '{name}'{}", crate::nearest::did_you_mean(.nearest))]
pub struct UnknownDType {
    /// The name as given.
    pub name: String,
    /// The closest known name.
    pub nearest: Option<&'static str>,
}

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(text: &str) -> Result<Self, UnknownDType> {
        let wanted = text.strip_prefix("torch.").unwrap_or(text).to_ascii_lowercase();
        TABLE.iter().find(|row| row.1 == wanted || row.3.contains(&wanted.as_str())).map(|row| row.0).ok_or_else(|| {
            UnknownDType {
                nearest: nearest(&wanted, TABLE.iter().flat_map(|r| r.3.iter().copied().chain([r.1]))),
                name: text.to_owned(),
            }
        })
    }
}

/// A set of dtypes, as a bit mask.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DTypeSet(u32);

impl DTypeSet {
    /// The empty set.
    pub const EMPTY: DTypeSet = DTypeSet(0);
    /// The floats a reference kernel takes at its edge.
    pub const FLOATS: DTypeSet = DTypeSet::of(&[F64, F32, F16, Bf16]);
    /// The floats and the 8-bit floats.
    pub const FLOATS_AND_FP8: DTypeSet = DTypeSet::of(&[F64, F32, F16, Bf16, F8E4M3, F8E5M2]);
    /// Index types.
    pub const INDICES: DTypeSet = DTypeSet::of(&[I32, I64]);
    /// Masks: boolean (true = may attend) or additive.
    pub const MASKS: DTypeSet = DTypeSet::of(&[Bool, F64, F32, F16, Bf16]);
    /// What a quantized tensor may hold.
    pub const QUANTIZED: DTypeSet = DTypeSet::of(&[I8, I4, F8E4M3, F8E5M2, MxFp4, NvFp4]);

    /// The set of the given dtypes.
    pub const fn of(dtypes: &[DType]) -> DTypeSet {
        let mut bits = 0;
        let mut i = 0;
        while i < dtypes.len() {
            bits |= 1 << dtypes[i] as u32;
            i += 1;
        }
        DTypeSet(bits)
    }

    /// Whether the set holds `dtype`.
    pub const fn contains(self, dtype: DType) -> bool {
        self.0 & (1 << dtype as u32) != 0
    }

    /// Adds one dtype.
    pub fn insert(&mut self, dtype: DType) {
        self.0 |= 1 << dtype as u32;
    }

    /// Whether nothing is in the set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The members, in declaration order.
    pub fn iter(self) -> impl Iterator<Item = DType> {
        DType::all().filter(move |&d| self.contains(d))
    }
}

impl FromIterator<DType> for DTypeSet {
    fn from_iter<I: IntoIterator<Item = DType>>(dtypes: I) -> Self {
        let mut set = DTypeSet::EMPTY;
        dtypes.into_iter().for_each(|d| set.insert(d));
        set
    }
}

impl fmt::Display for DTypeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.iter().map(DType::name).collect();
        f.write_str(&names.join(", "))
    }
}

impl fmt::Debug for DTypeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_enum_order_and_names_round_trip() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, i);
            assert_eq!(row.1.parse::<DType>(), Ok(row.0));
            for alias in row.3 {
                assert_eq!(alias.parse::<DType>(), Ok(row.0), "{alias}");
            }
        }
    }

    #[test]
    fn sizes_are_in_bits_and_four_bit_formats_pack() {
        assert_eq!(MxFp4.bits(), 4);
        assert_eq!(I4.bytes_for(3), 2);
        assert_eq!(Bf16.bytes_for(3), 6);
        assert_eq!(F8E5M2.bytes_for(3), 3);
    }

    #[test]
    fn torch_spelling_and_case_are_accepted_and_typos_get_a_suggestion() {
        assert_eq!("torch.BFloat16".parse::<DType>(), Ok(Bf16));
        let error = "blfoat16".parse::<DType>().unwrap_err();
        assert_eq!(error.nearest, Some("bfloat16"));
        assert_eq!(error.to_string(), "unknown dtype 'blfoat16'; did you mean 'bfloat16'?");
    }

    #[test]
    fn sets_hold_what_was_put_in() {
        let set: DTypeSet = [F16, Bf16].into_iter().collect();
        assert!(set.contains(F16) && !set.contains(F32));
        assert_eq!(set.to_string(), "float16, bfloat16");
    }
}
