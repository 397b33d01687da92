//! Normalization over the last dimension.

use crate::dtype::DTypeSet;
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
    ..BLANK
};
