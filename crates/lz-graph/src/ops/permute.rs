//! The axes in another order.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::given;
use super::{OpDef, View};
use crate::ir::{Inputs, Meta, ShapeError};

/// Axis `i` of the result is axis `axes[i]` of the input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Permute {
    /// Which axis goes where.
    pub axes: Vec<usize>,
}

impl Permute {
    /// Two axes in each other's place.
    pub fn swap(rank: usize, a: usize, b: usize) -> Permute {
        let mut axes: Vec<usize> = (0..rank).collect();
        axes.swap(a, b);
        Permute { axes }
    }

    /// Whether it swaps the last two axes and nothing else.
    pub fn is_last_two(&self) -> bool {
        self.axes.len() >= 2 && *self == Permute::swap(self.axes.len(), self.axes.len() - 2, self.axes.len() - 1)
    }
}

impl OpDef for Permute {
    const NAME: &'static str = "permute";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(1)?;
        let input = inputs.need(0)?;
        let mut seen = self.axes.clone();
        seen.sort_unstable();
        if seen != (0..input.rank()).collect::<Vec<_>>() {
            let expected = format!("each axis of {} once", input.rank());
            return Err(ShapeError::Attribute { name: "axes", value: format!("{:?}", self.axes), expected });
        }
        Ok(Meta::new(input.dtype, self.axes.iter().map(|&axis| input.shape[axis].clone())))
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        *output = given(inputs, 0).permuted(&self.axes).to_tensor();
        Ok(())
    }

    fn view(&self, _: Inputs<'_>, _: &Meta) -> Option<View> {
        let start = self.axes.iter().map(|_| 0).collect();
        Some(View { input: 0, start, axes: self.axes.iter().map(|&axis| (Some(axis), 1)).collect() })
    }
}
