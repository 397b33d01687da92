//! Accuracy classes: how much of its operands a kernel computes with.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How many bits of float32 operands take part in products, from the fewest to all. A call asks for a class; kernels of
/// that class, or of one with more bits, can serve it. Sums are float32 in every class.
///
/// ```
/// use lz_model::Accuracy;
///
/// assert!(Accuracy::Bf16 < Accuracy::SplitBf16x2 && Accuracy::SplitBf16x3 < Accuracy::Standard);
/// assert_eq!(Accuracy::default(), Accuracy::Standard);
/// ```
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema,
)]
#[repr(u8)]
pub enum Accuracy {
    /// 8 bits: operands are rounded to bfloat16.
    #[serde(rename = "bf16")]
    Bf16,
    /// 11 bits: operands are rounded to TF32.
    #[serde(rename = "tf32")]
    Tf32,
    /// 16 bits: an operand is the sum of two bfloat16 parts.
    #[serde(rename = "split_bf16_2")]
    SplitBf16x2,
    /// 24 bits in three bfloat16 parts, without the products of the smallest ones.
    #[serde(rename = "split_bf16_3")]
    SplitBf16x3,
    /// Operands as they are, in their own dtype.
    #[default]
    #[serde(rename = "standard")]
    Standard,
}

impl Accuracy {
    /// Every class, the least accurate first.
    pub const ALL: [Accuracy; 5] =
        [Accuracy::Bf16, Accuracy::Tf32, Accuracy::SplitBf16x2, Accuracy::SplitBf16x3, Accuracy::Standard];

    /// The name used in files.
    pub const fn name(self) -> &'static str {
        match self {
            Accuracy::Bf16 => "bf16",
            Accuracy::Tf32 => "tf32",
            Accuracy::SplitBf16x2 => "split_bf16_2",
            Accuracy::SplitBf16x3 => "split_bf16_3",
            Accuracy::Standard => "standard",
        }
    }

    /// Whether operands are taken as they are.
    pub fn is_standard(&self) -> bool {
        *self == Accuracy::Standard
    }

    /// The class behind a code made by `self as u8`.
    pub(crate) const fn from_code(code: u8) -> Accuracy {
        Accuracy::ALL[code as usize]
    }
}

impl fmt::Display for Accuracy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no accuracy class.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown accuracy class '{name}'; there are {}", Accuracy::ALL.map(Accuracy::name).join(", "))]
pub struct UnknownAccuracy {
    /// The name as given.
    pub name: String,
}

impl FromStr for Accuracy {
    type Err = UnknownAccuracy;

    fn from_str(name: &str) -> Result<Accuracy, UnknownAccuracy> {
        let found = Accuracy::ALL.into_iter().find(|class| class.name() == name);
        found.ok_or_else(|| UnknownAccuracy { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_in_order_and_read_as_they_are_written() {
        assert!(Accuracy::ALL.is_sorted());
        for class in Accuracy::ALL {
            assert_eq!(Accuracy::from_code(class as u8), class);
            assert_eq!(class.name().parse(), Ok(class));
            assert_eq!(serde_json::to_string(&class).unwrap(), format!("\"{class}\""));
        }
        assert!("exact".parse::<Accuracy>().is_err());
    }
}
