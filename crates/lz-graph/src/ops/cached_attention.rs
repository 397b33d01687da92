//! Attention over the part of a cache that is written.

use lz_abi::{DType, KernelError, Tensor, TensorView, indices};
use serde::{Deserialize, Serialize};

use super::attention::Attention;
use super::elements::{given, indices_at, same};
use super::{Cost, OpDef};
use crate::ir::{Inputs, Meta, ShapeError};

/// Causal attention of new tokens over a cache that has room for more keys than are written.
///
/// Inputs: q (batch, heads, queries, width), keys (batch, kv heads, capacity, width), values (batch, kv heads, capacity, value
/// width), the position of the first query (one integer), and optionally the first key of each sequence (batch). Query i is
/// at `position + i`, and attends to the keys from the first of its sequence up to its own position. Keys after the last
/// query are not read. A query before the first key of its sequence, which is padding, gives 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CachedAttention {
    /// What scores are multiplied with; without it 1/sqrt(width).
    pub scale: Option<f64>,
    /// How many keys before the query count.
    pub window: Option<i64>,
    /// `c · tanh(score / c)` in the place of each score.
    pub softcap: Option<f64>,
}

impl CachedAttention {
    /// The same over keys that end at the last query.
    pub fn dense(&self) -> Attention {
        Attention { causal: true, top_left: false, scale: self.scale, window: self.window, softcap: self.softcap }
    }
}

/// The keys that the queries of a call may attend to, for each sequence: from the first up to, not including, the end.
///
/// `firsts`: the first key of each sequence; without it 0. `window`: keys before the first query that are in reach.
pub fn spans(
    position: &TensorView<'_>,
    firsts: Option<&TensorView<'_>>,
    (batch, queries, capacity): (i64, i64, i64),
    window: Option<i64>,
) -> Result<(impl Fn(i64) -> i64, i64), KernelError> {
    let zero = [0; 1];
    let place = &zero[..position.shape().len()];
    let at = position.get_int(place);
    if !(0..=capacity - queries).contains(&at) {
        let expected = format!("0 to {}: the cache has room for {capacity} tokens", capacity - queries);
        return Err(KernelError::BadData { input: "position", at: Vec::new(), value: at, expected });
    }
    let end = at + queries;
    if let Some(firsts) = firsts {
        for sequence in 0..batch {
            let first = firsts.get_int(&[sequence]);
            if !(0..=end).contains(&first) {
                let expected = format!("0 to {end}, the tokens there are");
                return Err(KernelError::BadData { input: "first", at: vec![sequence], value: first, expected });
            }
        }
    }
    let reach = window.map_or(0, |before| (at - before).max(0));
    let firsts = firsts.cloned();
    Ok((move |sequence| firsts.as_ref().map_or(0, |firsts| firsts.get_int(&[sequence])).max(reach).min(end), end))
}

impl OpDef for CachedAttention {
    const NAME: &'static str = "cached_attention";

    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
        inputs.at_most(5)?;
        let (q, k, v, position) = (inputs.need(0)?, inputs.need(1)?, inputs.need(2)?, inputs.need(3)?);
        let output = self.dense().infer(Inputs(&[Some(q), Some(k), Some(v)]))?;
        indices_at(3, position)?;
        if position.rank() > 1 || position.len().known().is_some_and(|count| count != 1) {
            return Err(ShapeError::Rank { at: 3, rank: position.rank(), expected: "one number" });
        }
        if let Some(firsts) = inputs.get(4) {
            indices_at(4, firsts)?;
            if firsts.rank() != 1 {
                return Err(ShapeError::Rank { at: 4, rank: firsts.rank(), expected: "one" });
            }
            same(&q.shape[0], &firsts.shape[0])?;
        }
        Ok(output)
    }

    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
        let (q, k, v) = (given(inputs, 0), given(inputs, 1), given(inputs, 2));
        let firsts = inputs.get(4).and_then(Option::as_ref);
        let (batch, queries, capacity) = (q.shape()[0], q.shape()[2], k.shape()[2]);
        // The window is told by each query, not by the first.
        let (first, end) = spans(given(inputs, 3), firsts, (batch, queries, capacity), None)?;
        let kept = indices(&[batch, 1, queries, end]).map(|index| {
            let (first, query, key) = (first(index[0]), end - queries + index[2], index[3]);
            i64::from(first <= key && key <= query && self.window.is_none_or(|before| query - key <= before))
        });
        let mask = Tensor::from_ints(DType::Bool, &[batch, 1, queries, end], &kept.collect::<Vec<_>>());
        let (k, v) = (k.part(2, 0, end), v.part(2, 0, end));
        let plain = Attention { causal: false, window: None, ..self.dense() };
        plain.evaluate(&[Some(q.clone()), Some(k), Some(v), Some(mask.view())], output)
    }

    /// As if the cache were full: how much of it is written is not known before it runs.
    fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
        self.dense().cost(Inputs(&inputs.0[..inputs.0.len().min(3)]), output)
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::{evaluated, meta, refused, scattered, tried};
    use super::*;
    use lz_abi::DType;

    /// Tensors of a call with two sequences, four heads over two, and a cache of seven.
    fn tensors(queries: i64) -> [Tensor; 3] {
        [scattered(&[2, 4, queries, 3], 1), scattered(&[2, 2, 7, 3], 2), scattered(&[2, 2, 7, 2], 3)]
    }

    fn at(position: i64) -> Tensor {
        Tensor::from_ints(DType::I64, &[1], &[position])
    }

    #[test]
    fn it_is_attention_over_what_is_written() {
        for (queries, window) in [(1, None), (3, None), (3, Some(1)), (1, Some(2))] {
            let [q, k, v] = tensors(queries);
            let op = CachedAttention { window, ..CachedAttention::default() };
            let written = |cache: &Tensor| cache.view().part(2, 0, 2 + queries).to_tensor();
            let expected = evaluated(op.dense(), &[&q, &written(&k), &written(&v)]).to_f64();
            assert_eq!(evaluated(op, &[&q, &k, &v, &at(2)]).to_f64(), expected);
        }
    }

    #[test]
    fn a_sequence_begins_at_its_first_key() {
        let [q, k, v] = tensors(3);
        let firsts = Tensor::from_ints(DType::I64, &[2], &[0, 2]);
        let found = evaluated(CachedAttention::default(), &[&q, &k, &v, &at(1), &firsts]);
        // The second sequence has the keys 2 and 3: its first query, at 1, is padding.
        let row = |view: TensorView<'_>, first, len| view.part(0, 1, 1).part(2, first, len).to_tensor();
        let (q, k, v) = (row(q.view(), 1, 2), row(k.view(), 2, 2), row(v.view(), 2, 2));
        let expected = evaluated(CachedAttention::default().dense(), &[&q, &k, &v]).to_f64();
        assert_eq!(row(found.view(), 1, 2).to_f64(), expected);
        assert!(row(found.view(), 0, 1).to_f64().iter().all(|&x| x == 0.0));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let [q, k, v] = tensors(3);
        let run = |position: i64, firsts: &[i64]| {
            let firsts = Tensor::from_ints(DType::I64, &[2], firsts);
            let given = [Some(&q), Some(&k), Some(&v), Some(&at(position)), Some(&firsts)].map(|one| one.cloned());
            let given: Vec<Option<&Tensor>> = given.iter().map(Option::as_ref).collect();
            tried(CachedAttention::default(), &given).unwrap_err().to_string()
        };
        assert_eq!(run(5, &[0, 0]), "position is 5, 0 to 4: the cache has room for 7 tokens");
        assert_eq!(run(-1, &[0, 0]), "position is -1, 0 to 4: the cache has room for 7 tokens");
        assert_eq!(run(1, &[0, 5]), "first[1] is 5, 0 to 4, the tokens there are");
        let (q, k) = (meta(DType::F32, &[1, 2, 1, 4]), meta(DType::F32, &[1, 2, 8, 4]));
        let position = meta(DType::F32, &[1]);
        assert!(refused(&CachedAttention::default(), &[&q, &k, &k, &position]).contains("int64 or int32"));
        let position = meta(DType::I64, &[2]);
        assert!(refused(&CachedAttention::default(), &[&q, &k, &k, &position]).contains("one number"));
    }
}
