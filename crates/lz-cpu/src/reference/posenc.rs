//! Positional encodings.

use lz_abi::TensorRef;
use lz_model::{Extents, KernelArgs, KernelError, Layout, TensorView};

use super::Reference;
use super::arguments::Arguments;
use super::indices::bad_data;
use super::rows::read_matrix;

/// Rotary embedding.
pub struct Rope;

/// Linear bias by distance.
pub struct Alibi;

impl Reference for Rope {
    const OPS: &'static [&'static str] = &["posenc.rope"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let input = args.tensor("input");
        let (cos, sin) = (read_matrix(&args.tensor("cos")), read_matrix(&args.tensor("sin")));
        let [seq, heads, head_dim, rot] = ["seq", "heads", "head_dim", "rot"].map(|name| args.dim(name));
        let layout = args.layout("input");
        let batch = if layout == Layout::Nhd { 1 } else { input.shape()[0] };
        let at = |b: i64, s: i64, h: i64, d: i64| -> Extents {
            match layout {
                Layout::Nhd => [s, h, d].into_iter().collect(),
                Layout::Bhsd => [b, h, s, d].into_iter().collect(),
                _ => [b, s, h, d].into_iter().collect(),
            }
        };
        let given = args.optional_tensor("positions");
        let positions = Positions::of(given.as_ref().map(TensorView::as_ref), batch, seq, args.dim("table"))?;
        let pairs = if rot == head_dim { head_dim / 2 } else { rot };
        let interleaved = args.flag("interleaved");
        let output = &mut args.outputs[0];

        for b in 0..batch {
            for (s, h) in (0..seq).flat_map(|s| (0..heads).map(move |h| (s, h))) {
                let position = positions.get(b, s);
                let (cos, sin) = (cos.row(position), sin.row(position));
                for pair in 0..pairs {
                    let (first, second) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + pairs) };
                    let (x, y) = (input.get(&at(b, s, h, first)), input.get(&at(b, s, h, second)));
                    let (cos, sin) = (cos[pair as usize], sin[pair as usize]);
                    output.set(&at(b, s, h, first), x * cos - y * sin);
                    output.set(&at(b, s, h, second), y * cos + x * sin);
                }
                for d in 2 * pairs..head_dim {
                    output.set(&at(b, s, h, d), input.get(&at(b, s, h, d)));
                }
            }
        }
        Ok(())
    }
}

/// The position of each token of each sequence, all of them rows of the tables.
#[derive(Clone, Copy)]
pub(crate) struct Positions<'a> {
    given: Option<TensorRef<'a>>,
    /// How many rows are given; 1 for all sequences.
    rows: i64,
}

impl<'a> Positions<'a> {
    /// Checks them.
    pub fn of(given: Option<TensorRef<'a>>, batch: i64, seq: i64, table: i64) -> Result<Positions<'a>, KernelError> {
        let rows = given.filter(|p| p.shape().len() == 2).map_or(1, |p| p.shape()[0]);
        if rows != 1 && rows != batch {
            let expected = format!("expected 1 or {batch} rows, one per sequence of the input");
            return Err(bad_data("positions", &[], rows, expected));
        }
        let positions = Positions { given, rows };
        let beyond = |value: i64| !(0..table).contains(&value);
        let mut all = (0..rows.min(batch)).flat_map(|b| (0..seq).map(move |s| (b, s)));
        match all.find(|&(b, s)| beyond(positions.value(b, s))) {
            None => Ok(positions),
            Some((b, s)) => {
                let at = if given.is_some_and(|p| p.shape().len() == 2) { vec![b, s] } else { vec![s] };
                let expected = format!("but cos and sin have rows 0 to below {table}");
                Err(bad_data("positions", &at, positions.value(b, s), expected))
            }
        }
    }

    /// Of a token of a sequence.
    #[inline]
    pub fn get(&self, b: i64, s: i64) -> usize {
        self.value(b, s) as usize
    }

    #[inline]
    fn value(&self, b: i64, s: i64) -> i64 {
        match &self.given {
            None => s,
            Some(given) if given.shape().len() == 1 => given.get_int(&[s]),
            Some(given) => given.get_int(&[if self.rows == 1 { 0 } else { b }, s]),
        }
    }
}

impl Reference for Alibi {
    const OPS: &'static [&'static str] = &["posenc.alibi"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let slopes = args.tensor("slopes");
        let [heads, seq_q, seq_k] = ["heads", "seq_q", "seq_k"].map(|name| args.dim(name));
        let output = &mut args.outputs[0];
        for h in 0..heads {
            let slope = slopes.get(&[h]);
            for (i, j) in (0..seq_q).flat_map(|i| (0..seq_k).map(move |j| (i, j))) {
                output.set(&[h, i, j], -slope * (i + seq_k - seq_q - j).abs() as f64);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::{CallRefError, call};
    use lz_model::{DType, Layout, ParamValue, Tensor};

    /// Rotates 1, 2, 3, 4, … at position 0 by 90 degrees, position 1 by 180.
    fn rotate(
        head_dim: i64,
        rot: i64,
        extra: &[(&str, &Tensor)],
        params: &[(&str, ParamValue)],
    ) -> Result<Vec<f64>, CallRefError> {
        let x: Vec<f64> = (1..=head_dim).map(|d| d as f64).collect();
        let x = Tensor::from_f64(DType::F32, &[1, 1, 1, head_dim], &x);
        let columns = |by_position: [f64; 2]| {
            let values: Vec<f64> = by_position.iter().flat_map(|&v| (0..rot).map(move |_| v)).collect();
            Tensor::from_f64(DType::F32, &[2, rot], &values)
        };
        let (cos, sin) = (columns([0.0, -1.0]), columns([1.0, 0.0]));
        let mut inputs = vec![("input", x.view()), ("cos", cos.view()), ("sin", sin.view())];
        inputs.extend(extra.iter().map(|(name, tensor)| (*name, tensor.view())));
        Ok(call("rope", &inputs, params, None)?[0].1.to_f64())
    }

    #[test]
    fn ninety_degrees_swap_the_pair_exactly() {
        let interleaved = [("interleaved", ParamValue::Bool(true))];
        assert_eq!(rotate(4, 2, &[], &[]).unwrap(), [-3., -4., 1., 2.]);
        assert_eq!(rotate(4, 4, &[], &[]).unwrap(), [-3., -4., 1., 2.]);
        assert_eq!(rotate(4, 2, &[], &interleaved).unwrap(), [-2., 1., -4., 3.]);
        assert_eq!(rotate(5, 1, &[], &[]).unwrap(), [-2., 1., 3., 4., 5.]);
    }

    #[test]
    fn given_positions_choose_the_row_of_the_tables() {
        let at = |p| Tensor::from_ints(DType::I64, &[1], &[p]);
        assert_eq!(rotate(2, 1, &[("positions", &at(1))], &[]).unwrap(), [-1., -2.]);
        for bad in [2, -1, i64::MAX / 2] {
            let result = rotate(2, 1, &[("positions", &at(bad))], &[]);
            assert!(matches!(result, Err(CallRefError::Kernel(e)) if e.is_callers_fault()));
        }
    }

    #[test]
    fn packed_tokens_have_no_batch_and_take_one_row_of_positions() {
        let x = Tensor::from_f64(DType::F32, &[2, 1, 2], &[1., 2., 3., 4.]);
        let (cos, sin) = (Tensor::zeros(DType::F32, &[2, 1]), Tensor::from_f64(DType::F32, &[2, 1], &[1., 1.]));
        let run = |rows: i64| {
            let positions = Tensor::zeros(DType::I32, &[rows, 2]);
            let inputs =
                [("input", x.view()), ("cos", cos.view()), ("sin", sin.view()), ("positions", positions.view())];
            Ok::<_, CallRefError>(call("rope", &inputs, &[], Some(Layout::Nhd))?[0].1.to_f64())
        };
        assert_eq!(run(1).unwrap(), [-2., 1., -4., 3.]);
        for rows in [0, 2] {
            assert!(run(rows).is_err());
        }
    }

    #[test]
    fn alibi_grows_with_distance_from_the_diagonal() {
        let slopes = Tensor::from_f64(DType::F32, &[2], &[1.0, 0.5]);
        let params = [("seq_q", ParamValue::Int(2)), ("seq_k", ParamValue::Int(3))];
        let out = call("posenc.alibi", &[("slopes", slopes.view())], &params, None).unwrap();
        assert_eq!(out[0].1.shape(), [2, 2, 3]);
        assert_eq!(out[0].1.to_f64()[..6], [-1., 0., -1., -2., -1., 0.]);
        assert_eq!(out[0].1.to_f64()[6..], [-0.5, 0., -0.5, -1., -0.5, 0.]);
    }
}
