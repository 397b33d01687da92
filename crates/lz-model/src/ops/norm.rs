//! Normalization over the last dimension.

use lz_abi::DTypeSet;

use crate::param::Param;
use crate::schema::*;

const ROWS: Dim = Dim::bucketed("rows", DimKind::Batch).also(&["tokens", "batch", "batch_size"]);
const HIDDEN: Dim = Dim::exact("hidden", DimKind::Other).also(&["hidden_size"]);
const INPUT: Input = Input::new("input", "...rows hidden", DTypeSet::FLOATS).also(&["x"]);

const EPS_VALID: Check = Check {
    holds: "eps >= 0.0",
    code: CheckCode::Constraint,
    message: "eps is negative",
    hint: "use a small positive number such as 1e-6",
};

const SMALL_EPS: Edge = Edge {
    name: "small_eps",
    when: "eps is below 1e-30, and squares of the numbers are below float32's range",
    gives: "the result by the definition, computed in float64",
    except: "kernels for GPUs square in float32, where a mean square below 1e-38 may become 0",
};
const LARGE_NUMBERS: Edge = Edge {
    name: "large_numbers",
    when: "squares of the numbers of a row are beyond float32's range: numbers from about 1e19",
    gives: "the result by the definition",
    except: "kernels that square in float32 give zeros or NaN in that row",
};
const HALF_GRADIENTS: Edge = Edge {
    name: "half_gradients",
    when: "gradients are wanted in float16 or bfloat16",
    gives: "sums over the rows (the gradients of weight and bias) are made in float32 and rounded once",
    except: "kernels of other libraries for GPUs sum as these do",
};
const EDGES: &[Edge] = &[SMALL_EPS, LARGE_NUMBERS, HALF_GRADIENTS];

/// Root-mean-square norm.
pub static RMS: OpSchema = OpSchema {
    id: "norm.rms",
    family: Family::Norm,
    also: &["rms_norm"],
    summary: "root-mean-square normalization",
    semantics: "out = x / sqrt(mean(x^2) + eps) * weight, over the last dimension",
    dims: &[ROWS, HIDDEN],
    inputs: &[INPUT, Input::new("weight", "hidden", DTypeSet::FLOATS).optional()],
    params: &[Param::float("eps", 1e-6, "added to the mean square").universal()],
    outputs: &[Output::like("output", "like:input", "input")],
    checks: &[EPS_VALID],
    edges: EDGES,
    flops: "4 * rows * hidden",
    bytes: "(2 * rows * hidden + hidden) * dtype_bits / 8",
    ..BLANK
};

/// Layer norm.
pub static LAYER: OpSchema = OpSchema {
    id: "norm.layer",
    also: &["layer_norm"],
    summary: "layer normalization",
    semantics: "out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension, biased variance",
    inputs: &[
        INPUT,
        Input::new("weight", "hidden", DTypeSet::FLOATS).optional(),
        Input::new("bias", "hidden", DTypeSet::FLOATS).optional(),
    ],
    params: &[Param::float("eps", 1e-5, "added to the variance").universal()],
    flops: "8 * rows * hidden",
    bytes: "(2 * rows * hidden + 2 * hidden) * dtype_bits / 8",
    ..NORM
};

/// Residual addition and root-mean-square norm in one.
pub static FUSED_ADD_RMS: OpSchema = OpSchema {
    id: "norm.fused_add_rms",
    also: &["fused_add_rms_norm"],
    summary: "adds the residual, then normalizes; gives both",
    semantics: "s = input + residual; output = s / sqrt(mean(s^2) + eps) * weight; residual_out = s, rounded to the input's dtype",
    inputs: &[
        INPUT,
        Input::same("residual", "...rows hidden", "input"),
        Input::new("weight", "hidden", DTypeSet::FLOATS).optional(),
    ],
    params: &[Param::float("eps", 1e-6, "added to the mean square").universal()],
    outputs: &[Output::like("output", "like:input", "input"), Output::like("residual_out", "like:input", "input")],
    flops: "5 * rows * hidden",
    bytes: "(4 * rows * hidden + hidden) * dtype_bits / 8",
    ..NORM
};

const NORM: OpSchema = OpSchema {
    family: Family::Norm,
    dims: &[ROWS, HIDDEN],
    outputs: &[Output::like("output", "like:input", "input")],
    checks: &[EPS_VALID],
    edges: EDGES,
    ..BLANK
};
