//! Conversion between floating point and quantized storage.

use lz_abi::{DType, DTypeSet};

use crate::param::{Param, ParamDefault, ParamType};
use crate::quant::QuantFormat;
use crate::schema::*;

const FORMATS: &[&str] = &["int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp4", "nvfp4"];
const GRANULARITY: Param = Param::choice(
    "granularity",
    &["per_tensor", "per_channel", "blockwise"],
    "per_tensor",
    "what one scale covers: everything, a row, or group_size elements of a row",
);
const GROUP: Param = Param::new(
    "group_size",
    ParamType::Int,
    ParamDefault::Derived,
    "elements per scale when blockwise; the format's own when not given (mxfp4 32, nvfp4 16), else 32",
);

/// How many elements of a row share a scale.
fn group(sizes: &dyn Sizes) -> i64 {
    if sizes.param("granularity").as_str() != Some("blockwise") {
        return sizes.dim("cols").max(1);
    }
    let format = match sizes.param("dtype").as_str().filter(|name| FORMATS.contains(name)) {
        Some(name) => name.parse().ok(),
        None => sizes.dtype("values"),
    };
    let own = format.and_then(QuantFormat::of).and_then(|f| f.spec().group_size);
    sizes.param("group_size").as_int().unwrap_or(own.map_or(32, i64::from))
}

/// How many rows of scales there are.
fn scale_rows(sizes: &dyn Sizes) -> i64 {
    if sizes.param("granularity").as_str() == Some("per_tensor") { 1 } else { sizes.dim("rows") }
}

/// How many scales a row has.
fn scale_cols(sizes: &dyn Sizes) -> i64 {
    if sizes.param("granularity").as_str() != Some("blockwise") {
        return 1;
    }
    // A group of nothing is refused by the checks, which come later.
    let group = sizes.dim("group").max(1);
    sizes.dim("cols").div_euclid(group) + i64::from(sizes.dim("cols") % group != 0)
}

const DIMS: &[Dim] = &[
    Dim::bucketed("rows", DimKind::Batch).also(&["batch", "batch_size"]),
    Dim::exact("cols", DimKind::Other).also(&["hidden"]),
    Dim::exact("group", DimKind::Other).derived(group),
    Dim::bucketed("scale_rows", DimKind::Other).derived(scale_rows),
    Dim::exact("scale_cols", DimKind::Other).derived(scale_cols),
];

const GROUP_VALID: Check = Check {
    holds: "group >= 1 and group_size >= 0",
    code: CheckCode::Constraint,
    message: "group_size is smaller than 1",
    hint: "leave it out for the format's own, or pass the group size of the checkpoint",
};

const INFINITE: Edge = Edge {
    name: "infinite",
    when: "an infinity is among the numbers a computed scale covers",
    gives: "an infinite scale (of int8, int4 and float8): finite numbers are 0 units, infinities 0 of an integer and \
NaN of a float8. The zero point is the format's lowest number where the infinity is positive, and 0 where there is a negative one",
    except: "",
};

/// Float to quantized.
pub static QUANTIZE: OpSchema = OpSchema {
    id: "quantize",
    family: Family::Quantize,
    summary: "rounds to a low-precision format with scales",
    semantics: "a scale covers the granularity's elements: max|x| / largest value of the format, as float32 unless \
given (mxfp4: rounded down to a power of two of the block's exponent, 2^(floor(log2 max|x|) - 2); nvfp4: rounded to \
E4M3). values = round(x / scale), half to even, saturating; a scale of 0 gives 0. With zero_point, integers cover \
the range of the data and zero: with min = min(x, 0) and max = max(x, 0), scale = (max - min) / (2^bits - 1), zero_point = \
round(lowest - min / scale), values = round(x / scale) + zero_point. A scale of one dimension covers whole rows.",
    dims: DIMS,
    inputs: &[
        Input::new("input", "...rows cols", DTypeSet::FLOATS),
        Input::new("scale", "scale_rows scale_cols | scale_rows | 1", DTypeSet::of(&[DType::F32])).optional(),
    ],
    params: &[
        Param::new("dtype", ParamType::Choice(FORMATS), ParamDefault::Required, "the format to round to"),
        GRANULARITY,
        GROUP,
        Param::bool("zero_point", false, "offset integers so that they cover the range of the data"),
    ],
    outputs: &[
        Output::Fresh { name: "values", shape: "like:input", dtype: OutputDType::Named("dtype") },
        Output::Fresh { name: "scales", shape: "scale_rows scale_cols", dtype: OutputDType::Fixed(DType::F32) },
        Output::Fresh { name: "zero_points", shape: "scale_rows scale_cols", dtype: OutputDType::Fixed(DType::I32) },
    ],
    checks: &[
        GROUP_VALID,
        Check {
            holds: "(dtype != 'mxfp4' or granularity == 'blockwise' and group == 32) and (dtype != 'nvfp4' or granularity == 'blockwise' and group == 16)",
            code: CheckCode::Constraint,
            message: "the format is blockwise by definition",
            hint: "pass granularity='blockwise' and leave group_size out (mxfp4 has 32, nvfp4 16)",
        },
        Check {
            holds: "not zero_point or dtype in ['int8', 'int4']",
            code: CheckCode::Constraint,
            message: "only integer formats have a zero point",
            hint: "drop zero_point, or quantize to int8 or int4",
        },
        Check {
            holds: "not (zero_point and scale.present)",
            code: CheckCode::Constraint,
            message: "a given scale has no zero point to go with it",
            hint: "drop scale, or zero_point",
        },
    ],
    edges: &[INFINITE],
    flops: "3 * rows * cols",
    bytes: "2 * rows * cols * dtype_bits / 8",
    ..BLANK
};

/// Quantized to float.
pub static DEQUANTIZE: OpSchema = OpSchema {
    id: "dequantize",
    family: Family::Quantize,
    summary: "back to floating point",
    semantics: "out = (values - zero_point) * scale, with the scale and zero point that cover the element; quantize gives \
zero points of 0 for formats that have none, so that dequantize takes all it returns",
    dims: DIMS,
    inputs: &[
        Input::new("values", "...rows cols", DTypeSet::QUANTIZED).also(&["input"]),
        Input::new("scales", "scale_rows scale_cols | scale_rows | 1", DTypeSet::of(&[DType::F32])).also(&["scale"]),
        Input::new("zero_points", "scale_rows scale_cols | scale_rows | 1", DTypeSet::of(&[DType::I32])).optional(),
    ],
    params: &[
        Param::choice("dtype", &["float32", "float16", "bfloat16", "float64"], "float32", "the dtype of the result"),
        GRANULARITY,
        GROUP,
    ],
    outputs: &[Output::Fresh { name: "output", shape: "like:values", dtype: OutputDType::Named("dtype") }],
    checks: &[
        GROUP_VALID,
        Check {
            holds: "(values.dtype != 'mxfp4' or granularity == 'blockwise' and group == 32) and (values.dtype != 'nvfp4' or granularity == 'blockwise' and group == 16)",
            code: CheckCode::Constraint,
            message: "the format is blockwise by definition",
            hint: "pass granularity='blockwise' and leave group_size out (mxfp4 has 32, nvfp4 16)",
        },
    ],
    flops: "2 * rows * cols",
    bytes: "2 * rows * cols * dtype_bits / 8",
    ..BLANK
};
