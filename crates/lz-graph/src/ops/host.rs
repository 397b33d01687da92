//! What only torch can do.

use lz_abi::{DType, KernelError, Tensor, TensorView};
use serde::{Deserialize, Serialize};

use super::OpDef;
use crate::ir::{Dim, DimError, Inputs, Meta, ShapeError, Symbols};

/// One result of a call that the exporter keeps: a function of torch with its arguments. Inputs are the tensors among those.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Which call of the exporter's list.
    pub call: u32,
    /// Which of its results.
    #[serde(default)]
    pub result: u32,
    /// What is called, for people.
    pub target: String,
    /// Element type of the result.
    #[serde(with = "super::attribute::dtype")]
    pub dtype: DType,
    /// Sizes of the result.
    pub shape: Vec<Dim>,
}

impl OpDef for Host {
    const NAME: &'static str = "host";

    fn infer(&self, _: Inputs<'_>) -> Result<Meta, ShapeError> {
        Ok(Meta::new(self.dtype, self.shape.iter().cloned()))
    }

    fn evaluate(&self, _: &[Option<TensorView<'_>>], _: &mut Tensor) -> Result<(), KernelError> {
        Err(KernelError::Failed(format!("{} runs only where the model was exported", self.target)))
    }

    fn at(&self, symbols: &Symbols) -> Result<Host, DimError> {
        let shape = self.shape.iter().map(|size| size.at(symbols).map(Dim::from)).collect::<Result<_, _>>()?;
        Ok(Host { shape, ..self.clone() })
    }

    /// What it calls may have effects, or draw random numbers.
    fn folds(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Op;

    #[test]
    fn it_gives_what_it_says_and_cannot_be_evaluated() {
        let shape = vec![Dim::symbol("s0"), 2.into()];
        let host = Host { call: 3, result: 1, target: "aten.sort".into(), dtype: DType::I64, shape };
        let op = Op::named("host", serde_json::to_value(&host).unwrap()).unwrap();
        assert_eq!(op, Op::Host(host));
        assert_eq!(op.infer(Inputs(&[])).unwrap().to_string(), "int64[s0, 2]");
        assert!(!op.folds());
        let op = op.at(&Symbols::from_iter([("s0", 1)])).unwrap();
        assert_eq!(op.infer(Inputs(&[])).unwrap().to_string(), "int64[1, 2]");
        let why = op.evaluate(&[], &mut Tensor::zeros(DType::I64, &[1, 2])).unwrap_err();
        assert_eq!(why.to_string(), "aten.sort runs only where the model was exported");
    }
}
