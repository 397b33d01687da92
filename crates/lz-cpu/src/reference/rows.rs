//! A tensor seen as a table: the last axis holds the columns, all axes before it, flattened, the rows.
//!
//! Two tensors of one call need the same number of rows, but not the same leading axes.

use lz_model::{Extents, TensorMut, TensorView};

use super::matrix::Matrix;

/// The index of element number `flat` of a shape, in row-major order.
pub fn unravel(mut flat: i64, shape: &[i64]) -> Extents {
    let mut index: Extents = shape.into();
    for at in index.iter_mut().rev() {
        let size = *at;
        *at = flat % size;
        flat /= size;
    }
    index
}

/// The index of the first element of row number `row`.
fn row_start(row: i64, shape: &[i64]) -> Extents {
    let mut index = unravel(row, &shape[..shape.len() - 1]);
    index.push(0);
    index
}

/// Row number `row`.
pub fn read_row(view: &TensorView<'_>, row: i64) -> Vec<f64> {
    let mut index = row_start(row, view.shape());
    let last = index.len() - 1;
    (0..view.shape()[last])
        .map(|col| {
            index[last] = col;
            view.get(&index)
        })
        .collect()
}

/// Stores row number `row`.
pub fn write_row(output: &mut TensorMut<'_>, row: i64, values: impl IntoIterator<Item = f64>) {
    let mut index = row_start(row, output.shape());
    let last = index.len() - 1;
    for (col, value) in values.into_iter().enumerate() {
        index[last] = col as i64;
        output.set(&index, value);
    }
}

/// A whole matrix.
pub fn read_matrix(view: &TensorView<'_>) -> Matrix {
    Matrix::gather(view.shape()[0], view.shape()[1], |r, c| view.get(&[r, c]))
}

/// A whole vector.
pub fn read_vector(view: &TensorView<'_>) -> Vec<f64> {
    read_row(view, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_model::{DType, Tensor, indices};

    #[test]
    fn unraveling_follows_row_major_order() {
        for (flat, index) in indices(&[2, 3, 4]).enumerate() {
            assert_eq!(unravel(flat as i64, &[2, 3, 4]), index);
        }
        assert!(unravel(0, &[]).is_empty());
    }

    #[test]
    fn rows_of_a_transposed_tensor_are_its_columns() {
        let mut t = Tensor::from_f64(DType::F32, &[2, 3], &[0., 1., 2., 3., 4., 5.]);
        assert_eq!(read_row(&t.view().permuted(&[1, 0]), 1), [1., 4.]);
        write_row(&mut t.view_mut().into_permuted(&[1, 0]).as_mut(), 2, [8., 9.]);
        assert_eq!(t.to_f64(), [0., 1., 8., 3., 4., 9.]);
    }
}
