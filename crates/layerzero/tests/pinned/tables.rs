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
    assert_eq!(serves(&engine, &attention(3, 300, 400)), "c.attention");
    assert_eq!(serves(&engine, &attention(2, 300, 400)), "a.attention");
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

/// The table of the specification's appendix E, with kernels and hardware that are here.
const APPENDIX_E: &str = r#"{
  "schema_version": "1.0",
  "model_id": "llama3-70b",
  "hardware_signature": "cpu__baseline",
  "shape_buckets": { "seq_len": [128, 512, 2048, 8192], "batch": [1, 4, 16, 64] },
  "plans": [
    {
      "bucket": { "seq_len": 512, "batch": 4 },
      "ops": [
        { "op": "attention.causal", "kernel_id": "b.attention" },
        { "op": "norm.rms", "kernel_id": "b.rms" }
      ],
      "jit_artifacts": ["flashinfer_cache_key_abc123"]
    }
  ],
  "fallback": { "mode": "runtime_select" }
}"#;

#[test]
fn an_entry_without_a_call_is_for_every_call_of_its_operation_in_the_bucket() {
    let engine = attention_engine();
    register(&engine, "a.rms", "1.0", 90);
    register(&engine, "b.rms", "1.0", 80);
    assert_eq!(engine.load_table(&DispatchTable::parse(APPENDIX_E).unwrap(), "t").unwrap(), []);
    for ((batch, seq_q, seq_k), kernel) in [
        ((4, 512, 512), "b.attention"),
        ((2, 129, 300), "b.attention"),
        ((1, 300, 300), "a.attention"),
        ((5, 300, 300), "a.attention"),
        ((4, 128, 300), "a.attention"),
        ((4, 513, 513), "a.attention"),
    ] {
        assert_eq!(serves(&engine, &attention(batch, seq_q, seq_k)), kernel, "{batch} {seq_q} {seq_k}");
    }
    // Whatever the dtype and the heads; but 'attention.causal' is causal.
    let other = |causal: bool| {
        let shape = [3, 400, 2, 32];
        let call = CallSpec::new("attention").tensor("query", DType::F32, &shape).tensor("key", DType::F32, &shape);
        call.tensor("value", DType::F32, &shape).layout(Layout::Bshd).param("causal", causal)
    };
    assert_eq!(serves(&engine, &other(true)), "b.attention");
    assert_ne!(serves(&engine, &other(false)), "b.attention");
    // Rows are the tokens of the bucket's sequences: from 2 sequences of 129 to 4 of 512.
    for (rows, kernel) in [(257, "a.rms"), (258, "b.rms"), (1000, "b.rms"), (2048, "b.rms"), (2049, "a.rms")] {
        assert_eq!(serves(&engine, &rms(rows)), kernel, "{rows}");
    }
    let status = engine.check_table(&DispatchTable::parse(APPENDIX_E).unwrap(), "t").unwrap();
    assert_eq!((status.entries, status.in_force), (2, 2));
}

#[test]
fn an_entry_with_a_call_goes_before_one_without() {
    let engine = engine_with(&["a.rms", "b.rms", "c.rms"]);
    let both = [("c.rms", rms(100), &[("rows", 128)][..]), ("b.rms", rms(100), &[("rows", 128)][..])];
    let mut table = table(&[("rows", &[128])], &both);
    table.plans[0].ops[0].call = None;
    assert_eq!(engine.load_table(&table, "t").unwrap(), []);
    assert_eq!(serves(&engine, &rms(100)), "b.rms");
    let wider = CallSpec::new("rms_norm").tensor("input", DType::F32, &[100, 65]);
    assert_eq!(serves(&engine, &wider), "c.rms", "of another width nothing more is said");
}

#[test]
fn an_entry_without_a_call_must_make_sense() {
    let engine = attention_engine();
    register(&engine, "a.rms", "1.0", 90);
    let wrong =
        APPENDIX_E.replace("\"b.rms\"", "\"b.attention\"").replace("\"b.attention\" },", "\"gone.attention\" },");
    let mismatches = engine.load_table(&DispatchTable::parse(&wrong).unwrap(), "t").unwrap();
    let codes: Vec<&str> = mismatches.iter().map(|m| m.code()).collect();
    assert_eq!(codes, ["KERNEL_GONE", "NOT_VALID"]);
    let twice = APPENDIX_E.replace("\"norm.rms\"", "\"attention.causal\"");
    let error = DispatchTable::parse(&twice).unwrap_err().to_string();
    assert_eq!(error, "plans[0].ops[1]: the call is decided before, in plans[0].ops[0]");
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
