//! Attention within packed sequences.

use std::ops::Range;

use lz_model::{KernelArgs, KernelError};

use super::Reference;
use super::arguments::Arguments;
use super::indices::{bad_data, cleared, read_segments};
use super::matrix::Matrix;
use super::reach::Reach;
use super::softmax::{Scoring, attend, weighted_sum};

/// Attention of the rows of each sequence to its keys.
pub struct Varlen;

impl Reference for Varlen {
    const OPS: &'static [&'static str] =
        &["attention.standard.prefill.varlen", "attention.gqa.prefill.varlen", "attention.lse.varlen"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let [query, key, value] = ["query", "key", "value"].map(|name| args.tensor(name));
        let [heads, kv_heads, head_dim, v_dim] = ["heads", "kv_heads", "head_dim", "v_dim"].map(|name| args.dim(name));
        let (reach, scoring) = (Reach::of(args), Scoring::of(args, head_dim));
        let sinks = args.optional_tensor("sinks");
        let group = heads / kv_heads.max(1);
        let (rows, tokens) = sequences(args)?;
        let (output, mut logarithms) = cleared(args);
        for (rows, tokens) in rows.into_iter().zip(tokens) {
            let length = tokens.end - tokens.start;
            for kv in 0..kv_heads {
                let keys = Matrix::gather(length, head_dim, |j, d| key.get(&[tokens.start + j, kv, d]));
                let values = Matrix::gather(length, v_dim, |j, d| value.get(&[tokens.start + j, kv, d]));
                for (row, h) in rows.clone().flat_map(|row| (kv * group..(kv + 1) * group).map(move |h| (row, h))) {
                    let numbers: Vec<f64> = (0..head_dim).map(|d| query.get(&[row, h, d])).collect();
                    let position = length - (rows.end - row);
                    let bias = |j: usize| reach.covers(position, j as i64).then_some(0.0);
                    let sink = sinks.as_ref().map(|sinks| sinks.get(&[h]));
                    let (weights, lse) = attend(&numbers, &keys, scoring, sink, bias);
                    if let Some(logarithms) = &mut logarithms {
                        logarithms.set(&[row, h], lse);
                    }
                    for (d, x) in weighted_sum(&weights, &values).into_iter().enumerate() {
                        output.set(&[row, h, d as i64], x);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Rows of queries and of keys, checked.
type Sequences = (Vec<Range<i64>>, Vec<Range<i64>>);

/// The rows of each sequence's queries and keys.
pub(crate) fn sequences(args: &KernelArgs<'_, '_>) -> Result<Sequences, KernelError> {
    let rows = read_segments(&args.tensor("cu_seqlens_q"), "cu_seqlens_q", args.dim("seq_q"))?;
    let tokens = read_segments(&args.tensor("cu_seqlens_k"), "cu_seqlens_k", args.dim("seq_k"))?;
    check_longest("max_seqlen_q", args.int("max_seqlen_q"), &rows)?;
    check_longest("max_seqlen_k", args.int("max_seqlen_k"), &tokens)?;
    Ok((rows, tokens))
}

/// No sequence is longer than was promised; 0 promises nothing.
fn check_longest(name: &'static str, promised: i64, segments: &[Range<i64>]) -> Result<(), KernelError> {
    let longest = segments.iter().map(|segment| segment.end - segment.start).max().unwrap_or(0);
    if promised > 0 && promised < longest {
        return Err(bad_data(
            name,
            &[],
            promised,
            format!("expected at least {longest}, the length of the longest sequence"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::{CallRefError, call};
    use lz_model::{DType, ParamValue, Tensor};

    fn run(rows: &[i64], tokens: &[i64], params: &[(&str, ParamValue)]) -> Result<Vec<f64>, CallRefError> {
        let column = |values: &[f64]| Tensor::from_f64(DType::F64, &[values.len() as i64, 1, 1], values);
        let index = |x: &[i64]| Tensor::from_ints(DType::I32, &[x.len() as i64], x);
        let (zeros, value) = (column(&[0.0; 4]), column(&[1.0, 3.0, 10.0, 20.0]));
        let (rows, tokens) = (index(rows), index(tokens));
        let inputs = [
            ("query", zeros.view()),
            ("key", zeros.view()),
            ("value", value.view()),
            ("cu_seqlens_q", rows.view()),
            ("cu_seqlens_k", tokens.view()),
        ];
        Ok(call("attention.varlen", &inputs, params, None)?[0].1.to_f64())
    }

    #[test]
    fn sequences_attend_to_their_own_keys() {
        // Two queries at the end of two keys, one at the end of two, and one that nobody owns.
        assert_eq!(run(&[0, 2, 3], &[0, 2, 4], &[]).unwrap(), [1.0, 2.0, 15.0, 0.0]);
        let full = [("causal", ParamValue::Bool(false))];
        assert_eq!(run(&[0, 2, 4], &[0, 2, 4], &full).unwrap(), [2.0, 2.0, 15.0, 15.0]);
        // More queries than keys: the first may attend to nothing.
        assert_eq!(run(&[0, 3, 4], &[0, 2, 2], &[]).unwrap(), [0.0, 1.0, 2.0, 0.0]);
    }

    #[test]
    fn bounds_that_do_not_fit_are_the_callers_fault() {
        for (rows, tokens) in [(&[0, 2, 5], &[0, 2, 4]), (&[0, 2, 3], &[3, 2, 4]), (&[0, 2, 3], &[0, 2, 5])] {
            assert!(matches!(run(rows, tokens, &[]), Err(CallRefError::Kernel(e)) if e.is_callers_fault()));
        }
    }

    #[test]
    fn no_sequence_is_longer_than_was_promised() {
        for name in ["max_seqlen_q", "max_seqlen_k"] {
            let longest = |n| run(&[0, 3, 4], &[0, 3, 4], &[(name, ParamValue::Int(n))]);
            assert_eq!(longest(3).unwrap(), longest(0).unwrap());
            assert!(matches!(longest(2), Err(CallRefError::Kernel(e)) if e.is_callers_fault()));
        }
    }
}
