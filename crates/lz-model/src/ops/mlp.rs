//! Matrix products and feed-forward blocks.

use lz_abi::DTypeSet;

use crate::param::Param;
use crate::schema::*;

const ROWS: Dim = Dim::bucketed("rows", DimKind::Batch).also(&["tokens", "batch", "batch_size"]);

/// Linear layer.
pub static LINEAR: OpSchema = OpSchema {
    id: "mlp.linear",
    family: Family::Mlp,
    also: &["linear"],
    summary: "matrix product with a weight stored [out, in], plus bias",
    semantics: "out = input . weight^T + bias",
    dims: &[
        ROWS,
        Dim::exact("in_features", DimKind::Other).also(&["k"]),
        Dim::exact("out_features", DimKind::Other).also(&["n"]),
    ],
    inputs: &[
        Input::new("input", "...rows in_features", DTypeSet::FLOATS).also(&["x"]),
        Input::same("weight", "out_features in_features", "input"),
        Input::same("bias", "out_features", "input").optional(),
    ],
    outputs: &[Output::like("output", "...rows out_features", "input")],
    edges: &[Edge {
        name: "half_bias",
        when: "the dtype is float16 or bfloat16, and bias is given",
        gives: "the product is not rounded before the bias is added, whatever the strides",
        except: "torch's kernel for CUDA rounds it for a single row of bfloat16",
    }],
    flops: "2 * rows * in_features * out_features",
    bytes: "(rows * in_features + in_features * out_features + rows * out_features) * dtype_bits / 8",
    ..BLANK
};

/// Feed-forward block.
pub static FUSED: OpSchema = OpSchema {
    id: "mlp.fused",
    family: Family::Mlp,
    also: &["fused_mlp"],
    summary: "feed-forward block: up-projection, activation (gated when gate_weight is given), down-projection",
    semantics: "h = act(input . gate_weight^T) * (input . up_weight^T), or act(input . up_weight^T) without a gate; \
out = h . down_weight^T; gelu is the exact one",
    dims: &[
        ROWS,
        Dim::exact("hidden", DimKind::Other).also(&["hidden_size"]),
        Dim::exact("intermediate", DimKind::Other).also(&["intermediate_size"]),
    ],
    inputs: &[
        Input::new("input", "...rows hidden", DTypeSet::FLOATS).also(&["x"]),
        Input::same("up_weight", "intermediate hidden", "input"),
        Input::same("down_weight", "hidden intermediate", "input"),
        Input::same("gate_weight", "intermediate hidden", "input").optional(),
    ],
    params: &[Param::choice("activation", &["silu", "gelu", "relu"], "silu", "the activation")],
    outputs: &[Output::like("output", "...rows hidden", "input")],
    flops: "6 * rows * hidden * intermediate",
    bytes: "(2 * rows * hidden + 3 * hidden * intermediate) * dtype_bits / 8",
    ..BLANK
};
