//! Where calls are cut along their batch, and which are not.

use lz_model::{
    BindRules, Catalog, Cut, DType, DeviceIx, DeviceSpec, Layout, NamedCall, ParamValue, Platform, TensorMeta, Uncut,
};

/// How a call of float32 tensors is cut.
fn cut(
    op: &str,
    layout: Option<Layout>,
    inputs: &[(&'static str, DType, &[i64])],
    params: &[(&'static str, ParamValue)],
) -> Result<Cut, Uncut> {
    let host = DeviceSpec::new(Platform::Cpu, "host");
    let inputs = inputs.iter().map(|(name, dtype, shape)| (*name, TensorMeta::new(*dtype, shape))).collect();
    let call = NamedCall { inputs, params: params.to_vec(), layout, ..NamedCall::new() };
    let device = |ix: DeviceIx| (ix.0 == 0).then_some(&host);
    let (ordered, bound) = Catalog::get().resolve(op, &call, &BindRules::default(), device).unwrap();
    Catalog::get().op(bound.query.op()).cut(&ordered.inputs, &bound.query)
}

const F: DType = DType::F32;

#[test]
fn attention_is_cut_along_its_batch_in_either_layout() {
    let expected = |inputs: &[&'static str]| {
        Ok(Cut { size: 6, inputs: inputs.iter().map(|name| (*name, 0)).collect(), outputs: vec![0] })
    };
    let qkv = ["query", "key", "value"];
    for layout in [Layout::Bshd, Layout::Bhsd] {
        let shape: &[i64] = if layout == Layout::Bshd { &[6, 5, 2, 4] } else { &[6, 2, 5, 4] };
        let with = |mask: &[i64]| {
            let tensors =
                [("query", F, shape), ("key", F, shape), ("value", F, shape), ("attn_mask", DType::Bool, mask)];
            cut("attention", Some(layout), &tensors, &[("causal", ParamValue::Bool(false))])
        };
        assert_eq!(with(&[6, 2, 5, 5]), expected(&["query", "key", "value", "attn_mask"]));
        // A mask that all rows share belongs to every piece.
        assert_eq!(with(&[1, 1, 5, 5]), expected(&qkv));
        assert_eq!(with(&[5, 5]), expected(&qkv));
    }
    let shape: &[i64] = &[6, 5, 2, 4];
    let dropout = [("dropout_p", ParamValue::Float(0.5))];
    let tensors = [("query", F, shape), ("key", F, shape), ("value", F, shape)];
    assert_eq!(cut("attention", None, &tensors, &dropout), Err(Uncut::Draws));
}

#[test]
fn rows_are_cut_along_their_longest_leading_axis() {
    let of = |shape: &[i64]| cut("norm.rms", None, &[("input", F, shape), ("weight", F, &[8])], &[]);
    let expected = |size, axis| Ok(Cut { size, inputs: vec![("input", axis)], outputs: vec![axis] });
    assert_eq!(of(&[9, 8]), expected(9, 0));
    assert_eq!(of(&[2, 9, 8]), expected(9, 1));
    assert_eq!(of(&[9, 2, 8]), expected(9, 0));
    assert_eq!(of(&[1, 1, 8]), Err(Uncut::NotRows));
    // As many rows as the weight has: it is cut by name, not by size.
    assert_eq!(of(&[8, 8]), expected(8, 0));
    let linear: [(&'static str, DType, &[i64]); 3] =
        [("input", F, &[3, 7, 8]), ("weight", F, &[4, 8]), ("bias", F, &[4])];
    assert_eq!(
        cut("mlp.linear", None, &linear, &[]),
        Ok(Cut { size: 7, inputs: vec![("input", 1)], outputs: vec![1] })
    );
}

#[test]
fn what_is_updated_drawn_or_of_the_whole_batch_is_not_cut() {
    let cache: &[i64] = &[4, 2, 1, 8];
    let append: [(&'static str, DType, &[i64]); 5] = [
        ("key", F, &[6, 1, 8]),
        ("value", F, &[6, 1, 8]),
        ("key_cache", F, cache),
        ("value_cache", F, cache),
        ("slot_mapping", DType::I64, &[6]),
    ];
    assert_eq!(cut("kv_cache.append", Some(Layout::Nhd), &append, &[]), Err(Uncut::InPlace));
    let topk = [("k", ParamValue::Int(2))];
    assert_eq!(cut("sampling.topk", None, &[("logits", F, &[6, 9])], &topk), Err(Uncut::Draws));
    let format = [("dtype", ParamValue::str("int8"))];
    assert_eq!(cut("quantize", None, &[("input", F, &[6, 8])], &format), Err(Uncut::NotRows));
}

/// An operation that can be cut has a batch in every result: none is found out only when it is called.
#[test]
fn operations_say_whether_they_can_be_cut() {
    let can: Vec<&str> = Catalog::get().ops().iter().filter(|op| op.can_be_cut()).map(|op| op.id()).collect();
    for expected in ["attention.gqa.decode", "attention.gqa.decode.paged", "norm.rms", "mlp.linear", "posenc.rope"] {
        assert!(can.contains(&expected), "{expected} of {can:?}");
    }
    for other in ["kv_cache.append", "kv_cache.compact", "sampling.topk", "sampling.speculative", "tokenize.encode"] {
        assert!(!can.contains(&other), "{other}");
    }
}
