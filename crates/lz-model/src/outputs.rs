//! The tensors a call will give: their names, dtypes and shapes.

use lz_abi::{DType, Extents, KernelError, Tensor};

use crate::call::{Call, CallError, NamedCall};
use crate::catalog::Op;
use crate::param::ParamValue;
use crate::query::Query;
use crate::resolve::OrderedCall;
use crate::schema::{Output, OutputDType};
use crate::shape::{Axis, ShapePattern};
use crate::tensor_meta::TensorMeta;

/// A tensor an operation will give.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputSpec {
    /// Its name.
    pub name: &'static str,
    /// Its dtype.
    pub dtype: DType,
    /// Its sizes.
    pub shape: Extents,
}

impl OutputSpec {
    /// Its memory, all zeros; an error when there is none for it.
    pub fn allocate(&self) -> Result<Tensor, KernelError> {
        Tensor::try_zeros(self.dtype, &self.shape)
            .ok_or_else(|| KernelError::OutOfMemory(format!("'{}' would have shape {:?}", self.name, self.shape)))
    }
}

impl Op {
    /// Every parameter of a bound call, defaults filled in, and the tensors it will give.
    pub fn settled(
        &self,
        named: &NamedCall<'_>,
        ordered: &OrderedCall<'_>,
        query: &Query,
    ) -> Result<(Vec<ParamValue>, Vec<OutputSpec>), CallError> {
        let params = self.params(&ordered.params)?.to_vec();
        let call = Call {
            inputs: &ordered.inputs,
            params: &params,
            layout: named.layout,
            device: named.device,
            context: named.context,
        };
        let expected = self.outputs(&call, query);
        Ok((params, expected))
    }

    /// The tensors a call will give, from its arguments and its query. Updated inputs are not listed.
    pub fn outputs(&self, call: &Call<'_>, query: &Query) -> Vec<OutputSpec> {
        let schema = self.schema();
        let meta = |name: &str| self.input_index(name).and_then(|i| call.inputs.get(i).copied().flatten());
        let params = self.params(call.params).unwrap_or_default();
        schema
            .outputs
            .iter()
            .zip(&self.outputs)
            .filter_map(|(output, patterns)| match *output {
                Output::Updates(_) => None,
                Output::Fresh { name, shape, dtype } => {
                    let dtype = match dtype {
                        OutputDType::Of(input) => meta(input)?.dtype,
                        OutputDType::Fixed(dtype) => dtype,
                        OutputDType::Named(param) => {
                            self.param_index(param).and_then(|i| params[i].as_str())?.parse().ok()?
                        }
                    };
                    let shape = match shape.split_once(':') {
                        Some(("like", input)) => meta(input)?.shape.into(),
                        Some(("rows", input)) => meta(input)?.shape.split_last()?.1.into(),
                        _ => self.output_shape(patterns, call, query),
                    };
                    Some(OutputSpec { name, dtype, shape })
                }
            })
            .collect()
    }

    fn output_shape(&self, patterns: &[ShapePattern], call: &Call<'_>, query: &Query) -> Extents {
        let layout = query.tensor(0).layout();
        let pattern = patterns.iter().find(|p| p.layout == Some(layout)).unwrap_or(&patterns[0]);
        let mut shape = Extents::new();
        for axis in &pattern.axes {
            match *axis {
                Axis::Dim(d) | Axis::Broadcast(d) => shape.push(query.dim(d)),
                Axis::PlusOne(d) => shape.push(query.dim(d) + 1),
                Axis::Fixed(n) => shape.push(n),
                Axis::Rest(d) => shape.extend_from_slice(self.leading(d, call.inputs).map_or(&[], |(_, axes)| axes)),
            }
        }
        shape
    }

    /// The leading axes that the first input with `...dim` has for it, and that input's name.
    pub(crate) fn leading<'a>(
        &self,
        dim: usize,
        inputs: &[Option<TensorMeta<'a>>],
    ) -> Option<(&'static str, &'a [i64])> {
        let named = self.schema().inputs.iter().zip(&self.inputs).zip(inputs);
        named.into_iter().find_map(|((input, patterns), meta)| {
            let pattern = patterns.iter().find(|p| p.axes.first() == Some(&Axis::Rest(dim)))?;
            let shape = meta.as_ref()?.shape;
            Some((input.name, &shape[..(shape.len() + 1).checked_sub(pattern.axes.len())?]))
        })
    }
}
