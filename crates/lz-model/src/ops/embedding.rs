//! Embeddings.

use lz_abi::DTypeSet;

use crate::schema::*;

/// Table lookup.
pub static LOOKUP: OpSchema = OpSchema {
    id: "embedding.lookup",
    family: Family::Embedding,
    also: &["embedding"],
    summary: "rows of a table by index",
    semantics: "out[i] = weight[indices[i]]; an index outside the table is an error",
    dims: &[
        Dim::bucketed("rows", DimKind::Batch).also(&["tokens", "batch", "batch_size"]),
        Dim::bucketed("vocab", DimKind::Other).also(&["vocab_size"]),
        Dim::exact("hidden", DimKind::Other).also(&["hidden_size"]),
    ],
    inputs: &[
        Input::new("indices", "...rows", DTypeSet::INDICES).also(&["input", "input_ids"]),
        Input::new("weight", "vocab hidden", DTypeSet::FLOATS),
    ],
    outputs: &[Output::like("output", "...rows hidden", "weight")],
    tolerances: Tolerances::Exact,
    edges: &[Edge {
        name: "half_gradients",
        when: "the gradient of weight is wanted in float16 or bfloat16",
        gives: "the gradients of equal indices are summed in float32 and rounded once",
        except: "torch's backward for CUDA rounds the sum more than once for small numbers of indices (seen at 2048, \
not at 4096)",
    }],
    bytes: "2 * rows * hidden * dtype_bits / 8 + 8 * rows",
    ..BLANK
};
