//! Conversion between floating point and quantized storage.

use crate::dtype::{DType, DTypeSet};
use crate::param::{Param, ParamDefault, ParamType};
use crate::schema::*;

const FORMATS: &[&str] = &["int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp4", "nvfp4"];
const GRANULARITY: Param = Param::choice(
    "granularity",
    &["per_tensor", "per_channel", "blockwise"],
    "per_tensor",
    "what one scale covers: everything, a row, or group_size elements of a row",
);
const GROUP: Param = Param::int(
    "group_size",
    32,
    "elements per scale when blockwise; the format's own for mxfp4 (32) and nvfp4 (16)",
);

/// How many rows of scales there are.
fn scale_rows(sizes: &dyn Sizes) -> i64 {
    if sizes.param("granularity").as_str() == Some("per_tensor") {
        1
    } else {
        sizes.dim("rows")
    }
}

/// How many scales a row has.
fn scale_cols(sizes: &dyn Sizes) -> i64 {
    if sizes.param("granularity").as_str() != Some("blockwise") {
        return 1;
    }
    let group = sizes.param("group_size").as_int().unwrap_or(1).max(1);
    sizes.dim("cols").div_euclid(group) + i64::from(sizes.dim("cols") % group != 0)
}

const DIMS: &[Dim] = &[
    Dim::bucketed("rows", DimKind::Batch).also(&["batch", "batch_size"]),
    Dim::exact("cols", DimKind::Other).also(&["hidden"]),
    Dim::bucketed("scale_rows", DimKind::Other).derived(scale_rows),
    Dim::exact("scale_cols", DimKind::Other).derived(scale_cols),
];

const GROUP_VALID: Check = Check {
    holds: "granularity != 'blockwise' or group_size >= 1",
    code: CheckCode::Constraint,
    message: "group_size is smaller than 1",
    hint: "use 32 (mxfp4), 16 (nvfp4) or the group size of the checkpoint",
};

/// Float to quantized.
pub static QUANTIZE: OpSchema = OpSchema {
    id: "quantize",
    family: Family::Quantize,
    summary: "rounds to a low-precision format with scales",
    semantics: "a scale covers the granularity's elements: max|x| / largest value of the format, as float32 unless \
given (mxfp4: rounded down to a power of two of the block's exponent, 2^(floor(log2 max|x|) - 2); nvfp4: rounded to \
E4M3). values = round(x / scale), half to even, saturating; a scale of 0 gives 0. With zero_point, integers cover \
[min, max]: scale = (max - min) / (2^bits - 1), zero_point = round(lowest - min / scale).",
    dims: DIMS,
    inputs: &[
        Input::new("input", "...rows cols", DTypeSet::FLOATS),
        Input::new(
            "scale",
            "scale_rows scale_cols | scale_rows | 1",
            DTypeSet::of(&[DType::F32]),
        )
        .optional(),
    ],
    params: &[
        Param::new(
            "dtype",
            ParamType::Choice(FORMATS),
            ParamDefault::Required,
            "the format to round to",
        ),
        GRANULARITY,
        GROUP,
        Param::bool(
            "zero_point",
            false,
            "offset integers so that they cover the range of the data",
        ),
    ],
    outputs: &[
        Output::Fresh {
            name: "values",
            shape: "like:input",
            dtype: OutputDType::Named("dtype"),
        },
        Output::Fresh {
            name: "scales",
            shape: "scale_rows scale_cols",
            dtype: OutputDType::Fixed(DType::F32),
        },
        Output::Fresh {
            name: "zero_points",
            shape: "scale_rows scale_cols",
            dtype: OutputDType::Fixed(DType::I32),
        },
    ],
    checks: &[
        GROUP_VALID,
        Check {
            holds: "dtype not in ['mxfp4', 'nvfp4'] or granularity == 'blockwise'",
            code: CheckCode::Constraint,
            message: "the format is blockwise by definition",
            hint: "pass granularity='blockwise' and group_size=32 (mxfp4) or 16 (nvfp4)",
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
    flops: "3 * rows * cols",
    bytes: "2 * rows * cols * dtype_bits / 8",
    ..BLANK
};

/// Quantized to float.
pub static DEQUANTIZE: OpSchema = OpSchema {
    id: "dequantize",
    family: Family::Quantize,
    summary: "back to floating point",
    semantics: "out = (values - zero_point) * scale, with the scale that covers the element",
    dims: DIMS,
    inputs: &[
        Input::new("values", "...rows cols", DTypeSet::QUANTIZED).also(&["input"]),
        Input::new(
            "scales",
            "scale_rows scale_cols | scale_rows | 1",
            DTypeSet::of(&[DType::F32]),
        )
        .also(&["scale"]),
        Input::new(
            "zero_points",
            "scale_rows scale_cols | scale_rows | 1",
            DTypeSet::of(&[DType::I32]),
        )
        .optional(),
    ],
    params: &[
        Param::choice(
            "dtype",
            &["float32", "float16", "bfloat16", "float64"],
            "float32",
            "the dtype of the result",
        ),
        GRANULARITY,
        GROUP,
    ],
    outputs: &[Output::Fresh {
        name: "output",
        shape: "like:values",
        dtype: OutputDType::Named("dtype"),
    }],
    checks: &[GROUP_VALID],
    flops: "2 * rows * cols",
    bytes: "2 * rows * cols * dtype_bits / 8",
    ..BLANK
};
