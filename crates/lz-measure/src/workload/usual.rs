//! What sizes, parameters and tensors usually are when nobody says.

use lz_model::schema::OpSchema;

/// The sizes of a call as far as they are known.
pub(super) struct Known<'a> {
    /// The name of the operation: its id, or the alias that was used.
    pub name: &'a str,
    pub schema: &'static OpSchema,
    pub sizes: &'a [Option<i64>],
}

impl Known<'_> {
    fn has(&self, dim: &str) -> bool {
        self.schema.dims.iter().any(|d| d.name == dim)
    }

    fn get(&self, dim: &str) -> Option<i64> {
        self.schema.dims.iter().position(|d| d.name == dim).and_then(|i| self.sizes[i])
    }

    fn is(&self, part: &str) -> bool {
        self.name.split('.').any(|p| p == part)
    }
}

/// The usual size of a dimension, once those it depends on are known.
pub(super) fn size(known: &Known<'_>, dim: &str) -> Option<i64> {
    SIZES.iter().find(|(name, _)| *name == dim).and_then(|(_, rule)| rule(known))
}

type Rule = fn(&Known<'_>) -> Option<i64>;

fn quotient(size: i64, part: i64) -> i64 {
    size.max(0) / part.max(1) + i64::from(size % part.max(1) != 0)
}

/// How a dimension that was not given follows from others, by its name. What is not here must be given.
const SIZES: &[(&str, Rule)] = &[
    ("batch", |_| Some(1)),
    ("heads", |k| Some(if k.is("mla") { 128 } else { 32 })),
    ("kv_heads", |k| match k.get("heads") {
        Some(heads) if k.is("gqa") => Some(if heads % 4 == 0 { heads / 4 } else { 1 }),
        Some(heads) => Some(heads),
        None if k.has("heads") => None,
        None => Some(8),
    }),
    ("head_dim", |_| Some(128)),
    ("v_dim", |k| if k.has("head_dim") { k.get("head_dim") } else { Some(128) }),
    ("dim_ckv", |_| Some(512)),
    ("dim_kpe", |_| Some(64)),
    // Keys alone are a context: one query goes over it.
    ("seq_q", |k| match k.get("seq_k") {
        _ if k.is("decode") => Some(1),
        Some(keys) if k.is("prefill") || k.is("sparse") || k.is("posenc") => Some(keys),
        keys => keys.map(|_| 1),
    }),
    ("seq_k", |k| match k.get("seq_q") {
        _ if k.is("decode") => None,
        // Packed queries: the sequences have equal parts of them.
        Some(queries) if k.has("max_blocks") => {
            Some(quotient(quotient(queries, k.get("batch")?), k.get("block_size")?) * k.get("block_size")?)
        }
        queries => queries,
    }),
    ("table", |k| k.get("seq")),
    ("rot", |k| k.get("head_dim").map(|n| (n / 2).max(1))),
    ("block_size", |k| Some(if k.is("mla") { 64 } else { 16 })),
    ("max_blocks", |k| Some(quotient(k.get("seq_k")?, k.get("block_size")?))),
    ("num_blocks", |k| match (k.get("tokens"), k.get("moves")) {
        (Some(tokens), _) => Some(quotient(tokens, k.get("block_size")?)),
        (_, Some(moves)) => moves.checked_mul(2),
        _ => k.get("batch")?.checked_mul(k.get("max_blocks")?),
    }),
    ("moves", |k| k.get("num_blocks").map(|n| (n / 2).max(1))),
    ("block_rows", |_| Some(64)),
    ("block_cols", |_| Some(64)),
    ("row_blocks", |k| Some(quotient(k.get("seq_q")?, k.get("block_rows").unwrap_or(64)))),
    ("col_blocks", |k| Some(quotient(k.get("seq_k")?, 64))),
    // A quarter of the blocks.
    ("nnz", |k| k.get("row_blocks")?.checked_mul(quotient(quotient(k.get("seq_k")?, k.get("block_cols")?), 4))),
    // Packed weights of float32, float16 and int8; those of bfloat16 are packed in pairs. A scale for each output.
    ("interleave", |_| Some(1)),
    ("group_size", |_| Some(0)),
    ("draft", |_| Some(4)),
    ("k", |_| Some(50)),
    ("shared_prefix", |_| Some(0)),
    ("max_seqlen_q", |_| Some(0)),
    ("max_seqlen_k", |_| Some(0)),
];

/// Optional tensors that calls usually have: operation and input.
const TENSORS: &[(&str, &str)] = &[
    ("norm.rms", "weight"),
    ("norm.layer", "weight"),
    ("norm.layer", "bias"),
    ("norm.fused_add_rms", "weight"),
    ("mlp.fused", "gate_weight"),
    ("attention.lse.paged", "cu_seqlens_q"),
];

/// Whether calls of an operation usually have an optional tensor.
pub(super) fn has_tensor(op: &str, input: &str) -> bool {
    TENSORS.contains(&(op, input))
}

/// The value a required parameter usually has.
pub(super) fn param(op: &str, param: &str) -> Option<lz_model::ParamSpec> {
    match (op, param) {
        ("sampling.topp", "p") => Some(0.9.into()),
        ("quantize", "dtype") => Some("int8".into()),
        // Heads of 128 and 64 dimensions before anything was absorbed.
        (op, "scale") if op.starts_with("attention.mla") => Some(192.0_f64.sqrt().recip().into()),
        _ => None,
    }
}
