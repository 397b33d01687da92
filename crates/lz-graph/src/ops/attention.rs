//! Attention.

use lz_abi::{DType, KernelError, Tensor, TensorView, indices};
use serde::{Deserialize, Serialize};

use super::elements::{Number, at, broadcast, fill, given, same};
use super::layer_norm::floats;
use super::{Cost, OpDef};
use crate::ir::{Dim, Inputs, Meta, ShapeError};

/// `softmax(scale · q·kᵀ + mask)·v` for each head.
///
/// Inputs: q (batch, heads, queries, width), k (batch, kv heads, keys, width), v (batch, kv heads, keys, value width), and a mask
/// that is broadcast to (batch, heads, queries, keys): truth values say which keys count, numbers are added to the scores.
/// Several heads of q share one of k and v if there are more of them. A query without any key gives 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Whether keys after the query do not count. The last query is at the last key, unless `top_left`.
    #[serde(default)]
    pub causal: bool,
    /// Whether the first query is at the first key, as torch's `is_causal` has it.
    #[serde(default)]
    pub top_left: bool,
    /// What scores are multiplied with; without it 1/sqrt(width).
    #[serde(default)]
    pub scale: Option<f64>,
    /// How many keys before the query count.
    #[serde(default)]
    pub window: Option<i64>,
    /// `c · tanh(score / c)` in the place of each score.
    #[serde(default)]
    pub softcap: Option<f64>,
}

impl OpDef for Attention {
    const NAME: &'static str = "attention";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(4)?;
        let (q, k, v) = (inputs.need(0)?, inputs.need(1)?, inputs.need(2)?);
        for (i, meta) in [q, k, v].into_iter().enumerate() {
            floats(i, meta)?;
            if meta.rank() != 4 {
                return Err(ShapeError::Rank { at: i, rank: meta.rank(), expected: "four" });
            }
            if meta.dtype != q.dtype {
                let expected = format!("what input 0 is, {}", q.dtype);
                return Err(ShapeError::Type { at: i, dtype: meta.dtype, expected });
            }
        }
        let batch = same(&q.shape[0], &k.shape[0])?;
        same(&batch, &v.shape[0])?;
        same(&k.shape[1], &v.shape[1])?;
        same(&k.shape[2], &v.shape[2])?;
        same(&q.shape[3], &k.shape[3])?;
        if let (Some(heads), Some(shared)) = (q.shape[1].known(), k.shape[1].known())
            && (shared == 0 || heads % shared != 0)
        {
            return Err(ShapeError::sizes(&q.shape[1], &k.shape[1]));
        }
        let shape = [&batch, &q.shape[1], &q.shape[2], &v.shape[3]].map(Dim::clone);
        if let Some(mask) = inputs.get(3) {
            if mask.dtype != DType::Bool {
                floats(3, mask)?;
            }
            let scores = Meta::new(q.dtype, [&batch, &q.shape[1], &q.shape[2], &k.shape[2]].map(Dim::clone));
            if mask.rank() > 4 || broadcast(&scores, mask)? != scores.shape {
                return Err(ShapeError::Sizes { left: scores.to_string(), right: mask.to_string() });
            }
        }
        for (name, number) in [("scale", self.scale), ("softcap", self.softcap)] {
            if let Some(number) = number.filter(|x| !x.is_finite() || name == "softcap" && *x <= 0.0) {
                let expected = "a finite number, and a cap above 0".to_owned();
                return Err(ShapeError::Attribute { name, value: number.to_string(), expected });
            }
        }
        if let Some(window) = self.window.filter(|&keys| keys < 0) {
            let expected = "0 or more keys".to_owned();
            return Err(ShapeError::Attribute { name: "window", value: window.to_string(), expected });
        }
        Ok(Meta::new(q.dtype, shape))
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (q, k, v) = (given(inputs, 0), given(inputs, 1), given(inputs, 2));
        let mask = inputs.get(3).and_then(Option::as_ref);
        let (heads, queries, width) = (q.shape()[1], q.shape()[2], q.shape()[3]);
        let (shared, keys) = (k.shape()[1], k.shape()[2]);
        let scale = self.scale.unwrap_or(1.0 / (width as f64).sqrt());
        let shift = if self.top_left { 0 } else { keys - queries };
        // The weights of all keys, by (batch, head, query).
        let rows: Vec<Vec<f64>> = indices(&q.shape()[..3])
            .map(|row| {
                let (b, h, i) = (row[0], row[1], row[2]);
                let score = |j: i64| {
                    let ahead = j - i - shift;
                    if self.causal && ahead > 0 || self.window.is_some_and(|before| -ahead > before) {
                        return f64::NEG_INFINITY;
                    }
                    let product =
                        (0..width).map(|d| q.get(&[b, h, i, d]) * k.get(&[b, h * shared / heads, j, d])).sum::<f64>();
                    let score = self.softcap.map_or(scale * product, |cap| cap * (scale * product / cap).tanh());
                    match mask.map(|mask| (mask.dtype(), mask.get(&at(mask, &[b, h, i, j])))) {
                        None => score,
                        Some((DType::Bool, 0.0)) => f64::NEG_INFINITY,
                        Some((DType::Bool, _)) => score,
                        Some((_, added)) => score + added,
                    }
                };
                let scores: Vec<f64> = (0..keys).map(score).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, |a, b| if b.is_nan() { b } else { a.max(b) });
                if most == f64::NEG_INFINITY {
                    return vec![0.0; scores.len()];
                }
                let sum: f64 = scores.iter().map(|x| (x - most).exp()).sum();
                scores.iter().map(|x| (x - most).exp() / sum).collect()
            })
            .collect();
        fill(output, |index| {
            let (b, h, i) = (index[0], index[1], index[2]);
            let weights = &rows[((b * heads + h) * queries + i) as usize];
            // A key without weight adds nothing, whatever its value is.
            let used = weights.iter().zip(0..).filter(|(weight, _)| **weight != 0.0);
            Number::Float(used.map(|(weight, j)| weight * v.get(&[b, h * shared / heads, j, index[3]])).sum())
        });
        Ok(())
    }

    fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
        let number = |meta: &Meta| meta.len().known().unwrap_or(0) as f64;
        let keys = inputs.get(1).and_then(|k| k.shape[2].known()).unwrap_or(0) as f64;
        let products = keys * (inputs.get(0).map_or(0.0, number) + number(output));
        let bytes = |meta: &Meta| meta.dtype.bytes_for(meta.len().known().unwrap_or(0) as usize) as f64;
        let read: f64 = inputs.0.iter().flatten().map(|meta| bytes(meta)).sum();
        Cost { flops: 2.0 * products * if self.causal { 0.5 } else { 1.0 }, bytes: read + bytes(output) }
    }

    /// The catalog's name of all dense attention: by the numbers of heads and of queries it is one of several. None of them is
    /// aligned at the first key.
    fn operation(&self) -> Option<&'static str> {
        (!(self.top_left && self.causal)).then_some("attention")
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{evaluated, meta, refused, scattered};
    use super::super::matmul::MatMul;
    use super::super::softmax::Softmax;
    use super::*;
    use proptest::prelude::*;

    fn plain() -> Attention {
        Attention { causal: false, top_left: false, scale: None, window: None, softcap: None }
    }

    /// Which keys count, seen by what a value of 1 at one key gives.
    fn seen(op: &Attention, queries: i64, keys: i64) -> Vec<Vec<bool>> {
        let zeros = |n| Tensor::zeros(DType::F64, &[1, 1, n, 1]);
        let weight = |j: usize| {
            let values: Vec<f64> = (0..keys as usize).map(|i| if i == j { 1.0 } else { 0.0 }).collect();
            let v = Tensor::from_f64(DType::F64, &[1, 1, keys, 1], &values);
            evaluated(op.clone(), &[&zeros(queries), &zeros(keys), &v]).to_f64()
        };
        let columns: Vec<Vec<f64>> = (0..keys as usize).map(weight).collect();
        (0..queries as usize).map(|i| columns.iter().map(|column| column[i] > 0.0).collect()).collect()
    }

    #[test]
    fn positions_are_aligned_at_the_end_or_at_the_start() {
        let (t, f) = (true, false);
        let causal = Attention { causal: true, ..plain() };
        assert_eq!(seen(&causal, 2, 3), [[t, t, f], [t, t, t]]);
        assert_eq!(seen(&Attention { top_left: true, ..causal.clone() }, 2, 3), [[t, f, f], [t, t, f]]);
        assert_eq!(seen(&Attention { window: Some(1), ..causal.clone() }, 3, 3), [[t, f, f], [t, t, f], [f, t, t]]);
        // A query before all keys sees none.
        assert_eq!(seen(&causal, 2, 1), [[f], [t]]);
    }

    #[test]
    fn wrong_inputs_are_refused() {
        let q = meta(DType::F32, &[1, 3, 2, 4]);
        let k = meta(DType::F32, &[1, 2, 2, 4]);
        assert_eq!(refused(&plain(), &[&q, &k, &k]), "sizes 3 and 2 do not fit together");
        let flat = meta(DType::F32, &[2, 4]);
        assert!(refused(&plain(), &[&flat, &k, &k]).contains("takes four"));
        let mask = meta(DType::I64, &[2, 2]);
        assert!(refused(&plain(), &[&k, &k, &k, &mask]).contains("floats"));
        let large = meta(DType::Bool, &[5, 2]);
        assert!(refused(&plain(), &[&k, &k, &k, &large]).contains("do not fit"));
        assert!(refused(&Attention { softcap: Some(0.0), ..plain() }, &[&k, &k, &k]).contains("'softcap'"));
    }

    proptest! {
        /// It is what its parts give: product, mask, softmax, product.
        #[test]
        fn it_is_its_decomposition(
            batch in 1i64..3, shared in 1i64..3, group in 1i64..3, queries in 1i64..4, keys in 1i64..5, bits in 0u32..1 << 12,
        ) {
            let q = scattered(&[batch, shared * group, queries, 3], 1);
            let (k, v) = (scattered(&[batch, shared, keys, 3], 2), scattered(&[batch, shared, keys, 2], 3));
            // The first key always counts.
            let kept: Vec<i64> = (0..queries * keys)
                .map(|i| i64::from(i % keys == 0 || bits >> (i % 12) & 1 == 1)).collect();
            let mask = Tensor::from_ints(DType::Bool, &[queries, keys], &kept);
            let added = Tensor::from_f64(
                DType::F64, &[queries, keys],
                &kept.iter().map(|&keep| if keep == 1 { 0.0 } else { f64::NEG_INFINITY }).collect::<Vec<_>>(),
            );
            let repeated = |x: &Tensor| {
                let (n, d) = (x.shape()[2], x.shape()[3]);
                let five = super::super::reshape::Reshape { shape: [batch, shared, 1, n, d].map(Dim::from).to_vec() };
                let wide = super::super::expand::Expand { shape: [batch, shared, group, n, d].map(Dim::from).to_vec() };
                let four = super::super::reshape::Reshape { shape: [batch, shared * group, n, d].map(Dim::from).to_vec() };
                evaluated(four, &[&evaluated(wide, &[&evaluated(five, &[x])])])
            };
            let product = MatMul { transpose_b: true, alpha: 0.3, ..MatMul::default() };
            let scores = evaluated(product, &[&q, &repeated(&k)]);
            let add = super::super::binary::Binary { kind: super::super::binary::BinaryKind::Add };
            let weights = evaluated(Softmax { axis: -1 }, &[&evaluated(add, &[&scores, &added])]);
            let expected = evaluated(MatMul::default(), &[&weights, &repeated(&v)]).to_f64();
            for mask in [&mask, &added] {
                let found = evaluated(Attention { scale: Some(0.3), ..plain() }, &[&q, &k, &v, mask]).to_f64();
                for (a, b) in found.iter().zip(&expected) {
                    prop_assert!((a - b).abs() < 1e-12, "{a} {b}");
                }
            }
        }
    }
}
