//! How layouts are recognised.

use super::*;

fn evidence(call: &Made, name: &str) -> (Layout, LayoutEvidence) {
    let verdict = call.resolve(name).unwrap_or_else(|e| panic!("{e}")).1.layout.unwrap();
    (verdict.layout, verdict.evidence)
}

#[test]
fn the_layout_comes_with_the_evidence_for_it() {
    let undecided = |shape: &[i64]| made(["query", "key", "value"].map(|name| t(name, DType::F32, shape)).to_vec());
    let square = undecided(&[2, 8, 8, 64]);
    assert_eq!(evidence(&square, "attention"), (Layout::Bshd, LayoutEvidence::Ambiguous));
    assert_eq!(
        evidence(&square.clone().layout(Layout::Bhsd).strict(), "attention"),
        (Layout::Bhsd, LayoutEvidence::Explicit)
    );
    let mut turned = square.clone();
    for input in &mut turned.inputs {
        *input = input.clone().strided(&[4096, 64, 512, 1]);
    }
    assert_eq!(evidence(&turned.clone().strict(), "attention"), (Layout::Bhsd, LayoutEvidence::Strides));
    assert_eq!(evidence(&turned.layout(Layout::Bshd), "attention"), (Layout::Bshd, LayoutEvidence::Explicit));
    assert_eq!(evidence(&undecided(&[2, 100, 8, 64]).strict(), "attention"), (Layout::Bshd, LayoutEvidence::Shape));
    assert_eq!(evidence(&undecided(&[2, 8, 100, 64]), "attention"), (Layout::Bhsd, LayoutEvidence::Shape));
    assert_eq!(undecided(&[2, 8, 100, 64]).dim("attention", "heads"), 8);
    assert_eq!(undecided(&[2, 100, 8, 64]).dim("attention", "heads"), 8);
    assert!(rms(&[2, 4]).resolve("norm.rms").unwrap().1.layout.is_none());
}

#[test]
fn a_layout_by_default_gives_way_to_the_rank_and_to_the_caller() {
    let rope = |shape: &[i64]| {
        made(vec![t("input", DType::F32, shape), t("cos", DType::F32, &[16, 4]), t("sin", DType::F32, &[16, 4])])
    };
    let layout = |call: &Made| evidence(call, "posenc.rope").0;
    assert_eq!(layout(&rope(&[2, 5, 3, 8])), Layout::Bshd);
    assert_eq!(layout(&rope(&[5, 3, 8])), Layout::Nhd);
    assert_eq!(rope(&[5, 3, 8]).dim("posenc.rope", "batch"), 1);
    assert_eq!(rope(&[5, 3, 8]).dim("posenc.rope", "seq"), 5);
    let bhsd = rope(&[2, 3, 5, 8]).layout(Layout::Bhsd);
    assert_eq!((layout(&bhsd), bhsd.dim("posenc.rope", "seq")), (Layout::Bhsd, 5));
    assert_eq!(paged(8, 2).dim("attention.paged", "kv_heads"), 2);
    let hnd = paged(8, 2)
        .with(t("key_cache", DType::Bf16, &[40, 2, 16, 64]))
        .with(t("value_cache", DType::Bf16, &[40, 2, 16, 64]))
        .layout(Layout::Hnd);
    assert_eq!(hnd.dim("attention.paged", "kv_heads"), 2);
    assert_eq!(hnd.dim("attention.paged", "block_size"), 16);
}

#[test]
fn what_a_query_keeps_of_a_tensor_is_what_it_was() {
    let call = Made { layout: Some(Layout::Bhsd), ..dense(8, 6, 4, 4) }
        .with(t("query", DType::F16, &[2, 4, 8, 64]).strided(&[8192, 128, 1024, 2]))
        .with(t("key", DType::F16, &[2, 4, 6, 64]))
        .with(t("value", DType::F16, &[2, 4, 6, 64]));
    let (op, bound) = call.resolve("attention").unwrap();
    let facts = |name| bound.query.tensor(op.input_index(name).unwrap());
    assert_eq!(facts("query").dtype(), Some(DType::F16));
    assert_eq!(facts("query").layout(), Layout::Bhsd);
    assert!(!facts("query").is_contiguous() && !facts("query").has_last_stride_one());
    assert!(facts("key").is_contiguous() && facts("key").has_last_stride_one());
    assert!(!facts("attn_mask").is_present() && facts("attn_mask").dtype().is_none());
}

#[test]
fn masks_broadcast_where_the_schema_lets_them() {
    let mask = |shape: &[i64]| {
        dense(4, 6, 8, 8).with(t("attn_mask", DType::Bool, shape)).param("causal", ParamValue::Bool(false))
    };
    let broadcast = |shape: &[i64]| {
        let (op, bound) = mask(shape).resolve("attention").unwrap_or_else(|e| panic!("{e}"));
        bound.query.tensor(op.input_index("attn_mask").unwrap()).is_broadcast()
    };
    assert!(!broadcast(&[2, 8, 4, 6]) && !broadcast(&[4, 6]));
    for shape in [&[1, 8, 4, 6][..], &[2, 1, 4, 6], &[2, 8, 1, 6], &[1, 1, 1, 6], &[1, 6]] {
        assert!(broadcast(shape), "{shape:?}");
    }
    for shape in [&[2, 8, 4, 1][..], &[3, 8, 4, 6], &[2, 8, 5, 6], &[6], &[8, 4, 6], &[5, 6]] {
        let error = mask(shape).error("attention.standard.prefill");
        assert!(["WRONG_SHAPE", "WRONG_RANK"].contains(&error.code()), "{error}");
    }
}
