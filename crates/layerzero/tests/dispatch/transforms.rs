//! Arguments brought into the form a kernel takes.

use super::*;

/// Attention as a library would have it: BSHD, float32, contiguous, causal or not, nothing else. It
/// refuses anything it did not declare, so a call it serves was really adapted.
fn picky(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
    let [q, k, v] = ["query", "key", "value"].map(|name| args.input(name).unwrap());
    for (name, t) in [("query", &q), ("key", &k), ("value", &v)] {
        let right = t.dtype() == DType::F32 && t.is_contiguous() && args.layout(name) == Layout::Bshd;
        if !right {
            let (layout, strides) = (args.layout(name), t.strides());
            return Err(KernelError::Failed(format!("{name} is {} {layout} {strides:?}", t.dtype())));
        }
    }
    let [batch, seq_q, heads, dim] = <[i64; 4]>::try_from(q.shape()).unwrap();
    let [_, seq_k, kv_heads, v_dim] = <[i64; 4]>::try_from(v.shape()).unwrap();
    if args.outputs[0].dtype() != DType::F32 || args.outputs[0].shape() != [batch, seq_q, heads, v_dim] {
        return Err(KernelError::Failed("the result is not BSHD float32".into()));
    }
    let causal = args.param("causal").as_bool().unwrap();
    for index in indices(&[batch, seq_q, heads]) {
        let (b, i, h) = (index[0], index[1], index[2]);
        let kv = h / (heads / kv_heads);
        let last = if causal { i + seq_k - seq_q } else { seq_k - 1 };
        let score = |j: i64| {
            let dot: f64 = (0..dim).map(|d| q.get(&[b, i, h, d]) * k.get(&[b, j, kv, d])).sum();
            (dot / (dim as f64).sqrt()).exp()
        };
        let weights: Vec<f64> = (0..=last).map(score).collect();
        let total: f64 = weights.iter().sum();
        for d in 0..v_dim {
            let sum: f64 = weights.iter().zip(0i64..).map(|(w, j)| w * v.get(&[b, j, kv, d])).sum();
            args.outputs[0].set(&[b, i, h, d], sum / total);
        }
    }
    Ok(())
}

fn picky_descriptor() -> KernelDescriptor {
    let mut kernel = descriptor("test.picky", "attention", 90);
    kernel.dtypes = DTypeSet::of(&[DType::F32]);
    kernel.requires_dtype = Some(DType::F32);
    kernel.layouts = vec![Layout::Bshd];
    kernel.requires_contiguous = true;
    kernel.shares_kv_heads = true;
    kernel.dims.insert("head_dim".into(), DimRule::default());
    kernel.params.insert("causal".into(), ParamRule::default());
    kernel
}

fn attention_by_reference(views: &[TensorView<'_>; 3], layout: Layout, causal: bool) -> Tensor {
    let [q, k, v] = views.clone();
    let inputs = [("query", q), ("key", k), ("value", v)];
    let params = [("causal", ParamValue::Bool(causal))];
    lz_cpu::call("attention", &inputs, &params, Some(layout)).unwrap().remove(0).1
}

/// Runs a call on an engine with only the picky kernel and the reference, and compares.
fn served_by_picky(views: &[TensorView<'_>; 3], layout: Layout, transforms: &[&str]) {
    let w = Watched::new();
    w.engine.register(picky_descriptor(), code(picky)).unwrap();
    for causal in [false, true] {
        let [q, k, v] = views.clone();
        let metas = views.each_ref().map(|view| TensorMeta::of(view.as_ref()));
        let named = NamedCall::new()
            .input("query", metas[0])
            .input("key", metas[1])
            .input("value", metas[2])
            .param("causal", ParamValue::Bool(causal))
            .layout(layout);
        let report = w.engine.explain("attention", &named).unwrap();
        assert_eq!(report.candidates[0].transforms, transforms);
        let done = w
            .engine
            .dispatch(
                "attention",
                Arguments::new()
                    .input("query", q)
                    .input("key", k)
                    .input("value", v)
                    .param("causal", ParamValue::Bool(causal))
                    .layout(layout),
            )
            .unwrap();
        assert_eq!(done.kernel_id, "test.picky", "{:?}", done.failures);
        let (got, want) = (done.output().unwrap(), attention_by_reference(views, layout, causal));
        assert_eq!((got.dtype(), got.shape()), (want.dtype(), want.shape()));
        let tolerance = match want.dtype() {
            DType::F16 => 1e-3,
            DType::Bf16 => 1e-2,
            _ => 1e-6,
        };
        assert_close(&got.to_f64(), &want.to_f64(), tolerance);
    }
}

#[test]
fn arguments_that_fit_are_passed_as_they_are() {
    let tensors = attention_inputs(DType::F32, Layout::Bshd);
    served_by_picky(&views(&tensors), Layout::Bshd, &[]);
}

#[test]
fn another_layout_is_transposed_and_the_result_transposed_back() {
    let tensors = attention_inputs(DType::F32, Layout::Bhsd);
    served_by_picky(&views(&tensors), Layout::Bhsd, &["layout", "contiguous"]);
}

#[test]
fn a_strided_view_is_copied() {
    // Stored with the last dimension outermost.
    let tensors = attention_inputs(DType::F32, Layout::Bshd);
    let stored = tensors.each_ref().map(|t| t.view().permuted(&[3, 0, 1, 2]).to_tensor());
    let views = stored.each_ref().map(|t| t.view().permuted(&[1, 2, 3, 0]));
    assert!(!views[0].is_contiguous());
    served_by_picky(&views, Layout::Bshd, &["contiguous"]);
}

#[test]
fn a_view_of_part_of_a_buffer_is_copied() {
    // One tensor of three, as a fused projection leaves them: [batch, seq, 3, heads, dim].
    let fused = tensor(DType::F32, &[2, 7, 3, 4, 8], 4);
    let strides = [7 * 96, 96, 8, 1];
    let part = |i: i64| TensorView::strided(DType::F32, &[2, 7, 4, 8], &strides, i * 32, fused.bytes()).unwrap();
    served_by_picky(&[part(0), part(1), part(2)], Layout::Bshd, &["contiguous"]);
}

#[test]
fn a_narrower_dtype_is_cast_and_the_result_rounded_back() {
    for dtype in [DType::F16, DType::Bf16] {
        let tensors = attention_inputs(dtype, Layout::Bshd);
        served_by_picky(&views(&tensors), Layout::Bshd, &["cast"]);
    }
}

#[test]
fn everything_at_once() {
    let tensors = attention_inputs(DType::F16, Layout::Bhsd);
    let stored = tensors.each_ref().map(|t| t.view().permuted(&[3, 0, 1, 2]).to_tensor());
    let views = stored.each_ref().map(|t| t.view().permuted(&[1, 2, 3, 0]));
    served_by_picky(&views, Layout::Bhsd, &["layout", "contiguous", "cast"]);
}

#[test]
fn a_wider_dtype_is_never_narrowed() {
    let w = Watched::new();
    w.engine.register(picky_descriptor(), code(picky)).unwrap();
    let tensors = attention_inputs(DType::F64, Layout::Bshd);
    let [q, k, v] = views(&tensors);
    let done = w
        .engine
        .dispatch(
            "attention",
            Arguments::new().input("query", q).input("key", k).input("value", v).layout(Layout::Bshd),
        )
        .unwrap();
    assert_eq!(done.kernel_id, "lz_cpu.ref.attention.gqa.prefill");
    assert!(done.failures.is_empty());
}

#[test]
fn strict_mode_and_forbidden_adaptation_refuse_with_the_reason_of_each_transform() {
    let shape = [2, 4, 5, 8];
    let strides = [320, 80, 16, 2];
    let meta = TensorMeta::new(DType::F16, &shape).strided(&strides);
    let call = NamedCall::new().input("query", meta).input("key", meta).input("value", meta).layout(Layout::Bhsd);
    let switches: [fn(&mut Settings); 2] = [|s| s.strict = true, |s| s.allow_adaptation = false];
    for switch in switches {
        let w = Watched::new();
        w.engine.register(picky_descriptor(), code(picky)).unwrap();
        assert_eq!(w.engine.validate("test.picky", &call).unwrap(), []);
        w.settings(switch);
        let reasons = w.engine.validate("test.picky", &call).unwrap();
        let mut codes: Vec<&str> = reasons.iter().map(Reason::code).collect();
        codes.dedup();
        let one = ["DTYPE_UNSUPPORTED", "LAYOUT_UNSUPPORTED", "NOT_CONTIGUOUS"];
        assert_eq!(codes, [one, one, one].concat(), "query, key and value");
        assert_eq!(
            reasons[0],
            Reason::DtypeUnsupported { input: "query".into(), found: "float16".into(), supported: "float32".into() }
        );
        assert_eq!(
            reasons[1],
            Reason::LayoutUnsupported { input: "query".into(), found: "BHSD".into(), supported: "BSHD".into() }
        );
        assert_eq!(reasons[2], Reason::NotContiguous { input: "query".into() });
        assert_eq!(w.engine.which("attention", &call).unwrap().kernel_id, "lz_cpu.ref.attention.standard.prefill");
    }
}

#[test]
fn a_kernel_that_updates_a_cache_can_be_given_adapted_keys() {
    // Takes only contiguous keys; the caches can never be replaced by copies.
    let w = Watched::new();
    let mut kernel = descriptor("test.append", "kv_cache.append", 90);
    kernel.layouts = vec![Layout::Nhd];
    kernel.requires_contiguous = true;
    let append = code(|args| {
        if !args.input("key").unwrap().is_contiguous() {
            return Err(KernelError::Failed("strided".into()));
        }
        lz_cpu::Builtin::KvAppend.run(args)
    });
    w.engine.register(kernel, append).unwrap();
    let memory = tensor(DType::F32, &[2, 4, 2], 1);
    let every_other = TensorView::strided(DType::F32, &[2, 2, 2], &[8, 4, 1], 0, memory.bytes()).unwrap();
    let slots = Tensor::from_ints(DType::I64, &[2], &[3, 0]);
    let zeros = || Tensor::zeros(DType::F32, &[2, 2, 2, 2]);
    let (mut keys, mut values) = (zeros(), zeros());
    let done = w
        .engine
        .dispatch(
            "kv_append",
            Arguments::new()
                .input("key", every_other.clone())
                .input("value", every_other.clone())
                .input("slot_mapping", slots.view())
                .update("key_cache", keys.view_mut())
                .update("value_cache", values.view_mut()),
        )
        .unwrap();
    let blank = zeros();
    let inputs = [
        ("key", every_other.clone()),
        ("value", every_other),
        ("key_cache", blank.view()),
        ("value_cache", blank.view()),
        ("slot_mapping", slots.view()),
    ];
    let want = lz_cpu::call("kv_append", &inputs, &[], None).unwrap();
    assert_eq!((&keys, &values), (&want[0].1, &want[1].1));
    // Either selection says that it cannot be adapted, or dispatch adapts it; it never fails on the way.
    assert_eq!(done.failures, []);
}

#[test]
fn an_adapted_call_keeps_the_layout_of_its_cache() {
    // The query is copied; the cache stays HND, though NHD is the default.
    let w = Watched::new();
    let mut kernel = descriptor("test.paged", "attention.paged", 90);
    kernel.layouts = vec![Layout::Nhd, Layout::Hnd];
    kernel.requires_contiguous = true;
    kernel.shares_kv_heads = true;
    kernel.dims.insert("head_dim".into(), DimRule::default());
    w.engine.register(kernel, code(|args| lz_cpu::Builtin::PagedAttention.run(args))).unwrap();
    let memory = tensor(DType::F32, &[2, 4, 16], 1);
    let query = TensorView::strided(DType::F32, &[2, 4, 8], &[64, 16, 2], 0, memory.bytes()).unwrap();
    let caches = [tensor(DType::F32, &[3, 2, 4, 8], 2), tensor(DType::F32, &[3, 2, 4, 8], 3)];
    let tables = Tensor::from_ints(DType::I32, &[2, 2], &[2, 0, 1, 0]);
    let lengths = Tensor::from_ints(DType::I32, &[2], &[4, 3]);
    let inputs = [
        ("query", query),
        ("key_cache", caches[0].view()),
        ("value_cache", caches[1].view()),
        ("block_tables", tables.view()),
        ("context_lens", lengths.view()),
    ];
    let want = lz_cpu::call("attention.paged", &inputs, &[], Some(Layout::Hnd)).unwrap().remove(0).1;
    let arguments =
        inputs.into_iter().fold(Arguments::new(), |a, (name, view)| a.input(name, view)).layout(Layout::Hnd);
    let done = w.engine.dispatch("attention.paged", arguments).unwrap();
    assert_eq!(done.op, "attention.gqa.decode.paged");
    assert_close(&done.output().unwrap().to_f64(), &want.to_f64(), 1e-6);
    assert_eq!(done.kernel_id, "test.paged", "{:?}", done.failures);
}

#[test]
fn what_is_still_forbidden_after_adapting_is_never_handed_over() {
    // Wants its query the other way round but its keys as they come: no one layout gives it both.
    let w = Watched::new();
    let mut kernel = descriptor("test.torn", "attention", 90);
    kernel.layouts = vec![Layout::Bhsd];
    kernel.shares_kv_heads = true;
    kernel.dims.insert("head_dim".into(), DimRule::default());
    kernel.params.insert("causal".into(), ParamRule::default());
    kernel.inputs.insert("key".into(), InputRule { layouts: Some(vec![Layout::Bshd]), ..InputRule::default() });
    w.engine.register(kernel, code(|_| panic!("was handed arguments it does not take"))).unwrap();
    let tensors = attention_inputs(DType::F32, Layout::Bshd);
    let [q, k, v] = views(&tensors);
    let arguments = Arguments::new().input("query", q).input("key", k).input("value", v).layout(Layout::Bshd);
    let done = w.engine.dispatch("attention", arguments).unwrap();
    assert!(done.kernel_id.starts_with("lz_cpu.ref."), "{}", done.kernel_id);
    let error = done.failures[0].error.to_string();
    assert!(error.contains("does not take them after all"), "{error}");
}
