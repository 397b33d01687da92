//! Dense attention: standard, grouped-query and cross.

use lz_model::{DType, KernelArgs, KernelError, Layout, TensorView};

use super::Reference;
use super::arguments::Arguments;
use super::matrix::Matrix;
use super::random::uniform;
use super::reach::Reach;
use super::softmax::{Scoring, attend, weighted_sum};

/// Attention over contiguous keys and values.
pub struct Dense;

impl Reference for Dense {
    const OPS: &'static [&'static str] = &[
        "attention.standard.prefill",
        "attention.standard.decode",
        "attention.gqa.prefill",
        "attention.gqa.decode",
        "attention.cross.prefill",
        "attention.cross.decode",
        "attention.lse",
    ];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        // Everything below is in the order batch, head, position, element.
        let order = if args.layout("query") == Layout::Bhsd { [0, 1, 2, 3] } else { [0, 2, 1, 3] };
        let [query, key, value] = ["query", "key", "value"].map(|name| args.tensor(name).permuted(&order));
        let [batch, heads, kv_heads] = ["batch", "heads", "kv_heads"].map(|name| args.dim(name));
        let [seq_q, seq_k, head_dim, v_dim] = ["seq_q", "seq_k", "head_dim", "v_dim"].map(|name| args.dim(name));
        let mask = args.optional_tensor("attn_mask");
        let slopes = args.optional_tensor("alibi_slopes");
        let sinks = args.optional_tensor("sinks");
        let (reach, scoring, dropout) = (Reach::of(args), Scoring::of(args, head_dim), Dropout::of(args));
        let group = heads / kv_heads.max(1);
        let mut outputs = args.outputs.iter_mut();
        let mut output = outputs.next().expect("the schema has it").view_mut().into_permuted(&order);
        // Of attention that gives the logarithms too, in the same order.
        let mut logarithms = outputs.next().map(|lse| lse.view_mut().into_permuted(&order[..3]));

        for (b, kv) in (0..batch).flat_map(|b| (0..kv_heads).map(move |kv| (b, kv))) {
            let keys = Matrix::gather(seq_k, head_dim, |j, d| key.get(&[b, kv, j, d]));
            let values = Matrix::gather(seq_k, v_dim, |j, d| value.get(&[b, kv, j, d]));
            for (h, i) in (kv * group..(kv + 1) * group).flat_map(|h| (0..seq_q).map(move |i| (h, i))) {
                let row: Vec<f64> = (0..head_dim).map(|d| query.get(&[b, h, i, d])).collect();
                let position = i + seq_k - seq_q;
                let slope = slopes.as_ref().map_or(0.0, |s| s.get(&[h]));
                let bias = |j: usize| {
                    let j = j as i64;
                    let distance = if slope == 0.0 { 0.0 } else { -slope * (position - j).abs() as f64 };
                    let masked = mask.as_ref().map_or(Some(0.0), |mask| mask_bias(mask, [b, h, i, j]))?;
                    reach.covers(position, j).then_some(distance + masked)
                };
                let sink = sinks.as_ref().map(|sinks| sinks.get(&[h]));
                let (mut weights, lse) = attend(&row, &keys, scoring, sink, bias);
                if let Some(logarithms) = &mut logarithms {
                    logarithms.set(&[b, h, i], lse);
                }
                dropout.apply(&mut weights, ((b * heads + h) * seq_q + i) * seq_k);
                for (d, x) in weighted_sum(&weights, &values).into_iter().enumerate() {
                    output.set(&[b, h, i, d as i64], x);
                }
            }
        }
        Ok(())
    }
}

/// What a mask adds to the score at (batch, head, query, key), or `None` where it forbids it.
/// Axes of size 1 count for every index.
fn mask_bias(mask: &TensorView<'_>, at: [i64; 4]) -> Option<f64> {
    let at = &at[4 - mask.shape().len()..];
    let mut index = [0; 4];
    for (axis, (&size, &i)) in mask.shape().iter().zip(at).enumerate() {
        index[axis] = if size == 1 { 0 } else { i };
    }
    let value = mask.get(&index[..at.len()]);
    match mask.dtype() {
        DType::Bool => (value != 0.0).then_some(0.0),
        _ => (value != f64::NEG_INFINITY).then_some(value),
    }
}

/// Drops weights at random and makes up for them in those that stay.
struct Dropout {
    p: f64,
    seed: i64,
}

impl Dropout {
    fn of(args: &KernelArgs<'_, '_>) -> Dropout {
        Dropout { p: args.float_or("dropout_p", 0.0), seed: args.int_or("seed", 0) }
    }

    /// Weight number `first + j` of the whole operation is `weights[j]`.
    fn apply(&self, weights: &mut [f64], first: i64) {
        if self.p <= 0.0 {
            return;
        }
        for (j, weight) in weights.iter_mut().enumerate() {
            let keep = uniform(self.seed, first as u64 + j as u64) >= self.p;
            *weight = if keep { *weight / (1.0 - self.p) } else { 0.0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::call;
    use lz_model::{DType, Layout, ParamValue, Tensor};

    /// One head of width 1 in one sequence.
    fn run(q: &[f64], k: &[f64], v: &[f64], extra: &[(&str, &Tensor)], params: &[(&str, ParamValue)]) -> Vec<f64> {
        let column = |x: &[f64]| Tensor::from_f64(DType::F64, &[1, x.len() as i64, 1, 1], x);
        let (q, k, v) = (column(q), column(k), column(v));
        let mut inputs = vec![("query", q.view()), ("key", k.view()), ("value", v.view())];
        inputs.extend(extra.iter().map(|(name, tensor)| (*name, tensor.view())));
        call("attention", &inputs, params, Some(Layout::Bshd)).unwrap()[0].1.to_f64()
    }

    const FULL: (&str, ParamValue) = ("causal", ParamValue::Bool(false));

    #[test]
    fn one_key_gives_its_value_and_equal_keys_the_mean() {
        assert_eq!(run(&[3.0], &[2.0], &[7.0], &[], &[]), [7.0]);
        assert_eq!(run(&[3.0], &[2.0, 2.0], &[1.0, 5.0], &[], &[]), [3.0]);
    }

    #[test]
    fn weights_are_the_exponentials_of_the_scores() {
        // Scores 0 and ln 3: weights 1/4 and 3/4.
        let out = run(&[3f64.ln()], &[0.0, 1.0], &[0.0, 4.0], &[], &[]);
        assert!((out[0] - 3.0).abs() < 1e-12);
        // Half the scale: weights 1 : sqrt(3).
        let out = run(&[3f64.ln()], &[0.0, 1.0], &[0.0, 1.0], &[], &[("scale", ParamValue::Float(0.5))]);
        assert!((out[0] - 3f64.sqrt() / (1.0 + 3f64.sqrt())).abs() < 1e-12);
    }

    #[test]
    fn causal_is_aligned_bottom_right() {
        let v = [1.0, 3.0, 11.0];
        assert_eq!(run(&[0.0; 3], &[0.0; 3], &v, &[], &[]), [1.0, 2.0, 5.0]);
        assert_eq!(run(&[0.0; 2], &[0.0; 3], &v, &[], &[]), [2.0, 5.0]);
        // With more queries than keys the first may attend to nothing.
        let until_aligned = [FULL, ("window_right", ParamValue::Int(0))];
        assert_eq!(run(&[0.0; 4], &[0.0; 3], &v, &[], &until_aligned), [0.0, 1.0, 2.0, 5.0]);
        let window = [("window_left", ParamValue::Int(1))];
        assert_eq!(run(&[0.0; 3], &[0.0; 3], &v, &[], &window), [1.0, 2.0, 7.0]);
        let both = [FULL, ("window_left", ParamValue::Int(0)), ("window_right", ParamValue::Int(1))];
        assert_eq!(run(&[0.0; 3], &[0.0; 3], &v, &[], &both), [2.0, 7.0, 11.0]);
    }

    #[test]
    fn masks_forbid_or_add() {
        let v = [2.0, 4.0];
        let only_second = Tensor::from_f64(DType::Bool, &[1, 2], &[0.0, 1.0]);
        assert_eq!(run(&[0.0; 2], &[0.0; 2], &v, &[("attn_mask", &only_second)], &[FULL]), [4.0, 4.0]);
        let none = f64::NEG_INFINITY;
        let additive = Tensor::from_f64(DType::F32, &[1, 1, 2, 2], &[none, none, 0.0, none]);
        assert_eq!(run(&[0.0; 2], &[0.0; 2], &v, &[("attn_mask", &additive)], &[FULL]), [0.0, 2.0]);
    }

    #[test]
    fn a_nan_counts_only_where_it_takes_part() {
        let out = run(&[0.0; 2], &[0.0, f64::NAN], &[1.0, f64::NAN], &[], &[]);
        assert_eq!(out[0], 1.0);
        assert!(out[1].is_nan());
    }

    #[test]
    fn alibi_prefers_near_keys_and_softcap_bounds_scores() {
        // Distances 1 and 0 with slope ln 3: weights 1/4 and 3/4.
        let slope = Tensor::from_f64(DType::F64, &[1], &[3f64.ln()]);
        let out = run(&[0.0], &[0.0, 0.0], &[0.0, 4.0], &[("alibi_slopes", &slope)], &[]);
        assert!((out[0] - 3.0).abs() < 1e-12);
        // A huge score is capped to ln 3.
        let out = run(&[1e9], &[0.0, 1.0], &[0.0, 4.0], &[], &[("softcap", ParamValue::Float(3f64.ln()))]);
        assert!((out[0] - 3.0).abs() < 1e-12);
    }

    #[test]
    fn dropout_keeps_the_expected_value() {
        let n = 4000;
        let params = [FULL, ("dropout_p", ParamValue::Float(0.25)), ("seed", ParamValue::Int(7))];
        let out = run(&vec![0.0; n], &[0.0, 0.0], &[1.0, 1.0], &[], &params);
        assert!(out.iter().all(|x| { [0.0, 2.0 / 3.0, 4.0 / 3.0].iter().any(|e| (x - e).abs() < 1e-12) }));
        assert!((out.iter().sum::<f64>() / n as f64 - 1.0).abs() < 0.03);
        let other = run(&vec![0.0; n], &[0.0, 0.0], &[1.0, 1.0], &[], &[params[0], params[1]]);
        assert_ne!(out, other);
    }

    #[test]
    fn empty_sequences_give_zeros_or_nothing() {
        assert_eq!(run(&[1.0, 2.0], &[], &[], &[], &[FULL]), [0.0, 0.0]);
        assert!(run(&[], &[1.0], &[1.0], &[], &[]).is_empty());
    }

    #[test]
    fn sinks_join_the_softmax_of_their_head() {
        // Equal scores of two keys, and a sink as heavy as both: half of the mean.
        let sink = Tensor::from_f64(DType::F32, &[1], &[2f64.ln()]);
        let out = run(&[0.0], &[0.0, 0.0], &[2.0, 6.0], &[("sinks", &sink)], &[]);
        assert!((out[0] - 2.0).abs() < 1e-6);
    }

    #[test]
    fn logarithms_come_in_the_order_of_the_output() {
        let q = Tensor::zeros(DType::F64, &[1, 2, 1, 1]);
        let k = Tensor::zeros(DType::F64, &[1, 3, 1, 1]);
        let inputs = [("query", q.view()), ("key", k.view()), ("value", k.view())];
        let given = call("attention.lse", &inputs, &[], Some(Layout::Bshd)).unwrap();
        assert_eq!(given[1].0, "lse");
        assert_eq!((given[1].1.shape(), given[1].1.dtype()), (&[1, 2, 1][..], DType::F32));
        let lse = given[1].1.to_f64();
        assert!((lse[0] - 2f64.ln()).abs() < 1e-6 && (lse[1] - 3f64.ln()).abs() < 1e-6);
    }
}
