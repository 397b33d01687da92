//! Activations.

use lz_abi::DTypeSet;

use crate::param::Param;
use crate::schema::*;

const ROWS: Dim = Dim::bucketed("rows", DimKind::Batch).also(&["tokens", "batch", "batch_size"]);
const WIDTH: Dim = Dim::bucketed("width", DimKind::Other);

const INFINITE: Edge = Edge {
    name: "infinite",
    when: "a number is infinite",
    gives: "the limit: infinity of infinity, 0 of minus infinity",
    except: "kernels but the reference may give NaN",
};

/// Gated SiLU.
pub static SILU_MUL: OpSchema = OpSchema {
    id: "activation.silu_mul",
    family: Family::Activation,
    also: &["silu_mul"],
    summary: "silu of the gate times the other half",
    semantics: "out = gate / (1 + exp(-gate)) * up",
    dims: &[ROWS, WIDTH],
    inputs: &[
        Input::new("gate", "...rows width", DTypeSet::FLOATS).also(&["a"]),
        Input::same("up", "...rows width", "gate").also(&["b"]),
    ],
    outputs: &[Output::like("output", "like:gate", "gate")],
    edges: &[Edge { when: "a number of gate is infinite", ..INFINITE }],
    flops: "6 * rows * width",
    bytes: "3 * rows * width * dtype_bits / 8",
    ..BLANK
};

/// Softmax of rows.
pub static SOFTMAX: OpSchema = OpSchema {
    id: "activation.softmax",
    family: Family::Activation,
    also: &["softmax"],
    summary: "softmax over the last dimension",
    semantics: "out = exp(x - max(x)) / sum(exp(x - max(x))), with the maximum and the sum over the last dimension",
    dims: &[ROWS, WIDTH],
    inputs: &[Input::new("input", "...rows width", DTypeSet::FLOATS).also(&["x"])],
    outputs: &[Output::like("output", "like:input", "input")],
    edges: &[
        Edge {
            name: "nothing_finite",
            when: "a row is nothing but minus infinity, or has plus infinity in it",
            gives: "NaN in the whole row, as torch does",
            except: "",
        },
        Edge {
            name: "underflow",
            when: "a result is below the smallest normal number of its dtype",
            gives: "that number, or 0",
            except: "",
        },
    ],
    flops: "5 * rows * width",
    bytes: "2 * rows * width * dtype_bits / 8",
    ..BLANK
};

/// Gaussian error linear unit.
pub static GELU: OpSchema = OpSchema {
    id: "activation.gelu",
    family: Family::Activation,
    also: &["gelu"],
    summary: "Gaussian error linear unit",
    semantics: "out = x/2 (1 + erf(x/sqrt(2))), or with approximate = tanh: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))",
    dims: &[ROWS, WIDTH],
    inputs: &[Input::new("input", "...rows width", DTypeSet::FLOATS).also(&["x"])],
    params: &[Param::choice("approximate", &["none", "tanh"], "none", "which form")],
    outputs: &[Output::like("output", "like:input", "input")],
    edges: &[INFINITE],
    flops: "10 * rows * width",
    bytes: "2 * rows * width * dtype_bits / 8",
    ..BLANK
};
