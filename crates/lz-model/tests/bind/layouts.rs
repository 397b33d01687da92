//! Which layout a call has.

use super::*;

fn verdict(call: &Made, name: &str) -> (Layout, Option<&'static str>) {
    let verdict = call.resolve(name).unwrap_or_else(|e| panic!("{e}")).1.layout.unwrap();
    (verdict.layout, verdict.contradicted_by)
}

fn alike(shape: &[i64]) -> Made {
    made(["query", "key", "value"].map(|name| t(name, DType::F32, shape)).to_vec())
}

#[test]
fn sizes_never_decide_the_layout() {
    for heads in 1..40 {
        for length in 1..140 {
            let call = alike(&[2, length, heads, 64]);
            assert_eq!(verdict(&call, "attention"), (Layout::Bshd, None));
            assert_eq!((call.dim("attention", "seq_q"), call.dim("attention", "heads")), (length, heads));
            let bhsd = call.defaults(Layout::Bhsd, Layout::Nhd);
            assert_eq!(verdict(&bhsd, "attention"), (Layout::Bhsd, None));
            assert_eq!((bhsd.dim("attention", "seq_q"), bhsd.dim("attention", "heads")), (heads, length));
        }
    }
    assert!(rms(&[2, 4]).resolve("norm.rms").unwrap().1.layout.is_none());
}

#[test]
fn strides_check_the_layout_unless_the_call_says_it() {
    let square = alike(&[2, 8, 8, 64]);
    let turned =
        |name: &'static str| square.clone().with(t(name, DType::F32, &[2, 8, 8, 64]).strided(&[4096, 64, 512, 1]));
    for name in ["query", "key", "value"] {
        assert_eq!(verdict(&turned(name), "attention"), (Layout::Bshd, Some(name)));
        assert_eq!(turned(name).strict().error("attention").code(), "LAYOUT_CONTRADICTED");
        for said in [Layout::Bshd, Layout::Bhsd] {
            assert_eq!(verdict(&turned(name).layout(said).strict(), "attention"), (said, None));
        }
        let bhsd = turned(name).defaults(Layout::Bhsd, Layout::Nhd).strict();
        assert_eq!(verdict(&bhsd, "attention"), (Layout::Bhsd, None));
    }
    assert_eq!(verdict(&square.clone().strict(), "attention"), (Layout::Bshd, None));
    let cache = t("key_cache", DType::Bf16, &[40, 16, 2, 64]).strided(&[2048, 64, 1024, 1]);
    let paged = paged(8, 2).with(cache);
    assert_eq!(verdict(&paged, "attention.paged"), (Layout::Nhd, Some("key_cache")));
    assert_eq!(verdict(&paged.layout(Layout::Nhd).strict(), "attention.paged"), (Layout::Nhd, None));
}

#[test]
fn a_layout_by_default_gives_way_to_the_rank_and_to_the_caller() {
    let rope = |shape: &[i64]| {
        made(vec![t("input", DType::F32, shape), t("cos", DType::F32, &[16, 4]), t("sin", DType::F32, &[16, 4])])
    };
    let layout = |call: &Made| verdict(call, "posenc.rope").0;
    assert_eq!(layout(&rope(&[2, 5, 3, 8])), Layout::Bshd);
    assert_eq!(layout(&rope(&[2, 5, 3, 8]).defaults(Layout::Bhsd, Layout::Nhd)), Layout::Bhsd);
    // Packed tokens come in one layout only.
    assert_eq!(layout(&rope(&[5, 3, 8])), Layout::Nhd);
    assert_eq!(layout(&rope(&[5, 3, 8]).defaults(Layout::Bhsd, Layout::Hnd)), Layout::Nhd);
    assert_eq!(rope(&[5, 3, 8]).dim("posenc.rope", "batch"), 1);
    assert_eq!(rope(&[5, 3, 8]).dim("posenc.rope", "seq"), 5);
    let bhsd = rope(&[2, 3, 5, 8]).layout(Layout::Bhsd);
    assert_eq!((layout(&bhsd), bhsd.dim("posenc.rope", "seq")), (Layout::Bhsd, 5));
    assert_eq!(paged(8, 2).dim("attention.paged", "kv_heads"), 2);
    assert_eq!(paged(8, 2).defaults(Layout::Bhsd, Layout::Nhd).dim("attention.paged", "kv_heads"), 2);
    let hnd = paged(8, 2).with(t("key_cache", DType::Bf16, &[40, 2, 16, 64])).with(t(
        "value_cache",
        DType::Bf16,
        &[40, 2, 16, 64],
    ));
    for hnd in [hnd.clone().layout(Layout::Hnd), hnd.defaults(Layout::Bshd, Layout::Hnd)] {
        assert_eq!(hnd.dim("attention.paged", "kv_heads"), 2);
        assert_eq!(hnd.dim("attention.paged", "block_size"), 16);
    }
}

#[test]
fn a_call_that_is_written_down_can_settle_its_layout() {
    let settled = |op: &str, tensor: &str, shape: &[i64]| {
        let mut call = CallSpec::new(op).tensor(tensor, DType::F32, shape);
        call.settle_layout(DefaultLayouts { dense: Layout::Bhsd, cache: Layout::Hnd });
        call.layout
    };
    assert_eq!(settled("attention", "q", &[2, 8, 8, 64]), Some(Layout::Bhsd));
    assert_eq!(settled("attention.paged", "key_cache", &[2, 8, 8, 64]), Some(Layout::Hnd));
    assert_eq!(settled("rope", "x", &[2, 8, 8, 64]), Some(Layout::Bhsd));
    assert_eq!(settled("rope", "x", &[8, 8, 64]), Some(Layout::Nhd));
    assert_eq!(settled("rms_norm", "input", &[8, 64]), None);
    assert_eq!(settled("attention.sparse.variable_block", "query", &[8, 8, 64]), None);
}

#[test]
fn what_a_query_keeps_of_a_tensor_is_what_it_was() {
    let call = Made { layout: Some(Layout::Bhsd), ..dense(8, 6, 4, 4) }
        .param("causal", ParamValue::Bool(false))
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
