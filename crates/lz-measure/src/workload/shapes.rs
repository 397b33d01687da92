//! Calls from shapes: a few numbers each, as people write them down.

use std::collections::BTreeMap;

use lz_model::{CallSpec, DType, Layout};

use super::error::WorkloadError;
use super::grid::{checked, ops};
use super::point::Point;

/// What the numbers of a shape are, by alias or operation, in the notation of the schemas.
///
/// Where an operation's main input shows all of its sizes, a shape is that of the main input; otherwise the sizes it
/// does not show are further numbers.
pub static FORMS: &[(&str, &[&str])] = &[
    ("attention", DENSE),
    ("attention.causal", DENSE),
    ("attention.full", DENSE),
    ("attention.cross", DENSE),
    ("attention.standard.prefill", DENSE),
    ("attention.gqa.prefill", DENSE),
    ("attention.cross.prefill", DENSE),
    ("attention.standard.decode", CONTEXT),
    ("attention.gqa.decode", CONTEXT),
    ("attention.cross.decode", CONTEXT),
    ("attention.standard.decode.paged", CONTEXT),
    ("attention.gqa.decode.paged", CONTEXT),
    ("attention.varlen", PACKED),
    ("attention.standard.prefill.varlen", PACKED),
    ("attention.gqa.prefill.varlen", PACKED),
    ("attention.standard.prefill.paged", &["seq_q heads head_dim"]),
    ("attention.gqa.prefill.paged", &["seq_q heads head_dim", "seq_q heads kv_heads head_dim"]),
    ("attention.lse", DENSE),
    ("attention.lse.varlen", PACKED),
    ("attention.lse.paged", PACKED),
    ("attention.merge", &["...rows v_dim"]),
    ("attention.mla.prefill", &["seq_q heads dim_ckv"]),
    ("attention.mla.decode", &["seq_k heads dim_ckv"]),
    ("attention.mla.prefill.paged", &["seq_q heads dim_ckv"]),
    ("attention.mla.decode.paged", &["batch seq_k heads dim_ckv"]),
    ("attention.sparse.block", &["seq_q heads head_dim"]),
    ("attention.sparse.variable_block", &["seq_q heads head_dim"]),
    ("embedding.lookup", &["...rows vocab hidden"]),
    ("posenc.rope", &["batch seq heads head_dim"]),
    ("posenc.alibi", &["heads seq_q seq_k"]),
    ("norm.rms", &["...rows hidden"]),
    ("norm.layer", &["...rows hidden"]),
    ("norm.fused_add_rms", &["...rows hidden"]),
    ("mlp.linear", &["...rows in_features out_features"]),
    ("mlp.linear.packed", &["...rows in_features out_features"]),
    ("mlp.linear.quantized", &["...rows in_features out_features"]),
    ("mlp.fused", &["...rows hidden intermediate"]),
    ("activation.silu_mul", &["...rows width"]),
    ("activation.gelu", &["...rows width"]),
    ("activation.softmax", &["...rows width"]),
    ("sampling.topk", &["...rows vocab"]),
    ("sampling.topp", &["...rows vocab"]),
    ("sampling.speculative", &["batch draft vocab"]),
    ("quantize", &["...rows cols"]),
    ("dequantize", &["...rows cols"]),
    ("kv_cache.append", &["tokens kv_heads head_dim"]),
    ("kv_cache.compact", &["num_blocks block_size kv_heads head_dim"]),
];

/// Queries, and as many keys; key/value heads where they are fewer.
const DENSE: &[&str] = &["batch seq_q heads head_dim", "batch seq_q heads kv_heads head_dim"];
/// Packed queries, and as many keys; key/value heads where they are fewer.
const PACKED: &[&str] = &["seq_q heads head_dim", "seq_q heads kv_heads head_dim"];
/// One query per sequence over a context.
const CONTEXT: &[&str] = &["batch seq_k heads head_dim", "batch seq_k heads kv_heads head_dim"];

/// One call per shape. What the numbers are is in [`FORMS`]; of attention they are batch, length, heads, head dimension,
/// whatever the layout.
///
/// ```
/// use lz_measure::workload::from_shapes;
/// use lz_model::DType;
///
/// let calls = from_shapes("attention.causal", DType::F16, None, &[vec![1, 1024, 16, 128]]).unwrap();
/// assert_eq!(calls[0].tensors["key"].shape, [1, 1024, 16, 128]);
/// ```
pub fn from_shapes(
    op: &str,
    dtype: DType,
    layout: Option<Layout>,
    shapes: &[Vec<i64>],
) -> Result<Vec<CallSpec>, WorkloadError> {
    if shapes.is_empty() {
        return Err(WorkloadError::Empty { what: "shapes".into() });
    }
    let ops = ops(op)?;
    let own = FORMS.iter().filter(|(name, _)| *name == op).map(|form| (ops[0], form.1));
    let behind = ops.iter().flat_map(|o| FORMS.iter().filter(|(name, _)| *name == o.id()).map(|form| (*o, form.1)));
    let forms: Vec<(_, &'static str)> =
        own.chain(behind).flat_map(|(o, forms)| forms.iter().map(move |form| (o, *form))).collect();
    let params = BTreeMap::new();
    let call = |shape: &Vec<i64>| {
        let fits = |(_, form): &&(_, &str)| match form.split_whitespace().count() {
            n if form.starts_with("...") => shape.len() + 1 >= n,
            n => shape.len() == n,
        };
        let &(o, form) = forms.iter().find(fits).ok_or_else(|| WorkloadError::WrongShape {
            op: op.to_owned(),
            shape: shape.clone(),
            expected: written(&forms),
        })?;
        checked(&format!("a size of {shape:?}"), shape)?;
        let axes: Vec<&str> = form.split_whitespace().collect();
        let many = shape.len() + 1 - axes.len();
        let mut sizes = vec![None; o.schema().dims.len()];
        let mut leading = None;
        let mut at = 0;
        for axis in axes {
            let (name, count) = axis.strip_prefix("...").map_or((axis, 1), |name| (name, many));
            let part = &shape[at..at + count];
            at += count;
            if axis.starts_with("...") {
                leading = Some(part.to_vec());
            }
            let size = part.iter().try_fold(1i64, |n, &size| n.checked_mul(size)).unwrap_or(i64::MAX);
            if let Some(dim) = o.dim_index(name) {
                sizes[dim] = Some(size);
            }
        }
        Point { op: o, name: op, dtype, layout, params: &params, sizes, leading }.call()
    };
    shapes.iter().map(call).collect()
}

/// The forms as a message has them: `(batch, seq_q, heads, head_dim)`.
fn written<T>(forms: &[(T, &str)]) -> String {
    let one = |form: &str| format!("({})", form.split_whitespace().collect::<Vec<_>>().join(", "));
    let mut all: Vec<String> = forms.iter().map(|(_, form)| one(form)).collect();
    all.dedup();
    all.join(" or ")
}
