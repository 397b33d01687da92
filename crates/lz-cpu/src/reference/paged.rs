//! Attention over a paged key/value cache.

use std::ops::Range;

use lz_model::{Extents, KernelArgs, KernelError, Layout};

use super::Reference;
use super::arguments::Arguments;
use super::indices::{cleared, read_segments};
use super::matrix::Matrix;
use super::pages::{Context, PageTable};
use super::reach::Reach;
use super::softmax::{Scoring, attend, weighted_sum};

/// Decode, which is one query at the end of each sequence, and prefill, which is several.
pub struct Paged;

impl Reference for Paged {
    const OPS: &'static [&'static str] = &[
        "attention.standard.prefill.paged",
        "attention.standard.decode.paged",
        "attention.gqa.prefill.paged",
        "attention.gqa.decode.paged",
        "attention.lse.paged",
    ];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let query = args.tensor("query");
        let has_unit_axis = query.shape().len() == 4;
        let at = |row: i64, head: i64, d: i64| -> Extents {
            if has_unit_axis { [row, 0, head, d].into_iter().collect() } else { [row, head, d].into_iter().collect() }
        };
        // Caches are in the order page, slot, head, element.
        let order = if args.layout("key_cache") == Layout::Hnd { [0, 2, 1, 3] } else { [0, 1, 2, 3] };
        let [key_cache, value_cache] = ["key_cache", "value_cache"].map(|name| args.tensor(name).permuted(&order));
        let [heads, kv_heads, head_dim] = ["heads", "kv_heads", "head_dim"].map(|name| args.dim(name));
        let (reach, scoring) = (Reach::of(args), Scoring::of(args, head_dim));
        let group = heads / kv_heads.max(1);
        let sequences = sequences(args, reach)?;

        let sinks = args.optional_tensor("sinks");
        let (output, mut logarithms) = cleared(args);
        for (rows, context) in sequences {
            for kv in 0..kv_heads {
                let gather = |cache: &lz_model::TensorView<'_>| {
                    Matrix::gather(context.read(), head_dim, |j, d| {
                        let (page, slot) = context.slot(context.first + j);
                        cache.get(&[page, slot, kv, d])
                    })
                };
                let (keys, values) = (gather(&key_cache), gather(&value_cache));
                for (row, h) in rows.clone().flat_map(|row| (kv * group..(kv + 1) * group).map(move |h| (row, h))) {
                    let numbers: Vec<f64> = (0..head_dim).map(|d| query.get(&at(row, h, d))).collect();
                    let position = context.len - (rows.end - row);
                    let bias = |j: usize| reach.covers(position, context.first + j as i64).then_some(0.0);
                    let sink = sinks.as_ref().map(|sinks| sinks.get(&[h]));
                    let (weights, lse) = attend(&numbers, &keys, scoring, sink, bias);
                    if let Some(logarithms) = &mut logarithms {
                        // In the order of the query, without its elements.
                        let place = at(row, h, 0);
                        logarithms.set(&place[..place.len() - 1], lse);
                    }
                    for (d, x) in weighted_sum(&weights, &values).into_iter().enumerate() {
                        output.set(&at(row, h, d as i64), x);
                    }
                }
            }
        }
        Ok(())
    }
}

/// The query rows of each sequence with its context, of which only what the queries reach is read.
fn sequences(args: &KernelArgs<'_, '_>, reach: Reach) -> Result<Vec<(Range<i64>, Context)>, KernelError> {
    let rows = match args.optional_tensor("cu_seqlens_q") {
        Some(ends) => read_segments(&ends, "cu_seqlens_q", args.dim("seq_q"))?,
        None => (0..args.dim("batch")).map(|b| b..b + 1).collect(),
    };
    let table = PageTable::of(args);
    let with_context = |(b, rows): (usize, Range<i64>)| {
        let queries = rows.end - rows.start;
        let first = |len: i64| {
            if queries == 0 { len } else { reach.first_key(len - queries) }
        };
        Ok((rows, table.context(b as i64, first)?))
    };
    rows.into_iter().enumerate().map(with_context).collect()
}

#[cfg(test)]
mod tests {
    use crate::{CallRefError, call};
    use lz_model::{DType, KernelError, ParamValue, Tensor};

    /// One head of width 1 with zero keys: a query gives the mean of the values it attends to.
    fn mean(
        op: &str,
        queries: i64,
        pages: &[i64],
        len: i64,
        cu: Option<&[i64]>,
        params: &[(&str, ParamValue)],
    ) -> Result<Vec<f64>, CallRefError> {
        let query = Tensor::zeros(DType::F32, &[queries, 1, 1]);
        let keys = Tensor::zeros(DType::F32, &[3, 2, 1, 1]);
        let values = Tensor::from_f64(DType::F32, &[3, 2, 1, 1], &[0., 1., 20., 30., 400., 500.]);
        let table = Tensor::from_ints(DType::I32, &[1, pages.len() as i64], pages);
        let lens = Tensor::from_ints(DType::I32, &[1], &[len]);
        let cu = cu.map(|cu| Tensor::from_ints(DType::I32, &[cu.len() as i64], cu));
        let mut inputs = vec![
            ("query", query.view()),
            ("key_cache", keys.view()),
            ("value_cache", values.view()),
            ("block_tables", table.view()),
            ("context_lens", lens.view()),
        ];
        inputs.extend(cu.as_ref().map(|cu| ("cu_seqlens_q", cu.view())));
        Ok(call(op, &inputs, params, None)?[0].1.to_f64())
    }

    fn decode(pages: &[i64], len: i64, params: &[(&str, ParamValue)]) -> Result<Vec<f64>, CallRefError> {
        mean("attention.standard.decode.paged", 1, pages, len, None, params)
    }

    fn is_bad(result: Result<Vec<f64>, CallRefError>, expected: &str) -> bool {
        matches!(result, Err(CallRefError::Kernel(KernelError::BadData { input, .. })) if input == expected)
    }

    #[test]
    fn a_decode_reads_its_context_page_by_page() {
        assert_eq!(decode(&[2, 0], 3, &[]).unwrap(), [300.0]);
        assert_eq!(decode(&[2, 0], 0, &[]).unwrap(), [0.0]);
        assert_eq!(decode(&[2, 0], 4, &[("window_left", ParamValue::Int(1))]).unwrap(), [0.5]);
    }

    #[test]
    fn only_pages_that_are_read_must_exist() {
        assert_eq!(decode(&[1, -1], 2, &[]).unwrap(), [25.0]);
        assert_eq!(decode(&[99, 1], 4, &[("window_left", ParamValue::Int(1))]).unwrap(), [25.0]);
        assert!(is_bad(decode(&[1, -1], 3, &[]), "block_tables"));
        assert!(is_bad(decode(&[3, 0], 1, &[]), "block_tables"));
        assert!(is_bad(decode(&[1, 0], 5, &[]), "context_lens"));
        assert!(is_bad(decode(&[1, 0], -1, &[]), "context_lens"));
    }

    #[test]
    fn prefill_queries_are_the_last_positions_and_padding_gives_zeros() {
        let prefill =
            |queries, cu: &[i64]| mean("attention.standard.prefill.paged", queries, &[1, 0], 3, Some(cu), &[]);
        let means = [25.0, 50.0 / 3.0];
        for (got, expected) in prefill(3, &[0, 2]).unwrap().iter().zip([means[0], means[1], 0.0]) {
            assert!((got - expected).abs() < 1e-5);
        }
        assert!(is_bad(prefill(3, &[0, 4]), "cu_seqlens_q"));
        assert!(is_bad(prefill(3, &[2, 1]), "cu_seqlens_q"));
    }
}
