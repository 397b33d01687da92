//! Table lookup.

use lz_model::{KernelArgs, KernelError};

use super::Reference;
use super::arguments::Arguments;
use super::indices::read_index;
use super::rows::{read_row, unravel, write_row};

/// Rows of a table by index.
pub struct Lookup;

impl Reference for Lookup {
    const OPS: &'static [&'static str] = &["embedding.lookup"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let (indices, weight) = (args.tensor("indices"), args.tensor("weight"));
        for row in 0..args.dim("rows") {
            let index = read_index(&indices, "indices", &unravel(row, indices.shape()), weight.shape()[0])?;
            write_row(&mut args.outputs[0], row, read_row(&weight, index));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::{CallRefError, call};
    use lz_model::{DType, KernelError, Tensor};

    #[test]
    fn rows_come_in_the_order_of_the_indices() {
        let table = Tensor::from_f64(DType::Bf16, &[3, 2], &[0., 1., 10., 11., 20., 21.]);
        let ids = Tensor::from_ints(DType::I64, &[2, 2], &[2, 0, 1, 2]);
        let out = call("embedding", &[("indices", ids.view()), ("weight", table.view())], &[], None).unwrap();
        assert_eq!(out[0].1.shape(), [2, 2, 2]);
        assert_eq!(out[0].1.to_f64(), [20., 21., 0., 1., 10., 11., 20., 21.]);
    }

    #[test]
    fn an_index_outside_the_table_is_an_error() {
        let table = Tensor::zeros(DType::F32, &[3, 2]);
        for bad in [3, -1, i64::from(i32::MIN)] {
            let ids = Tensor::from_ints(DType::I32, &[2], &[0, bad]);
            let error = call("embedding", &[("indices", ids.view()), ("weight", table.view())], &[], None).unwrap_err();
            let CallRefError::Kernel(KernelError::BadData { input, at, value, .. }) = error else { panic!("{error}") };
            assert_eq!((input, at, value), ("indices", vec![1], bad));
        }
    }
}
