//! Multi-head latent attention: keys are the latent vectors with a positional part behind them,
//! values the latent vectors alone.

use std::ops::Range;

use lz_model::{KernelArgs, KernelError, TensorMut, TensorView};

use super::Reference;
use super::arguments::Arguments;
use super::indices::{clear, read_segments};
use super::matrix::Matrix;
use super::pages::{Context, PageTable};
use super::reach::Reach;
use super::softmax::{Scoring, weighted_sum, weights};

/// Latent attention over contiguous latent vectors.
pub struct Latent;

/// Latent attention over a paged cache, of one query per sequence or of packed ones.
pub struct PagedLatent;

/// The absorbed queries of a call, both parts.
struct Queries<'t> {
    nope: TensorView<'t>,
    pe: TensorView<'t>,
    heads: i64,
    dim_ckv: i64,
    dim_kpe: i64,
    scoring: Scoring,
}

impl<'t> Queries<'t> {
    fn of(args: &KernelArgs<'_, 't>) -> Queries<'t> {
        let [heads, dim_ckv, dim_kpe] = ["heads", "dim_ckv", "dim_kpe"].map(|name| args.dim(name));
        let scoring = Scoring::of(args, dim_ckv + dim_kpe);
        Queries { nope: args.tensor("q_nope"), pe: args.tensor("q_pe"), heads, dim_ckv, dim_kpe, scoring }
    }

    /// Keys and values of `len` tokens from the two parts of a token's latent vector.
    fn latents(&self, len: i64, ckv: impl Fn(i64, i64) -> f64, kpe: impl Fn(i64, i64) -> f64) -> (Matrix, Matrix) {
        let key = |j, d| {
            if d < self.dim_ckv { ckv(j, d) } else { kpe(j, d - self.dim_ckv) }
        };
        (Matrix::gather(len, self.dim_ckv + self.dim_kpe, key), Matrix::gather(len, self.dim_ckv, &ckv))
    }

    /// The attention of query row `row`, every head, to the keys that `may` allows.
    fn attend(&self, row: i64, keys: &Matrix, values: &Matrix, may: impl Fn(i64) -> bool, output: &mut TensorMut<'_>) {
        for h in 0..self.heads {
            let nope = (0..self.dim_ckv).map(|d| self.nope.get(&[row, h, d]));
            let query: Vec<f64> = nope.chain((0..self.dim_kpe).map(|d| self.pe.get(&[row, h, d]))).collect();
            let weights = weights(&query, keys, self.scoring, |j| may(j as i64).then_some(0.0));
            for (d, x) in weighted_sum(&weights, values).into_iter().enumerate() {
                output.set(&[row, h, d as i64], x);
            }
        }
    }
}

impl Reference for Latent {
    const OPS: &'static [&'static str] = &["attention.mla.prefill", "attention.mla.decode"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let (queries, reach) = (Queries::of(args), Reach::of(args));
        let (ckv, kpe) = (args.tensor("ckv"), args.tensor("kpe"));
        let [seq_q, seq_k] = ["seq_q", "seq_k"].map(|name| args.dim(name));
        let indptrs = (args.optional_tensor("qo_indptr"), args.optional_tensor("kv_indptr"));
        let sequences: Vec<(Range<i64>, Range<i64>)> = match indptrs {
            (Some(qo), Some(kv)) => {
                let (rows, tokens) = (read_segments(&qo, "qo_indptr", seq_q)?, read_segments(&kv, "kv_indptr", seq_k)?);
                rows.into_iter().zip(tokens).collect()
            }
            // One sequence, which owns everything.
            _ => vec![(0..seq_q, 0..seq_k)],
        };
        let output = &mut args.outputs[0];
        clear(output);
        for (rows, tokens) in sequences {
            let at = |view: &TensorView<'_>, j, d| latent_at(view, tokens.start + j, d);
            let (keys, values) =
                queries.latents(tokens.end - tokens.start, |j, d| at(&ckv, j, d), |j, d| at(&kpe, j, d));
            for row in rows.clone() {
                let position = tokens.end - tokens.start - (rows.end - row);
                queries.attend(row, &keys, &values, |j| reach.covers(position, j), output);
            }
        }
        Ok(())
    }
}

/// An element of a latent tensor, which may have a head axis of size 1.
fn latent_at(view: &TensorView<'_>, token: i64, d: i64) -> f64 {
    if view.shape().len() == 3 { view.get(&[token, 0, d]) } else { view.get(&[token, d]) }
}

impl Reference for PagedLatent {
    const OPS: &'static [&'static str] = &["attention.mla.decode.paged", "attention.mla.prefill.paged"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let queries = Queries::of(args);
        let (ckv, kpe) = (args.tensor("ckv_cache"), args.tensor("kpe_cache"));
        let table = PageTable::of(args);
        let reach = Reach::of(args);
        let contexts: Vec<Context> =
            (0..args.dim("batch")).map(|b| table.context(b, |_| 0)).collect::<Result<_, _>>()?;
        // Each sequence has one query, the last position, or those that the bounds give it.
        let rows: Vec<Range<i64>> = match args.optional_tensor("qo_indptr") {
            Some(bounds) => read_segments(&bounds, "qo_indptr", args.dim("seq_q"))?,
            None => (0..args.dim("batch")).map(|b| b..b + 1).collect(),
        };
        let output = &mut args.outputs[0];
        clear(output);
        for (rows, context) in rows.into_iter().zip(&contexts) {
            let at = |view: &TensorView<'_>, j, d| {
                let (page, slot) = context.slot(j);
                view.get(&[page, slot, d])
            };
            let (keys, values) = queries.latents(context.len, |j, d| at(&ckv, j, d), |j, d| at(&kpe, j, d));
            for row in rows.clone() {
                let position = context.len - (rows.end - row);
                queries.attend(row, &keys, &values, |j| reach.covers(position, j), output);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::{CallRefError, call};
    use lz_model::{DType, ParamValue, Tensor};

    const SCALE: (&str, ParamValue) = ("scale", ParamValue::Float(1.0));

    fn column(values: &[f64]) -> Tensor {
        Tensor::from_f64(DType::F64, &[values.len() as i64, 1, 1], values)
    }

    #[test]
    fn both_parts_count_towards_the_scores_and_only_the_latent_is_a_value() {
        // Scores q_nope * ckv + q_pe * kpe = 0 and ln 3: weights 1/4 and 3/4.
        let (nope, pe) = (column(&[0.0]), column(&[3f64.ln()]));
        let (ckv, kpe) = (column(&[0.0, 4.0]), column(&[0.0, 1.0]));
        let inputs = [("q_nope", nope.view()), ("q_pe", pe.view()), ("ckv", ckv.view()), ("kpe", kpe.view())];
        let out = call("attention.mla", &inputs, &[SCALE], None).unwrap()[0].1.to_f64();
        assert!((out[0] - 3.0).abs() < 1e-12);
    }

    #[test]
    fn sequences_attend_to_their_own_tokens() {
        let zeros = column(&[0.0; 4]);
        let ckv = column(&[1.0, 3.0, 10.0, 20.0]);
        let run = |qo: &[i64], kv: &[i64]| {
            let index = |x: &[i64]| Tensor::from_ints(DType::I32, &[x.len() as i64], x);
            let (qo, kv) = (index(qo), index(kv));
            let inputs = [
                ("q_nope", zeros.view()),
                ("q_pe", zeros.view()),
                ("ckv", ckv.view()),
                ("kpe", zeros.view()),
                ("qo_indptr", qo.view()),
                ("kv_indptr", kv.view()),
            ];
            Ok::<_, CallRefError>(call("attention.mla.prefill", &inputs, &[SCALE], None)?[0].1.to_f64())
        };
        // Two queries at the end of two tokens, one at the end of two, and one that nobody owns.
        assert_eq!(run(&[0, 2, 3], &[0, 2, 4]).unwrap(), [1.0, 2.0, 15.0, 0.0]);
        assert!(matches!(run(&[0, 2, 5], &[0, 2, 4]), Err(CallRefError::Kernel(e)) if e.is_callers_fault()));
        assert!(matches!(run(&[0, 2, 3], &[3, 2, 4]), Err(CallRefError::Kernel(e)) if e.is_callers_fault()));
    }
}
