//! What is not stated is not supported, and what is stated is enforced.

use std::sync::Arc;

use lz_model::*;
use lz_select::*;

fn spec(kernel: KernelDescriptor) -> SnapshotSpec {
    let mut spec = SnapshotSpec { devices: vec![DeviceSpec::new(Platform::Cpu, "here")], ..SnapshotSpec::default() };
    spec.backend(BackendDescriptor::native("x", "1", vec![Platform::Cpu]));
    spec.kernels.push(Arc::new(kernel));
    spec
}

fn kernel(operation: &str, layouts: &[Layout]) -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new("x.k", operation, "x");
    kernel.platforms = vec![Platform::Cpu];
    kernel.dtypes = DTypeSet::of(&[DType::F32]);
    kernel.layouts = layouts.to_vec();
    kernel
}

fn codes(spec: &SnapshotSpec, op: &str, call: &NamedCall<'_>) -> (Vec<&'static str>, Transforms) {
    let query = Catalog::get().resolve(op, call, &BindRules::default(), |_| None).unwrap().1.query;
    let decision = spec.build(1).unwrap().select(&query);
    (decision.candidates[0].reasons.iter().map(Reason::code).collect(), decision.candidates[0].transforms)
}

fn attention(layouts: &[Layout]) -> KernelDescriptor {
    let mut kernel = kernel("attention", layouts);
    kernel.dims.insert("head_dim".into(), DimRule::default());
    kernel
}

fn call<'a>(shape: &'a [i64], strides: Option<&'a [i64]>, layout: Layout) -> NamedCall<'a> {
    let plain = TensorMeta::new(DType::F32, shape);
    NamedCall::new()
        .input("query", plain)
        .input("key", TensorMeta { strides, ..plain })
        .input("value", plain)
        .layout(layout)
}

#[test]
fn a_rule_on_a_parameter_that_is_a_size_is_a_rule_on_the_size() {
    let mut kernel = kernel("sampling.topk", &[Layout::Strided]);
    kernel.params.insert("k".into(), ParamRule { max: Some(64.0), ..ParamRule::default() });
    let shape = [2, 1000];
    let top = |k| NamedCall::new().input("logits", TensorMeta::new(DType::F32, &shape)).param("k", ParamValue::Int(k));
    let spec = spec(kernel);
    assert_eq!(codes(&spec, "sampling.topk", &top(64)).0, [""; 0]);
    assert_eq!(codes(&spec, "sampling.topk", &top(65)).0, ["CONSTRAINT_FAILED"]);
}

#[test]
fn a_rule_on_a_value_that_cannot_decide_is_refused() {
    let mut with_scale = attention(&[Layout::Bshd]);
    with_scale.params.insert("scale".into(), ParamRule { max: Some(1.0), ..ParamRule::default() });
    let Err(problems) = spec(with_scale).build(1) else { panic!("must not build") };
    assert!(problems[0].to_string().contains("'scale' cannot decide by its value"), "{problems:?}");
}

#[test]
fn a_layout_that_is_not_stated_is_not_taken() {
    for layouts in [&[][..], &[Layout::Contiguous][..]] {
        let Err(problems) = spec(attention(layouts)).build(1) else { panic!("{layouts:?} must not build") };
        assert!(problems[0].to_string().contains("no layout is stated for 'query'"), "{problems:?}");
    }
    let mut strict = spec(attention(&[Layout::Bshd]));
    strict.settings.strict = true;
    let shape = [2, 8, 4, 16];
    assert_eq!(codes(&strict, "attention", &call(&shape, None, Layout::Bshd)).0, [""; 0]);
    assert_eq!(codes(&strict, "attention", &call(&shape, None, Layout::Bhsd)).0, ["LAYOUT_UNSUPPORTED"; 3]);
}

#[test]
fn one_input_can_be_asked_to_be_contiguous() {
    let mut kernel = attention(&[Layout::Bshd, Layout::Bhsd]);
    let contiguous = InputRule { layouts: Some(vec![Layout::Contiguous]), ..InputRule::default() };
    kernel.inputs.insert("key".into(), contiguous);
    let (shape, strides) = ([2, 8, 4, 16], [1024, 128, 32, 2]);
    let mut spec = spec(kernel);
    assert_eq!(codes(&spec, "attention", &call(&shape, None, Layout::Bhsd)), (vec![], Transforms::NONE));
    let (reasons, transforms) = codes(&spec, "attention", &call(&shape, Some(&strides), Layout::Bshd));
    assert_eq!((reasons.len(), transforms), (0, Transforms::CONTIGUOUS));
    spec.settings.strict = true;
    assert_eq!(codes(&spec, "attention", &call(&shape, Some(&strides), Layout::Bshd)).0, ["NOT_CONTIGUOUS"]);
}

#[test]
fn indices_too_must_be_contiguous_for_a_kernel_that_wants_it() {
    let mut lookup = kernel("embedding.lookup", &[Layout::Contiguous]);
    lookup.requires_contiguous = true;
    let mut spec = spec(lookup);
    spec.settings.strict = true;
    let (indices, weight, strides) = ([4], [10, 8], [3]);
    let call = NamedCall::new()
        .input("indices", TensorMeta::new(DType::I64, &indices).strided(&strides))
        .input("weight", TensorMeta::new(DType::F32, &weight));
    assert_eq!(codes(&spec, "embedding.lookup", &call).0, ["NOT_CONTIGUOUS"]);
}

#[test]
fn a_tensor_that_wants_a_gradient_rules_out_kernels_without_one() {
    let spec = spec(kernel("norm.rms", &[Layout::Strided]));
    let shape = [2, 8];
    let meta = TensorMeta { requires_grad: true, ..TensorMeta::new(DType::F32, &shape) };
    assert_eq!(codes(&spec, "norm.rms", &NamedCall::new().input("input", meta)).0, ["AUTOGRAD_UNSUPPORTED"]);
}

#[test]
fn packed_weights_are_only_for_kernels_that_take_them() {
    let spec = spec(kernel("norm.rms", &[Layout::Strided]));
    let shape = [2, 8];
    let context = Context { packing: Packing::blocked(16, 2).unwrap(), ..Context::default() };
    let call = NamedCall::new().input("input", TensorMeta::new(DType::F32, &shape)).context(context);
    assert_eq!(codes(&spec, "norm.rms", &call).0, ["PACKING_UNSUPPORTED"]);
}

#[test]
fn a_grid_is_not_launched_on_a_gpu_whose_limits_are_not_known() {
    let mut launched = kernel("norm.rms", &[Layout::Strided]);
    launched.platforms = vec![Platform::Cuda];
    launched.grid = Some(GridRule {
        x_formula: "rows".into(),
        y_formula: None,
        z_formula: None,
        blocks_per_batch_head: 1,
        tiles_sequence: false,
        tile_size: 128,
        threads_per_block: None,
        shared_bytes_formula: None,
    });
    let mut spec = spec(launched);
    spec.devices = vec![DeviceSpec::new(Platform::Cuda, "unknown")];
    let shape = [2, 8];
    let call = NamedCall::new().input("input", TensorMeta::new(DType::F32, &shape));
    assert_eq!(codes(&spec, "norm.rms", &call).0, ["DEVICE_CAPABILITY_UNSUPPORTED"]);
    spec.devices = vec![spec.devices[0].clone().completed(&GenerationTable::builtin())];
    assert_eq!(codes(&spec, "norm.rms", &call).0, [""; 0]);
}

/// Times that are no times.
struct Nonsense(f64, f64);

impl PerfSource for Nonsense {
    fn estimate(&self, _: &KernelDescriptor, _: &Facts<'_>) -> Option<Estimate> {
        let (median_us, spread_us) = (self.0, self.1);
        Some(Estimate {
            median_us,
            spread_us,
            apart_us: None,
            sides: None,
            samples: 1,
            kind: EstimateKind::Measured,
            trusted: true,
        })
    }

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}

#[test]
fn a_time_that_is_no_number_is_not_known() {
    let shape = [2, 8];
    let call = NamedCall::new().input("input", TensorMeta::new(DType::F32, &shape));
    let query = Catalog::get().resolve("norm.rms", &call, &BindRules::default(), |_| None).unwrap().1.query;
    for (median, spread) in [(1.0, f64::NAN), (f64::NAN, 1.0), (f64::INFINITY, 1.0), (-f64::INFINITY, 0.0)] {
        let mut spec = spec(kernel("norm.rms", &[Layout::Strided]));
        spec.perf = Arc::new(Nonsense(median, spread));
        let decision = spec.build(1).unwrap().select(&query);
        assert_eq!((decision.basis, decision.ranking.len()), (Basis::Declared, 1));
    }
}
