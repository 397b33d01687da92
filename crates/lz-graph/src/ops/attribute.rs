//! How attributes are written as JSON that JSON has no form for: element types, infinities.

use serde::{Deserialize, Deserializer, Serializer};

/// An element type by its name.
pub mod dtype {
    use super::*;
    use lz_abi::DType;

    /// Writes the name.
    pub fn serialize<S: Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(dtype.name())
    }

    /// Reads a name.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// An integer, a float, or one of the texts `inf`, `-inf` and `nan`.
pub mod number {
    use super::*;
    use crate::ops::elements::Number;

    /// Writes a number.
    pub fn serialize<S: Serializer>(number: &Number, serializer: S) -> Result<S::Ok, S::Error> {
        match *number {
            Number::Int(i) => serializer.serialize_i64(i),
            Number::Float(x) if x.is_finite() => serializer.serialize_f64(x),
            Number::Float(x) if x.is_nan() => serializer.serialize_str("nan"),
            Number::Float(x) if x > 0.0 => serializer.serialize_str("inf"),
            Number::Float(_) => serializer.serialize_str("-inf"),
        }
    }

    /// Reads a number.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Number, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Int(i64),
            Float(f64),
            Text(String),
        }
        match Either::deserialize(deserializer)? {
            Either::Int(i) => Ok(Number::Int(i)),
            Either::Float(x) => Ok(Number::Float(x)),
            Either::Text(text) => match text.as_str() {
                "inf" => Ok(Number::Float(f64::INFINITY)),
                "-inf" => Ok(Number::Float(f64::NEG_INFINITY)),
                "nan" => Ok(Number::Float(f64::NAN)),
                other => Err(serde::de::Error::custom(format!("'{other}' is none of inf, -inf and nan"))),
            },
        }
    }

    /// What is left out: 0.
    pub fn zero() -> Number {
        Number::Float(0.0)
    }
}
