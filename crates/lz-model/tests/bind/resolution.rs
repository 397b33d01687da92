//! Which operation a call is.

use super::*;

#[test]
fn attention_is_told_apart_by_head_counts_and_query_length() {
    let expected = [
        (dense(128, 128, 8, 8), "attention.standard.prefill"),
        (dense(1, 128, 8, 8), "attention.standard.decode"),
        (dense(128, 128, 8, 2), "attention.gqa.prefill"),
        (dense(1, 128, 8, 2), "attention.gqa.decode"),
        (dense(0, 128, 8, 8), "attention.standard.prefill"),
    ];
    for (call, id) in expected {
        for alias in ["attention", "attention.causal", "attention.full"] {
            assert_eq!(call.op(alias), id, "{alias}");
        }
    }
}

#[test]
fn paged_latent_and_cross_attention_are_told_apart_by_what_they_are_given() {
    assert_eq!(paged(8, 8).op("attention.paged"), "attention.standard.decode.paged");
    assert_eq!(paged(8, 2).op("attention.paged"), "attention.gqa.decode.paged");
    assert_eq!(paged_prefill(8, 8).op("attention.paged"), "attention.standard.prefill.paged");
    assert_eq!(paged_prefill(8, 2).op("attention.paged"), "attention.gqa.prefill.paged");
    assert_eq!(mla(1, 9).op("attention.mla"), "attention.mla.decode");
    assert_eq!(mla(9, 9).op("attention.mla"), "attention.mla.prefill");
    assert_eq!(mla_paged().op("attention.mla"), "attention.mla.decode.paged");
    assert_eq!(dense(1, 9, 4, 4).op("attention.cross"), "attention.cross.decode");
    assert_eq!(dense(5, 9, 4, 2).op("attention.cross"), "attention.cross.prefill");
}

#[test]
fn every_name_of_the_catalog_leads_to_its_operation() {
    for op in Catalog::get().ops() {
        for name in [op.id()].iter().chain(op.schema().also) {
            let target = Catalog::get().find(name).unwrap();
            assert_eq!((target.ops.as_slice(), target.fixes.len()), (&[op.ix()][..], 0));
        }
    }
    assert_eq!(rms(&[2, 8]).op("rms_norm"), "norm.rms");
    assert_eq!(rms(&[2, 8]).without("input").with(t("x", DType::F32, &[2, 8])).op("rms_norm"), "norm.rms");
}

fn causal(call: &Made, name: &str) -> ParamValue {
    let (op, bound) = call.resolve(name).unwrap_or_else(|e| panic!("{e}"));
    let index = op.param_index("causal").unwrap();
    bound.query.param(index, &op.schema().params[index])
}

#[test]
fn an_alias_fixes_causal_and_contradicting_it_is_an_error() {
    let call = dense(4, 4, 2, 2);
    assert_eq!(causal(&call, "attention"), ParamValue::Bool(true));
    assert_eq!(causal(&call, "attention.causal"), ParamValue::Bool(true));
    assert_eq!(causal(&call, "attention.full"), ParamValue::Bool(false));
    let said = |value| call.clone().param("causal", ParamValue::Bool(value));
    assert_eq!(causal(&said(true), "attention.causal"), ParamValue::Bool(true));
    assert_eq!(causal(&said(false), "attention"), ParamValue::Bool(false));
    for (alias, value) in [("attention.causal", false), ("attention.full", true)] {
        let error = said(value).error(alias);
        assert_eq!(error.code(), "BAD_PARAM");
        let text = error.to_string();
        assert!(text.contains(&value.to_string()) && text.contains(alias), "{text}");
    }
}

#[test]
fn contradicting_an_alias_under_the_parameters_other_name_is_an_error_too() {
    let call = dense(4, 4, 2, 2).param("is_causal", ParamValue::Bool(false));
    assert_eq!(causal(&call, "attention"), ParamValue::Bool(false));
    let error = call.resolve("attention.causal").map(|_| ());
    assert_eq!(error.map_err(|e| e.code()), Err("BAD_PARAM"));
}

#[test]
fn a_mask_goes_with_the_alias_that_is_not_causal() {
    let call = dense(4, 6, 2, 2).with(t("attn_mask", DType::Bool, &[4, 6]));
    assert_eq!(call.op("attention.full"), "attention.standard.prefill");
    assert_eq!(call.error("attention.causal").code(), "ATTN_MASK_INVALID");
}
