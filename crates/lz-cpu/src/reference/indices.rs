//! Indices that come as data, and so can be wrong.

use std::ops::Range;

use lz_model::{KernelArgs, KernelError, TensorMut, TensorView, indices};

/// The error for a number that cannot stand where it stands.
pub fn bad_data(input: &'static str, at: &[i64], value: i64, expected: impl Into<String>) -> KernelError {
    KernelError::BadData { input, at: at.to_vec(), value, expected: expected.into() }
}

/// The index at `at`, which must be one of `0..limit`.
pub fn read_index(view: &TensorView<'_>, input: &'static str, at: &[i64], limit: i64) -> Result<i64, KernelError> {
    let value = view.get_int(at);
    if (0..limit).contains(&value) {
        return Ok(value);
    }
    Err(bad_data(input, at, value, format!("expected an index from 0 to below {limit}")))
}

/// The stretches `indptr[i] .. indptr[i + 1]`, which must ascend and stay within `0..=limit`.
pub fn read_segments(view: &TensorView<'_>, input: &'static str, limit: i64) -> Result<Vec<Range<i64>>, KernelError> {
    let mut previous = 0;
    let mut ends = Vec::with_capacity(view.len());
    for at in 0..view.shape()[0] {
        let end = view.get_int(&[at]);
        if end < previous || end > limit {
            return Err(bad_data(input, &[at], end, format!("expected {previous} to {limit}, ascending")));
        }
        ends.push(end);
        previous = end;
    }
    Ok(ends.windows(2).map(|pair| pair[0]..pair[1]).collect())
}

/// Zeros everywhere: what rows that belong to no segment keep.
pub fn clear(output: &mut TensorMut<'_>) {
    for index in indices(output.shape()) {
        output.set(&index, 0.0);
    }
}

/// The output of attention, zeros everywhere, and its logarithms if it gives them, all minus infinity: what rows that belong
/// to no sequence keep.
pub fn cleared<'a, 't>(args: &'a mut KernelArgs<'_, 't>) -> (&'a mut TensorMut<'t>, Option<&'a mut TensorMut<'t>>) {
    let mut outputs = args.outputs.iter_mut();
    let output = outputs.next().expect("the schema has it");
    clear(output);
    let mut logarithms = outputs.next();
    if let Some(lse) = &mut logarithms {
        for index in indices(lse.shape()) {
            lse.set(&index, f64::NEG_INFINITY);
        }
    }
    (output, logarithms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_model::{DType, Tensor};

    fn segments(ends: &[i64], limit: i64) -> Result<Vec<Range<i64>>, KernelError> {
        let tensor = Tensor::from_ints(DType::I32, &[ends.len() as i64], ends);
        read_segments(&tensor.view(), "indptr", limit)
    }

    #[test]
    fn segments_ascend_within_their_bounds() {
        assert_eq!(segments(&[0, 2, 2, 5], 5).unwrap(), [0..2, 2..2, 2..5]);
        assert_eq!(segments(&[1, 3, 3], 5).unwrap(), [1..3, 3..3]);
        assert_eq!(segments(&[0], 0).unwrap(), []);
        for bad in [&[0, 3, 2][..], &[-1, 2], &[0, 6]] {
            assert!(segments(bad, 5).unwrap_err().is_callers_fault(), "{bad:?}");
        }
    }
}
