//! How the tests of operations run them: shape rule, reference, comparison of both.

use lz_abi::{DType, KernelError, Tensor, TensorView};

use super::Op;
use crate::ir::{Inputs, Meta};

/// Element type and sizes.
pub fn meta(dtype: DType, shape: &[i64]) -> Meta {
    Meta::known(dtype, shape)
}

/// What an operation gives; `None` for an input that is not given.
pub fn tried(op: impl Into<Op>, inputs: &[Option<&Tensor>]) -> Result<Tensor, KernelError> {
    let op = op.into();
    // What the operation is, written and read again.
    let op = Op::named(op.name(), serde_json::from_str(&op.attributes().to_string()).unwrap()).unwrap();
    let metas: Vec<Option<Meta>> = inputs.iter().map(|t| t.map(|t| meta(t.dtype(), t.shape()))).collect();
    let borrowed: Vec<Option<&Meta>> = metas.iter().map(Option::as_ref).collect();
    let found = op.infer(Inputs(&borrowed)).unwrap_or_else(|why| panic!("{}: {why}", op.name()));
    let sizes = found.sizes().expect("known sizes");
    let mut output = Tensor::zeros(found.dtype, &sizes);
    let views: Vec<Option<TensorView<'_>>> = inputs.iter().map(|t| t.map(Tensor::view)).collect();
    op.evaluate(&views, &mut output)?;
    assert_eq!((output.dtype(), output.shape()), (found.dtype, &sizes[..]), "{}", op.name());
    Ok(output)
}

/// What an operation gives for inputs that are all there.
pub fn evaluated(op: impl Into<Op>, inputs: &[&Tensor]) -> Tensor {
    tried(op, &inputs.iter().map(|t| Some(*t)).collect::<Vec<_>>()).unwrap()
}

/// Why the shape rule refuses some inputs.
pub fn refused(op: &(impl Into<Op> + Clone), inputs: &[&Meta]) -> String {
    let given: Vec<Option<&Meta>> = inputs.iter().map(|meta| Some(*meta)).collect();
    op.clone().into().infer(Inputs(&given)).unwrap_err().to_string()
}

/// `0, 1, 2, …` in a shape.
pub fn counted(dtype: DType, shape: &[i64]) -> Tensor {
    let n = shape.iter().product::<i64>();
    Tensor::from_f64(dtype, shape, &(0..n).map(|i| i as f64).collect::<Vec<_>>())
}

/// Numbers without a pattern, between -2 and 2.
pub fn scattered(shape: &[i64], seed: u64) -> Tensor {
    let n = shape.iter().product::<i64>() as u64;
    let number = |i: u64| {
        let mixed = (i + 1 + seed * 1000).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        ((mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40) as f64 / f64::from(1 << 22) - 2.0
    };
    Tensor::from_f64(DType::F64, shape, &(0..n).map(number).collect::<Vec<_>>())
}
