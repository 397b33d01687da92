//! Dtypes, and what they are computed as.

use half::{bf16, f16};
use lz_abi::Param;

use crate::simd::half_floats::Narrow;

/// An element in memory, and the number it is computed as.
///
/// # Safety
/// Where `DIRECT` is true, `Self` and `Wide` have the same layout and any bits make one of either.
pub unsafe trait Stored: Copy + Default + Send + Sync + 'static {
    /// What it is computed as: at most eight bytes without padding.
    type Wide: Copy + Default + Send + Sync + 'static;
    /// Whether both are the same.
    const DIRECT: bool;
    /// Computed as. Both slices have one length.
    fn widen(from: &[Self], to: &mut [Self::Wide]);
    /// Rounded back. Both slices have one length.
    fn narrow(from: &[Self::Wide], to: &mut [Self]);
}

/// A number to compute with.
pub trait Number: Copy + Default + PartialEq + PartialOrd + Send + Sync + 'static {
    /// Of a scalar parameter.
    fn of(param: Param) -> Option<Self>;
    /// As float64, int64, and whether it is not 0.
    fn to_f64(self) -> f64;
    /// See above.
    fn to_i64(self) -> i64;
    /// See above.
    fn is_true(self) -> bool {
        self != Self::default()
    }
}

/// A truth value in memory: 0 is false.
#[derive(Clone, Copy, Default, Debug, PartialEq, PartialOrd)]
#[repr(transparent)]
pub struct Truth(pub u8);

macro_rules! numbers {
    ($($float:ty)+; $($int:ty)+) => {
        $(impl Number for $float {
            #[inline(always)]
            fn of(param: Param) -> Option<$float> {
                match param {
                    Param::Float(x) => Some(x as $float),
                    Param::Int(x) => Some(x as $float),
                    Param::Bool(x) => Some(u8::from(x).into()),
                    _ => None,
                }
            }
            #[inline(always)]
            fn to_f64(self) -> f64 { self as f64 }
            #[inline(always)]
            fn to_i64(self) -> i64 { self as i64 }
        })+
        $(impl Number for $int {
            #[inline(always)]
            fn of(param: Param) -> Option<$int> {
                match param {
                    Param::Float(x) => Some(x as i64 as $int),
                    Param::Int(x) => Some(x as $int),
                    Param::Bool(x) => Some(x.into()),
                    _ => None,
                }
            }
            #[inline(always)]
            fn to_f64(self) -> f64 { self as f64 }
            #[inline(always)]
            fn to_i64(self) -> i64 { self as i64 }
        })+
    };
}

numbers!(f32 f64; i32 i64);

macro_rules! direct {
    ($($type:ty)+) => {
        $(
            // SAFETY: it is the same type, and a number.
            unsafe impl Stored for $type {
                type Wide = $type;
                const DIRECT: bool = true;
                #[inline(always)]
                fn widen(from: &[$type], to: &mut [$type]) {
                    to.copy_from_slice(from);
                }
                #[inline(always)]
                fn narrow(from: &[$type], to: &mut [$type]) {
                    to.copy_from_slice(from);
                }
            }
        )+
    };
}

direct!(f32 f64 i32 i64);

macro_rules! halves {
    ($($type:ty)+) => {
        $(
            // SAFETY: not direct.
            unsafe impl Stored for $type {
                type Wide = f32;
                const DIRECT: bool = false;
                #[inline(always)]
                fn widen(from: &[$type], to: &mut [f32]) {
                    <$type as Narrow>::widen(from, to);
                }
                #[inline(always)]
                fn narrow(from: &[f32], to: &mut [$type]) {
                    <$type as Narrow>::narrow(from, to);
                }
            }
        )+
    };
}

halves!(f16 bf16);

macro_rules! small {
    ($($type:ty)+) => {
        $(
            // SAFETY: not direct.
            unsafe impl Stored for $type {
                type Wide = i32;
                const DIRECT: bool = false;
                #[inline(always)]
                fn widen(from: &[$type], to: &mut [i32]) {
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = i32::from(*from));
                }
                #[inline(always)]
                fn narrow(from: &[i32], to: &mut [$type]) {
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = *from as $type);
                }
            }
        )+
    };
}

small!(i16 i8 u8);

// SAFETY: not direct.
unsafe impl Stored for Truth {
    type Wide = i32;
    const DIRECT: bool = false;

    #[inline(always)]
    fn widen(from: &[Truth], to: &mut [i32]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = i32::from(from.0 != 0));
    }

    #[inline(always)]
    fn narrow(from: &[i32], to: &mut [Truth]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = Truth(u8::from(*from != 0)));
    }
}

/// Calls a function with the Rust type a dtype of whole bytes is computed as.
macro_rules! with_wide {
    ($dtype:expr, $T:ident => $call:expr) => {
        match $dtype {
            lz_abi::DType::F32 | lz_abi::DType::F16 | lz_abi::DType::Bf16 => {
                type $T = f32;
                $call
            }
            lz_abi::DType::F64 => {
                type $T = f64;
                $call
            }
            lz_abi::DType::I64 => {
                type $T = i64;
                $call
            }
            _ => {
                type $T = i32;
                $call
            }
        }
    };
}
pub(in crate::primitives) use with_wide;

/// Calls a function with the Rust type of any dtype of whole bytes.
macro_rules! with_stored {
    ($dtype:expr, $T:ident => $call:expr) => {
        match $dtype {
            lz_abi::DType::F32 => {
                type $T = f32;
                $call
            }
            lz_abi::DType::F64 => {
                type $T = f64;
                $call
            }
            lz_abi::DType::F16 => {
                type $T = half::f16;
                $call
            }
            lz_abi::DType::Bf16 => {
                type $T = half::bf16;
                $call
            }
            lz_abi::DType::I64 => {
                type $T = i64;
                $call
            }
            lz_abi::DType::I32 => {
                type $T = i32;
                $call
            }
            lz_abi::DType::I16 => {
                type $T = i16;
                $call
            }
            lz_abi::DType::I8 => {
                type $T = i8;
                $call
            }
            lz_abi::DType::U8 => {
                type $T = u8;
                $call
            }
            lz_abi::DType::Bool => {
                type $T = crate::primitives::elementwise::numbers::Truth;
                $call
            }
            other => Err(lz_abi::KernelError::Failed(format!("does not take {other}"))),
        }
    };
}
pub(in crate::primitives) use with_stored;
