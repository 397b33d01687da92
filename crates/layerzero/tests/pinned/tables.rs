//! Tables in force: which calls they are about, and when they are refused.

use layerzero::{BucketPlan, Buckets, DispatchTable, Error, Fallback, PlannedOp};

use super::*;

/// A table with these axes and these entries: kernel, call, bucket.
pub type Entry<'a> = (&'a str, CallSpec, &'a [(&'a str, i64)]);

pub fn table(buckets: &[(&str, &[i64])], entries: &[Entry<'_>]) -> DispatchTable {
    let plan = |(kernel, call, bucket): &(&str, CallSpec, &[(&str, i64)])| BucketPlan {
        bucket: bucket.iter().map(|(axis, end)| ((*axis).to_owned(), *end)).collect(),
        ops: vec![PlannedOp {
            op: call.op.clone(),
            kernel_id: (*kernel).to_owned(),
            call: Some(call.clone()),
            ..PlannedOp::default()
        }],
        jit_artifacts: Vec::new(),
    };
    DispatchTable {
        schema_version: "1.0".into(),
        model_id: "m".into(),
        hardware_signature: "cpu__baseline".into(),
        layerzero_version: None,
        capabilities: BTreeMap::new(),
        shape_buckets: Buckets::new(buckets.iter().map(|(axis, ends)| (*axis, ends.to_vec()))).unwrap(),
        plans: entries.iter().map(plan).collect(),
        fallback: Fallback::default(),
    }
}

fn attention_engine() -> Engine {
    let engine = engine_on(vec![host()]);
    for (i, id) in ["a.attention", "b.attention", "c.attention"].iter().enumerate() {
        let mut kernel = KernelDescriptor::new(*id, "attention", id.split('.').next().unwrap());
        kernel.platforms = vec![Platform::Cpu];
        kernel.dtypes = DTypeSet::FLOATS;
        kernel.layouts = vec![Layout::Bshd, Layout::Bhsd];
        kernel.dims.insert("head_dim".into(), DimRule::default());
        kernel.priority = 90 - i as i32;
        engine.register(kernel, nothing()).unwrap();
    }
    engine
}

#[test]
fn a_size_falls_into_the_first_bucket_whose_end_it_does_not_exceed() {
    let engine = engine_with(&["a.rms", "b.rms", "c.rms"]);
    let bucket = |end: i64| [("rows", end)];
    let (low, high) = (bucket(128), bucket(2048));
    let table = table(&[("rows", &[128, 512, 2048])], &[("b.rms", rms(128), &low), ("c.rms", rms(2048), &high)]);
    assert_eq!(engine.load_table(&table, "t").unwrap(), []);
    for (rows, kernel) in [
        (0, "b.rms"),
        (1, "b.rms"),
        (127, "b.rms"),
        (128, "b.rms"),
        (129, "a.rms"),
        (512, "a.rms"),
        (513, "c.rms"),
        (1500, "c.rms"),
        (2048, "c.rms"),
        (2049, "a.rms"),
        (1 << 40, "a.rms"),
    ] {
        assert_eq!(serves(&engine, &rms(rows)), kernel, "{rows}");
    }
}

#[test]
fn sequences_share_the_axis_of_sequences_and_other_sizes_their_own_buckets() {
    let engine = attention_engine();
    let bucket = [("seq_len", 512), ("batch", 4)];
    let axes: [(&str, &[i64]); 2] = [("seq_len", &[128, 512, 2048]), ("batch", &[1, 4])];
    engine.load_table(&table(&axes, &[("b.attention", attention(4, 512, 512), &bucket)]), "t").unwrap();
    for ((batch, seq_q, seq_k), kernel) in [
        ((4, 512, 512), "b.attention"),
        ((2, 300, 300), "b.attention"),
        ((3, 129, 512), "b.attention"),
        ((4, 128, 300), "a.attention"),
        ((1, 300, 300), "a.attention"),
        ((5, 300, 300), "a.attention"),
        ((4, 513, 513), "a.attention"),
    ] {
        assert_eq!(serves(&engine, &attention(batch, seq_q, seq_k)), kernel, "{batch} {seq_q} {seq_k}");
    }
    // With an axis of its own, keys go by that.
    let axes: [(&str, &[i64]); 2] = [("seq_len", &[128, 512]), ("kv_len", &[4096])];
    let bucket = [("seq_len", 512), ("kv_len", 4096)];
    engine.load_table(&table(&axes, &[("c.attention", attention(4, 512, 512), &bucket)]), "t").unwrap();
    assert_eq!(serves(&engine, &attention(4, 300, 4000)), "c.attention");
    // No axis is about the batch: its bucket is the operation's, from 3 to 4.
    assert_eq!(serves(&engine, &attention(3, 300, 10)), "c.attention");
    assert_eq!(serves(&engine, &attention(2, 300, 10)), "a.attention");
    assert_eq!(serves(&engine, &attention(4, 300, 4097)), "a.attention");
}

#[test]
fn what_kernels_are_compiled_for_is_the_calls_own() {
    let engine = attention_engine();
    let axes: [(&str, &[i64]); 1] = [("seq_len", &[512])];
    engine.load_table(&table(&axes, &[("b.attention", attention(1, 512, 512), &[("seq_len", 512)])]), "t").unwrap();
    assert_eq!(serves(&engine, &attention(1, 300, 300)), "b.attention");
    let heads = |heads: i64| {
        let shape = [1, 300, heads, 64];
        let q = CallSpec::new("attention").tensor("query", DType::F16, &shape).tensor("key", DType::F16, &shape);
        q.tensor("value", DType::F16, &shape).layout(Layout::Bshd)
    };
    assert_eq!((serves(&engine, &heads(8)), serves(&engine, &heads(4))), ("b.attention".into(), "a.attention".into()));
    let masked = attention(1, 300, 300).param("causal", false);
    assert_ne!(serves(&engine, &masked), "b.attention");
}

#[test]
fn a_table_of_another_machine_is_refused_as_a_whole() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let mut other = table(&[("rows", &[512])], &[("b.rms", rms(512), &[("rows", 512)])]);
    assert_eq!(engine.load_table(&other, "mine").unwrap(), []);
    let version = engine.version();
    other.hardware_signature = "cuda_sm90_cu130".into();
    let error = engine.load_table(&other, "theirs").unwrap_err();
    assert_eq!(error.code(), "DISPATCH_TABLE_REFUSED");
    let told = "dispatch table theirs is refused: was decided for cuda_sm90_cu130; here is cpu__baseline";
    assert_eq!(error.to_string(), told);
    assert!(!error.hint().is_empty());
    assert_eq!((engine.version(), serves(&engine, &rms(300))), (version, "b.rms".to_owned()), "nothing was changed");
    let status = engine.check_table(&other, "theirs").unwrap();
    assert_eq!((status.refused, status.in_force, status.entries), (true, 0, 1));
}

#[test]
fn a_table_of_other_capabilities_is_refused_as_a_whole() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let text = |priority: i32| {
        format!(
            r#"{{"schema_version": "1.0", "backend": "doc", "backend_version": "1.0", "platform": "cpu", "ops": {{
            "norm.rms": [{{"kernel_id": "doc.rms", "dtypes": ["float32"], "requires_layouts": ["strided"], "priority": {priority}}}]}}}}"#
        )
    };
    engine.load_capabilities("doc", &text(5)).unwrap();
    let hash = |engine: &Engine| {
        let backends = engine.backends();
        backends.into_iter().find(|b| b.descriptor.name == "doc").unwrap().descriptor.capabilities_hash
    };
    let mut table = table(&[("rows", &[512])], &[("b.rms", rms(512), &[("rows", 512)])]);
    table.capabilities.insert("doc".into(), hash(&engine));
    table.capabilities.insert("not here".into(), "0".into());
    assert_eq!(engine.load_table(&table, "t").unwrap(), []);
    engine.load_capabilities("doc", &text(6)).unwrap();
    assert_eq!(serves(&engine, &rms(300)), "a.rms", "out as soon as the document is another one");
    let Err(Error::TableRefused { why, .. }) = engine.load_table(&table, "t") else { panic!() };
    assert_eq!(why.code(), "CAPABILITIES_CHANGED");
    engine.load_capabilities("doc", &text(5)).unwrap();
    assert_eq!(serves(&engine, &rms(300)), "b.rms");
}

#[test]
fn a_kernel_that_is_missing_costs_its_entry_alone() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let buckets: [[(&str, i64); 1]; 2] = [[("rows", 128)], [("rows", 512)]];
    let entries = [("gone.rms", rms(100), &buckets[0][..]), ("b.rms", rms(512), &buckets[1][..])];
    let table = table(&[("rows", &[128, 512])], &entries);
    let mismatches = engine.load_table(&table, "t").unwrap();
    assert_eq!((mismatches.len(), mismatches[0].code()), (1, "KERNEL_GONE"));
    assert_eq!(mismatches[0].entry, "plans[0].ops[0]");
    assert_eq!((serves(&engine, &rms(100)), serves(&engine, &rms(500))), ("a.rms".into(), "b.rms".into()));
}

#[test]
fn an_entry_without_a_call_pins_nothing_and_says_so() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let mut table = table(&[("rows", &[128])], &[("b.rms", rms(100), &[("rows", 128)])]);
    table.plans[0].ops[0].call = None;
    let mismatches = engine.load_table(&table, "t").unwrap();
    assert_eq!((mismatches.len(), mismatches[0].code()), (1, "NO_CALL"));
    assert_eq!(serves(&engine, &rms(100)), "a.rms");
}

#[test]
fn an_entry_under_the_wrong_bucket_pins_nothing() {
    let engine = engine_with(&["a.rms", "b.rms"]);
    let wrong = table(&[("rows", &[128, 512])], &[("b.rms", rms(100), &[("rows", 512)])]);
    let mismatch = engine.load_table(&wrong, "t").unwrap().remove(0);
    assert_eq!(mismatch.kind, MismatchKind::OutsideBucket { dim: "rows".into(), found: 100 });
    let above = table(&[("rows", &[128, 512])], &[("b.rms", rms(1000), &[("rows", 512)])]);
    let mismatch = engine.load_table(&above, "t").unwrap().remove(0);
    assert_eq!(mismatch.kind, MismatchKind::OutsideBucket { dim: "rows".into(), found: 1000 });
    assert_eq!(serves(&engine, &rms(100)), "a.rms");
    // An axis the operation does not have says nothing about it.
    let axes: [(&str, &[i64]); 2] = [("rows", &[128]), ("seq_len", &[64])];
    let more = table(&axes, &[("b.rms", rms(100), &[("rows", 128), ("seq_len", 64)])]);
    assert_eq!(engine.load_table(&more, "t").unwrap(), []);
}

#[test]
fn two_calls_of_one_bucket_with_different_kernels_are_ambiguous() {
    let engine = engine_with(&["a.rms", "b.rms", "c.rms"]);
    let bucket = [("rows", 128)];
    let two = table(&[("rows", &[128])], &[("b.rms", rms(100), &bucket), ("c.rms", rms(120), &bucket)]);
    let codes: Vec<&str> = engine.load_table(&two, "t").unwrap().iter().map(|m| m.code()).collect();
    assert_eq!(codes, ["AMBIGUOUS", "AMBIGUOUS"]);
    assert_eq!(serves(&engine, &rms(100)), "a.rms");
}
