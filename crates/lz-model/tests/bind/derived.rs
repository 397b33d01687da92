//! Sizes that follow from others.

use super::*;

#[test]
fn sizes_that_follow_from_others() {
    assert_eq!(paged(8, 2).dim("attention.paged", "seq_k"), 5 * 16);
    assert_eq!(paged_prefill(8, 8).dim("attention.paged", "seq_k"), 5 * 16);
    assert_eq!(paged_prefill(8, 8).dim("attention.paged", "batch"), 3);
    assert_eq!(mla_paged().dim("attention.mla", "seq_k"), 7 * 32);
    assert_eq!(mla(4, 6).dim("attention.mla", "batch"), 1);
    let several = mla(4, 6).with(t("qo_indptr", DType::I32, &[3])).with(t("kv_indptr", DType::I32, &[3]));
    assert_eq!(several.dim("attention.mla", "batch"), 2);
}

#[test]
fn a_quantization_groups_as_its_format_does() {
    let blockwise = |format| quantize(format).param("granularity", ParamValue::str("blockwise"));
    let sizes = |call: &Made| ["group", "scale_rows", "scale_cols"].map(|dim| call.dim("quantize", dim));
    assert_eq!(sizes(&blockwise("nvfp4")), [16, 3, 5]);
    assert_eq!(sizes(&blockwise("mxfp4")), [32, 3, 3], "80 = 32 + 32 + 16");
    assert_eq!(sizes(&blockwise("int8")), [32, 3, 3]);
    let by_ten = blockwise("int4").param("group_size", ParamValue::Int(10));
    assert_eq!(sizes(&by_ten), [10, 3, 8]);
    assert_eq!(sizes(&quantize("int8")), [80, 1, 1]);
    let by_row = quantize("int8").param("granularity", ParamValue::str("per_channel"));
    assert_eq!(sizes(&by_row), [80, 3, 1]);
    for (format, granularity) in [("nvfp4", "per_tensor"), ("mxfp4", "per_channel")] {
        let call = quantize(format).param("granularity", ParamValue::str(granularity));
        assert_eq!(call.error("quantize").code(), "CONSTRAINT_FAILED");
    }

    let back = |values: DType, scales: &[i64]| {
        made(vec![t("values", values, &[3, 80]), t("scales", DType::F32, scales)])
            .param("granularity", ParamValue::str("blockwise"))
    };
    assert_eq!(back(DType::NvFp4, &[3, 5]).dim("dequantize", "group"), 16);
    assert_eq!(back(DType::MxFp4, &[3, 3]).dim("dequantize", "group"), 32);
    assert_eq!(back(DType::MxFp4, &[3, 5]).error("dequantize").code(), "WRONG_SHAPE");
}
