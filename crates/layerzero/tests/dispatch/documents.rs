//! Kernels from capabilities documents.

use super::*;

/// Appendix D of the specification.
const APPENDIX_D: &str = include_str!("../../../lz-model/tests/fixtures/appendix_d.json");

#[test]
fn a_bad_document_disables_its_backend_and_nobody_else() {
    let w = Watched::new();
    w.engine.register(version("1.0"), fill(1.0)).unwrap();
    let before = seen(&w.engine);
    for (document, code) in [
        ("{", "BACKEND_IMPORT_FAILED"),
        (r#"{"schema_version": "1.0"}"#, "BACKEND_IMPORT_FAILED"),
        (r#"{"schema_version": "9.9"}"#, "CAPABILITIES_SCHEMA_MISMATCH"),
    ] {
        let error = w.engine.load_capabilities("flash_attn", document).unwrap_err();
        assert_eq!(error.code(), "INVALID_CAPABILITIES");
        assert!(error.to_string().contains("'flash_attn'") && !error.hint().is_empty(), "{error}");
        let backends = w.engine.backends();
        let (broken, fine): (Vec<_>, Vec<_>) = backends.iter().partition(|b| b.unavailable.is_some());
        assert_eq!(broken.len(), 1);
        assert_eq!(broken[0].descriptor.name, "flash_attn");
        assert_eq!(broken[0].unavailable.as_ref().unwrap().code(), code);
        assert_eq!(fine.len(), 2, "lz_cpu and test");
        assert_eq!(w.engine.list_kernels(None).unwrap(), before.0);
        assert_eq!(rms(&w.engine, &input()).unwrap().output().unwrap().to_f64()[0], 1.0);
    }
    w.engine.load_capabilities("flash_attn", APPENDIX_D).unwrap();
    assert!(w.engine.backends().iter().all(|b| b.unavailable.is_none()), "mended");
    assert_eq!(w.engine.list_kernels(None).unwrap().len(), before.0.len() + 1);
}

#[test]
fn a_bad_document_cannot_disable_the_references() {
    let w = Watched::new();
    let _ = w.engine.load_capabilities("lz_cpu", "{");
    let done = rms(&w.engine, &input());
    assert_eq!(done.map(|d| d.kernel_id).map_err(|e| e.code()), Ok("lz_cpu.ref.norm.rms".into()));
}

#[test]
fn a_mended_document_under_its_own_name_clears_the_name_it_was_loaded_by() {
    let w = Watched::new();
    w.engine.load_capabilities("flash-attn-file", r#"{"schema_version": "9.9"}"#).unwrap_err();
    w.engine.load_capabilities("flash-attn-file", APPENDIX_D).unwrap();
    let broken: Vec<String> =
        w.engine.backends().iter().filter(|b| b.unavailable.is_some()).map(|b| b.descriptor.name.clone()).collect();
    assert_eq!(broken, Vec::<String>::new());
}

#[test]
fn a_document_can_be_loaded_again() {
    let w = Watched::new();
    w.engine.load_capabilities("flash_attn", APPENDIX_D).unwrap();
    let newer = APPENDIX_D.replace("\"deterministic\": false", "\"deterministic\": true");
    let again = w.engine.load_capabilities("flash_attn", &newer);
    assert!(again.is_ok(), "{}", again.unwrap_err());
}

#[test]
fn a_document_that_takes_any_head_dimension_is_loaded() {
    let w = Watched::new();
    let any = APPENDIX_D
        .replace("\"max_head_dim\": 256", "\"max_head_dim\": null")
        .replace("\"min_head_dim\": 32,", "")
        .replace("\"head_dim_multiple\": 8,", "");
    let loaded = w.engine.load_capabilities("flash_attn", &any);
    assert!(loaded.is_ok(), "{}", loaded.unwrap_err());
}

#[test]
fn the_generations_a_document_brings_count_for_its_kernels() {
    let mut device = DeviceSpec::new(Platform::Cuda, "R100");
    device.sm = Some(200);
    let w = Watched::on(vec![device.completed(&GenerationTable::builtin())]);
    let document = APPENDIX_D
        .replace(
            "\"platform\": \"cuda\",",
            r#""platform": "cuda", "gpu_generations": [{"generation": "rubin", "sm": [200, 210], "tensor_cores": 6}],"#,
        )
        .replace("\"max_sm\": null,", r#""supported_generations": ["rubin"],"#);
    w.engine.load_capabilities("flash_attn", &document).unwrap();
    let shape = [1, 128, 8, 64];
    let meta = TensorMeta::new(DType::F16, &shape);
    let call = NamedCall::new().input("q", meta).input("k", meta).input("v", meta).layout(Layout::Bshd);
    assert_eq!(w.engine.validate("flash_attn.v2.causal", &call).unwrap(), []);
    // So they do for a device that is found later.
    let mut second = DeviceSpec::new(Platform::Cuda, "R200");
    second.sm = Some(205);
    w.engine.add_devices(vec![cpu(), second.completed(&GenerationTable::builtin())]).unwrap();
    let meta = meta.on(DeviceIx(1));
    let call = NamedCall::new().input("q", meta).input("k", meta).input("v", meta).layout(Layout::Bshd);
    assert_eq!(w.engine.validate("flash_attn.v2.causal", &call).unwrap(), []);
}

#[test]
fn a_described_device_is_selected_for_while_the_host_goes_on_computing() {
    let h100 = lz_hardware::described("h100").unwrap();
    let w = Watched::on(vec![cpu(), h100]);
    w.engine.load_capabilities("flash_attn", APPENDIX_D).unwrap();
    let shape = [2, 128, 8, 64];
    let call = |device: u16, dtype, shape: &'static [i64]| {
        let meta = TensorMeta::new(dtype, shape).on(DeviceIx(device));
        NamedCall::new().input("query", meta).input("key", meta).input("value", meta).layout(Layout::Bshd)
    };
    const SHAPE: &[i64] = &[2, 128, 8, 64];
    const ODD: &[i64] = &[2, 128, 8, 60];
    assert_eq!(shape, SHAPE);
    let on_gpu = w.engine.which("attention.causal", &call(1, DType::Bf16, SHAPE)).unwrap();
    assert_eq!((on_gpu.op, &*on_gpu.kernel_id), ("attention.standard.prefill", "flash_attn.v2.causal"));
    assert_eq!(on_gpu.version, "2.5.6");
    let on_host = w.engine.which("attention.causal", &call(0, DType::Bf16, SHAPE)).unwrap();
    assert_eq!(on_host.kernel_id, "lz_cpu.ref.attention.standard.prefill");
    assert_eq!(
        w.engine.validate("flash_attn.v2.causal", &call(0, DType::Bf16, SHAPE)).unwrap(),
        [Reason::PlatformMismatch { required: "cuda".into(), found: "cpu".into() }]
    );
    assert_eq!(
        w.engine.validate("flash_attn.v2.causal", &call(1, DType::Bf16, ODD)).unwrap(),
        [Reason::HeadDimAlignment { dim: "head_dim".into(), found: 60, multiple: 8 }]
    );

    // Nothing on the GPU takes float32, and the references run on the host only.
    let Error::NoKernel { op, rejections } = w.engine.which("attention.full", &call(1, DType::F32, SHAPE)).unwrap_err()
    else {
        panic!()
    };
    assert_eq!(op, "attention.standard.prefill");
    assert_eq!(rejections.len(), 2);
    let error = w.engine.which("attention.causal", &call(2, DType::F16, SHAPE)).unwrap_err();
    assert_eq!(error.code(), "UNKNOWN_DEVICE");

    let x = input();
    assert_close(&rms(&w.engine, &x).unwrap().output().unwrap().to_f64(), &rms_by_hand(&x), 1e-6);
    let tensors = attention_inputs(DType::F16, Layout::Bshd);
    let [q, k, v] = views(&tensors);
    let arguments = Arguments::new().input("query", q).input("key", k).input("value", v).layout(Layout::Bshd);
    let done = w.engine.dispatch("attention.causal", arguments).unwrap();
    assert_eq!(done.kernel_id, "lz_cpu.ref.attention.gqa.prefill");
    assert!(done.failures.is_empty());
}

#[test]
fn inside_graph_capture_only_kernels_proven_safe_are_chosen() {
    let w = Watched::on(vec![lz_hardware::described("h100").unwrap()]);
    w.engine.load_capabilities("flash_attn", APPENDIX_D).unwrap();
    let shape = [2, 128, 8, 64];
    let meta = TensorMeta::new(DType::F16, &shape);
    let call = NamedCall::new()
        .input("query", meta)
        .input("key", meta)
        .input("value", meta)
        .layout(Layout::Bshd)
        .context(Context { capturing: true, ..Context::default() });
    assert_eq!(w.engine.which("attention.causal", &call).unwrap().kernel_id, "flash_attn.v2.causal");
    let unsafe_one = APPENDIX_D.replace("\"is_cuda_graph_safe\": true", "\"is_cuda_graph_safe\": false");
    let w = Watched::on(vec![lz_hardware::described("h100").unwrap()]);
    w.engine.load_capabilities("flash_attn", &unsafe_one).unwrap();
    let error = w.engine.which("attention.causal", &call).unwrap_err();
    assert_eq!(error.code(), "CUDA_GRAPH_UNSAFE");
    assert!(error.to_string().contains("flash_attn.v2.causal"), "{error}");
}

#[test]
fn a_kernel_that_is_only_described_is_passed_over_until_it_is_attached() {
    let w = Watched::new();
    let document = r#"{"schema_version": "1.0", "backend": "lib", "backend_version": "1", "platform": "cpu",
        "ops": {"norm.rms": [{"kernel_id": "lib.rms", "dtypes": ["float32"], "requires_layouts": ["strided"]}]}}"#;
    w.engine.load_capabilities("lib", document).unwrap();
    let kernels = w.engine.list_kernels(Some("norm.rms")).unwrap();
    assert_eq!(kernels.iter().find(|k| k.kernel_id == "lib.rms").unwrap().dispatch, "described");
    assert_eq!(w.engine.which("norm.rms", &rms_call(&[2, 4])).unwrap().kernel_id, "lib.rms");
    let done = rms(&w.engine, &input()).unwrap();
    assert_eq!((done.kernel_id.as_str(), done.failures.len()), ("lz_cpu.ref.norm.rms", 0));
    w.engine.attach("lib.rms", "1", code(|args| lz_cpu::Builtin::RmsNorm.run(args))).unwrap();
    let attached = rms(&w.engine, &input()).unwrap();
    assert_eq!(attached.kernel_id, "lib.rms");
    assert_eq!(attached.output(), done.output());
    let unknown = w.engine.attach("lib.rms", "2", code(|args| lz_cpu::Builtin::RmsNorm.run(args)));
    assert_eq!(unknown.unwrap_err().code(), "UNKNOWN_KERNEL");
}

#[test]
fn a_document_leaves_other_backends_alone_whatever_name_it_is_loaded_under() {
    let w = Watched::new();
    let document = |backend: &str| {
        format!(
            r#"{{"schema_version": "1.0", "backend": "{backend}", "backend_version": "1", "platform": "cpu",
            "ops": {{"norm.rms": [{{"kernel_id": "{backend}.rms", "dtypes": ["float32"], "requires_layouts": ["strided"]}}]}}}}"#
        )
    };
    w.engine.load_capabilities("a", &document("a")).unwrap();
    w.engine.load_capabilities("a", &document("b")).unwrap();
    w.engine.load_capabilities("lz_cpu", &document("c")).unwrap();
    let ids: Vec<_> = w.engine.list_kernels(Some("norm.rms")).unwrap().into_iter().map(|k| k.kernel_id).collect();
    assert_eq!(ids, ["a.rms", "b.rms", "c.rms", "lz_cpu.ref.norm.rms"]);
}

#[test]
fn a_result_there_is_no_memory_for_is_an_error() {
    let w = Watched::new();
    let slopes = Tensor::from_f64(DType::F32, &[2], &[0.5, 0.25]);
    let huge = ParamValue::Int(1 << 23);
    let arguments = Arguments::new().input("slopes", slopes.view()).param("seq_q", huge).param("seq_k", huge);
    let error = w.engine.dispatch("posenc.alibi", arguments).unwrap_err();
    assert!(error.to_string().contains("out of memory"), "{error}");
}

#[test]
fn a_cast_touches_only_what_the_kernel_does_not_take_as_it_is() {
    // Computes in float32, but reads the cache as float8.
    let w = Watched::new();
    let mut kernel = descriptor("test.paged", "attention.paged", 90);
    kernel.layouts = vec![Layout::Nhd];
    kernel.dtypes = DTypeSet::of(&[DType::F32]);
    kernel.requires_dtype = Some(DType::F32);
    kernel.shares_kv_heads = true;
    kernel.dims.insert("head_dim".into(), DimRule::default());
    let fp8 = InputRule { dtypes: Some(DTypeSet::of(&[DType::F8E4M3])), ..InputRule::default() };
    kernel.inputs.insert("key_cache".into(), fp8.clone());
    kernel.inputs.insert("value_cache".into(), fp8);
    let seen = code(|args| {
        let dtypes = ["query", "key_cache"].map(|name| args.input(name).unwrap().dtype());
        assert_eq!(dtypes, [DType::F32, DType::F8E4M3]);
        lz_cpu::Builtin::PagedAttention.run(args)
    });
    w.engine.register(kernel, seen).unwrap();
    let (query, cache) = (tensor(DType::Bf16, &[1, 2, 4], 1), tensor(DType::F8E4M3, &[2, 2, 2, 4], 2));
    let (table, lengths) = (Tensor::from_ints(DType::I64, &[1, 2], &[1, 0]), Tensor::from_ints(DType::I64, &[1], &[3]));
    let arguments = Arguments::new()
        .input("query", query.view())
        .input("key_cache", cache.view())
        .input("value_cache", cache.view())
        .input("block_tables", table.view())
        .input("context_lens", lengths.view());
    let done = w.engine.dispatch("attention.paged", arguments).unwrap();
    assert_eq!((done.kernel_id.as_str(), &done.failures[..]), ("test.paged", &[][..]));
}
