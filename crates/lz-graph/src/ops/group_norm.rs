//! Group normalization.

use lz_abi::{KernelError, Tensor, TensorView, indices};
use serde::{Deserialize, Serialize};

use super::OpDef;
use super::elements::{Number, fill, given, same};
use super::layer_norm::{floats, moments};
use crate::ir::{Inputs, Meta, ShapeError};

/// Layer normalization of groups of channels: x is (batch, channels, …), weight and bias have a number for each channel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupNorm {
    /// How many groups the channels make.
    pub groups: i64,
    /// Added to the variance.
    pub eps: f64,
}

impl OpDef for GroupNorm {
    const NAME: &'static str = "group_norm";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(3)?;
        let input = inputs.need(0)?;
        floats(0, input)?;
        if input.rank() < 2 {
            return Err(ShapeError::Rank { at: 0, rank: input.rank(), expected: "two or more" });
        }
        let channels = &input.shape[1];
        if self.groups < 1 || channels.known().is_some_and(|n| n % self.groups != 0) {
            let expected = format!("a divisor of {channels} channels");
            return Err(ShapeError::Attribute { name: "groups", value: self.groups.to_string(), expected });
        }
        for at in [1, 2] {
            let Some(meta) = inputs.get(at) else { continue };
            floats(at, meta)?;
            if meta.rank() != 1 {
                return Err(ShapeError::Rank { at, rank: meta.rank(), expected: "one" });
            }
            same(channels, &meta.shape[0])?;
        }
        Ok(input.clone())
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let input = given(inputs, 0);
        let width = input.shape()[1] / self.groups;
        let mut inside = input.shape()[1..].to_vec();
        inside[0] = width;
        let groups: Vec<(f64, f64)> = indices(&[input.shape()[0], self.groups])
            .map(|group| {
                let element = |i: &[i64]| {
                    let mut place = vec![group[0]];
                    place.extend(i);
                    place[1] += group[1] * width;
                    input.get(&place)
                };
                moments(&indices(&inside).map(|i| element(&i)).collect::<Vec<_>>(), self.eps)
            })
            .collect();
        fill(output, |index| {
            let (mean, scale) = groups[(index[0] * self.groups + index[1] / width) as usize];
            let of = |i: usize, none: f64| {
                inputs.get(i).and_then(Option::as_ref).map_or(none, |view| view.get(&index[1..2]))
            };
            Number::Float((input.get(index) - mean) * scale * of(1, 1.0) + of(2, 0.0))
        });
        Ok(())
    }

    fn in_place(&self, _: Inputs<'_>) -> &'static [usize] {
        &[0]
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{evaluated, meta, refused, scattered};
    use super::super::layer_norm::LayerNorm;
    use super::*;
    use lz_abi::DType;

    #[test]
    fn one_group_is_layer_norm() {
        let x = scattered(&[2, 4, 3], 1);
        let whole = evaluated(LayerNorm { eps: 1e-5, axes: 2 }, &[&x]);
        assert_eq!(evaluated(GroupNorm { groups: 1, eps: 1e-5 }, &[&x]), whole);
    }

    #[test]
    fn groups_by_hand() {
        let x = Tensor::from_f64(DType::F64, &[1, 4], &[1., 3., 10., 30.]);
        let w = Tensor::from_f64(DType::F64, &[4], &[1., 2., 3., 4.]);
        let found = evaluated(GroupNorm { groups: 2, eps: 0.0 }, &[&x, &w]).to_f64();
        assert_eq!(found, [-1., 2., -3., 4.]);
    }

    #[test]
    fn wrong_groups_are_refused() {
        let x = meta(DType::F32, &[1, 4, 2]);
        let why = "'groups' is 3, a divisor of 4 channels";
        assert_eq!(refused(&GroupNorm { groups: 3, eps: 0.0 }, &[&x]), why);
        let w = meta(DType::F32, &[2]);
        assert_eq!(refused(&GroupNorm { groups: 2, eps: 0.0 }, &[&x, &w]), "sizes 4 and 2 do not fit together");
    }
}
