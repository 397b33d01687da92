//! Matrix products and feed-forward blocks.

use lz_abi::{DType, DTypeSet};

use crate::param::{Param, ParamDefault};
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

/// Output features of a block of a packed weight.
pub const PACKED_ROWS: i64 = 32;
/// Groups of input features a packed weight is padded to a multiple of, where a group has more than one.
pub const PACKED_GROUPS: i64 = 16;

fn panels(sizes: &dyn Sizes) -> i64 {
    let outs = sizes.dim("out_features");
    outs / PACKED_ROWS + i64::from(outs % PACKED_ROWS > 0)
}

fn groups(sizes: &dyn Sizes) -> i64 {
    let (ins, interleave) = (sizes.dim("in_features"), sizes.dim("interleave"));
    // A byte is two integers of 4 bits.
    let interleave = if sizes.dtype("weight") == Some(DType::U8) { interleave.saturating_mul(2) } else { interleave };
    if interleave <= 1 {
        return ins;
    }
    let whole = interleave.saturating_mul(PACKED_GROUPS);
    (ins / whole + i64::from(ins % whole > 0)).saturating_mul(PACKED_GROUPS)
}

fn scale_groups(sizes: &dyn Sizes) -> i64 {
    let (ins, group) = (sizes.dim("in_features"), sizes.dim("group_size"));
    if group <= 0 { 1 } else { ins / group + i64::from(ins % group > 0) }
}

/// Linear layer with a weight that was packed before.
pub static LINEAR_PACKED: OpSchema = OpSchema {
    id: "mlp.linear.packed",
    family: Family::Mlp,
    also: &["linear_packed"],
    summary: "linear layer with a weight in the blocks that lz.pack makes, then an activation",
    semantics: "out = act(input . W^T + bias), with W[n, k] = weight[n / 32, k / interleave, n % 32, k % interleave]; \
what pads the blocks is not looked at",
    dims: &[
        ROWS,
        Dim::exact("in_features", DimKind::Other).also(&["k"]),
        Dim::exact("out_features", DimKind::Other).also(&["n"]),
        Dim::exact("interleave", DimKind::Other),
        Dim::exact("panels", DimKind::Other).derived(panels),
        Dim::exact("groups", DimKind::Other).derived(groups),
    ],
    inputs: &[
        Input::new("input", "...rows in_features", DTypeSet::FLOATS).also(&["x"]),
        Input::same("weight", "panels groups 32 interleave", "input"),
        Input::same("bias", "out_features", "input").optional(),
    ],
    params: &[
        Param::dim("out_features", "rows of the weight before it was packed"),
        Param::dim("interleave", "input features side by side: 1, 2 for bfloat16, 4 for int8")
            .default(ParamDefault::Int(1)),
        Param::choice("activation", &["none", "relu", "gelu", "gelu_tanh", "silu"], "none", "applied to the sum"),
    ],
    outputs: &[Output::like("output", "...rows out_features", "input")],
    checks: &[Check {
        holds: "interleave in [1, 2, 4]",
        code: CheckCode::Constraint,
        message: "no packing format has this interleave",
        hint: "pass what lz.pack gives to lz.linear, which knows its own format",
    }],
    edges: &[Edge {
        name: "half_activation",
        when: "the dtype is float16 or bfloat16",
        gives: "neither the product nor its sum with the bias is rounded before the activation",
        except: "",
    }],
    flops: "2 * rows * in_features * out_features",
    bytes: "(rows * in_features + in_features * out_features + rows * out_features) * dtype_bits / 8",
    ..BLANK
};

/// Linear layer with a weight of integers that was packed before.
pub static LINEAR_QUANTIZED: OpSchema = OpSchema {
    id: "mlp.linear.quantized",
    family: Family::Mlp,
    also: &["linear_quantized"],
    summary: "linear layer with a weight of 8-bit or 4-bit integers in the blocks that lz.pack makes, then an activation",
    semantics: "out = act(input . W^T + bias), with W[n, k] = scales[n / 32, k / group_size, n % 32] * weight[n / 32, \
k / interleave, n % 32, k % interleave]; a group_size of 0 is one scale for each output. A weight of uint8 holds two 4-bit \
integers in two's complement per byte, the lower four bits first: W[n, k] is in byte k / 2 % interleave of group \
k / (2 * interleave). What pads the blocks is not looked at",
    dims: &[
        ROWS,
        Dim::exact("in_features", DimKind::Other).also(&["k"]),
        Dim::exact("out_features", DimKind::Other).also(&["n"]),
        Dim::exact("interleave", DimKind::Other),
        Dim::exact("group_size", DimKind::Other),
        Dim::exact("panels", DimKind::Other).derived(panels),
        Dim::exact("groups", DimKind::Other).derived(groups),
        Dim::exact("scale_groups", DimKind::Other).derived(scale_groups),
    ],
    inputs: &[
        Input::new("input", "...rows in_features", DTypeSet::FLOATS).also(&["x"]),
        Input::new("weight", "panels groups 32 interleave", DTypeSet::of(&[DType::I8, DType::U8])),
        Input::same("bias", "out_features", "input").optional(),
        Input::new("scales", "panels scale_groups 32", DTypeSet::of(&[DType::F32])),
    ],
    params: &[
        Param::dim("out_features", "rows of the weight before it was packed"),
        Param::dim("interleave", "numbers side by side: 1 for int8, 4 bytes for int4").default(ParamDefault::Int(1)),
        Param::dim("group_size", "input features that share a scale; 0 for all of them").default(ParamDefault::Int(0)),
        Param::choice("activation", &["none", "relu", "gelu", "gelu_tanh", "silu"], "none", "applied to the sum"),
    ],
    outputs: &[Output::like("output", "...rows out_features", "input")],
    checks: LINEAR_PACKED.checks,
    edges: &[Edge {
        name: "half_activation",
        when: "the dtype is float16 or bfloat16",
        gives: "neither the weight nor the product nor its sum with the bias is rounded before the activation",
        except: "",
    }],
    flops: "2 * rows * in_features * out_features",
    bytes: "(rows * in_features + rows * out_features) * dtype_bits / 8 + panels * groups * 32 * interleave + panels * scale_groups * 128",
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
