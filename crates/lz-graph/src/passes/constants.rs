//! New constants out of others.

use lz_abi::{Tensor, permuted};

use crate::ir::Constant;

/// A matrix with rows and columns swapped: the same memory.
pub fn transposed(matrix: &Constant) -> Option<Constant> {
    let fits = matrix.view().shape().len() == 2 && !matrix.view().dtype().is_sub_byte();
    fits.then(|| Constant::new(&format!("{}.transposed", matrix.name()), permuted(matrix.storage().clone(), &[1, 0])))
}

/// Tensors behind each other along their first axis, as a copy. All have the same element type and the same other
/// sizes.
pub fn stacked(parts: &[&Constant]) -> Option<Constant> {
    let first = parts.first()?.view();
    let (dtype, mut shape) = (first.dtype(), first.shape().to_vec());
    if dtype.is_sub_byte() || shape.is_empty() {
        return None;
    }
    shape[0] = 0;
    for part in parts {
        let view = part.view();
        if view.dtype() != dtype || view.shape().len() != shape.len() || view.shape()[1..] != shape[1..] {
            return None;
        }
        shape[0] += view.shape()[0];
    }
    let mut all = Tensor::try_zeros(dtype, &shape)?;
    let mut first = 0;
    for part in parts {
        let view = part.view();
        let rows: Vec<i64> = (first..first + view.shape()[0]).collect();
        all.view_mut().put_rows(&rows, &view);
        first += view.shape()[0];
    }
    let name = parts.iter().map(|part| part.name()).collect::<Vec<_>>().join("+");
    Some(Constant::owned(&name, all))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_abi::DType;

    #[test]
    fn copies_hold_the_same_elements() {
        for dtype in [DType::F32, DType::F64, DType::Bf16, DType::F16, DType::I64, DType::I8, DType::Bool] {
            let numbers: Vec<f64> = (0..70 * 33).map(|i| f64::from(i * 7 % 2)).collect();
            let matrix = Constant::owned("m", Tensor::from_f64(dtype, &[70, 33], &numbers));
            let turned = transposed(&matrix).unwrap();
            assert_eq!(turned.view().shape(), [33, 70]);
            assert_eq!(turned.view().to_f64(), matrix.view().permuted(&[1, 0]).to_f64(), "{dtype}");
            let both = stacked(&[&matrix, &matrix]).unwrap();
            assert_eq!(both.view().to_f64(), [numbers.clone(), numbers].concat(), "{dtype}");
        }
        let (a, b) = (Tensor::zeros(DType::F32, &[1, 2]), Tensor::zeros(DType::F32, &[1, 3]));
        assert!(stacked(&[&Constant::owned("a", a), &Constant::owned("b", b)]).is_none());
    }
}
