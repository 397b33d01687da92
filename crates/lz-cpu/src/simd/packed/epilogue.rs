//! What is done with the sums of a tile before they are stored: bias, activation, rounding.

use lz_model::KernelError;

use super::super::gelu::{by_erf, by_tanh};
use super::super::half_floats::Narrow;
use super::super::silu_mul::silu;
use super::WIDTH;

/// The activation of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    None,
    Relu,
    Gelu,
    GeluTanh,
    Silu,
}

impl Activation {
    /// By the name it has in the schema.
    pub fn named(name: &str) -> Result<Activation, KernelError> {
        Ok(match name {
            "none" => Activation::None,
            "relu" => Activation::Relu,
            "gelu" => Activation::Gelu,
            "gelu_tanh" => Activation::GeluTanh,
            "silu" => Activation::Silu,
            other => return Err(KernelError::Failed(format!("does not know the activation {other}"))),
        })
    }
}

/// Writes a row of a tile to its place in the result, which may be narrower: the last panel is padded. `FUSED`: as of
/// [`super::super::Isa`].
#[inline(always)]
pub fn store<T: Narrow, const FUSED: bool>(
    sums: &mut [f32; WIDTH],
    bias: Option<&[f32; WIDTH]>,
    activation: Activation,
    to: &mut [T],
) {
    if let Some(bias) = bias {
        sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
    }
    match activation {
        Activation::None => {}
        // NaN is not below zero, and stays.
        Activation::Relu => sums.iter_mut().for_each(|sum| *sum = if *sum < 0.0 { 0.0 } else { *sum }),
        Activation::Gelu => sums.iter_mut().for_each(|sum| *sum = by_erf::<FUSED>(*sum)),
        Activation::GeluTanh => sums.iter_mut().for_each(|sum| *sum = by_tanh::<FUSED>(*sum)),
        Activation::Silu => sums.iter_mut().for_each(|sum| *sum = silu::<FUSED>(*sum)),
    }
    T::narrow(&sums[..to.len()], to);
}
