//! New constants out of others: copies in memory of their own.

use lz_abi::{Arena, Tensor, TensorView};

use crate::ir::Constant;

/// Calls a function with the elements of a row-major tensor as a slice of fixed-size bytes; otherwise with a copy.
fn with_bytes<R>(view: &TensorView<'_>, f: impl FnOnce(&[u8]) -> R) -> R {
    macro_rules! slices {
        ($($type:ty),+) => {{
            let view = view.as_ref();
            $(if let Ok(slice) = view.as_slice::<$type>() {
                let mut bytes = vec![0; size_of_val(slice)];
                for (to, one) in bytes.chunks_exact_mut(size_of::<$type>()).zip(slice) {
                    to.copy_from_slice(&one.to_le_bytes());
                }
                return f(&bytes);
            })+
        }};
    }
    slices!(f32, f64, half::bf16, half::f16, i64, i32, i16, i8, u8);
    f(view.to_tensor().bytes())
}

/// A matrix with rows and columns swapped, as a copy. `None` if its elements share bytes, or there is no memory.
pub fn transposed(matrix: &Constant) -> Option<Constant> {
    let view = matrix.view();
    let [rows, columns] = view.shape()[..] else { return None };
    let (dtype, size) = (view.dtype(), view.dtype().bits() as usize / 8);
    if dtype.is_sub_byte() {
        return None;
    }
    let (height, width) = (rows as usize, columns as usize);
    let mut memory = Arena::try_new(dtype.bytes_for(height * width))?;
    with_bytes(&view, |from| {
        let to = memory.bytes_mut();
        // Squares that fit into the cache: both sides are walked in short rows.
        const SQUARE: usize = 32;
        for top in (0..height).step_by(SQUARE) {
            for left in (0..width).step_by(SQUARE) {
                for row in top..height.min(top + SQUARE) {
                    for column in left..width.min(left + SQUARE) {
                        let (here, there) = ((row * width + column) * size, (column * height + row) * size);
                        to[there..there + size].copy_from_slice(&from[here..here + size]);
                    }
                }
            }
        }
    });
    let copy = Tensor::in_memory(dtype, &[columns, rows], memory)?;
    Some(Constant::owned(&format!("{}.transposed", matrix.name()), copy))
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
    let mut memory = Arena::try_new(dtype.bytes_for(shape.iter().product::<i64>() as usize))?;
    let mut at = 0;
    for part in parts {
        with_bytes(&part.view(), |bytes| {
            memory.bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        });
    }
    let name = parts.iter().map(|part| part.name()).collect::<Vec<_>>().join("+");
    Some(Constant::owned(&name, Tensor::in_memory(dtype, &shape, memory)?))
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
