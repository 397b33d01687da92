//! The same elements in the same order, with other sizes.

use lz_abi::{KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::elements::given;
use super::{Alias, Cost, OpDef};
use crate::ir::{Dim, DimError, Inputs, Meta, Shape, ShapeError, Symbols};

/// Other sizes for the same elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reshape {
    /// The sizes; -1 stands for one that follows from the others.
    pub shape: Vec<Dim>,
}

impl OpDef for Reshape {
    const NAME: &'static str = "reshape";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(1)?;
        let input = inputs.need(0)?;
        let others = self.shape.iter().filter(|size| !size.is(-1)).fold(Dim::from(1), |all, size| all * size.clone());
        let open = self.shape.iter().filter(|size| size.is(-1)).count();
        let wrong =
            |expected: String| ShapeError::Attribute { name: "shape", value: format!("{:?}", self.shape), expected };
        if open > 1 {
            return Err(wrong("at most one -1".into()));
        }
        let rest = input.len().quotient(others.clone());
        let shape: Shape =
            self.shape.iter().map(|size| if size.is(-1) { rest.clone() } else { size.clone() }).collect();
        let found = Meta { dtype: input.dtype, shape };
        // Sizes with symbols may be equal without having the same form: they are checked when the symbols have numbers.
        match (found.len().known(), input.len().known()) {
            (Some(a), Some(b)) if a != b => Err(wrong(format!("{b} elements"))),
            _ => Ok(found),
        }
    }

    fn at(&self, symbols: &Symbols) -> Result<Reshape, DimError> {
        let shape = self.shape.iter().map(|size| size.at(symbols).map(Dim::from)).collect::<Result<_, _>>()?;
        Ok(Reshape { shape })
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let copied = given(inputs, 0).to_tensor();
        let view = TensorView::contiguous(copied.dtype(), output.shape(), copied.bytes());
        *output = view.map_err(|why| KernelError::Failed(why.to_string()))?.to_tensor();
        Ok(())
    }

    fn alias(&self, _: Inputs<'_>, _: &Meta) -> Option<Alias> {
        Some(Alias { input: 0, offset: 0 })
    }

    fn cost(&self, _: Inputs<'_>, _: &Meta) -> Cost {
        Cost::default()
    }
}
