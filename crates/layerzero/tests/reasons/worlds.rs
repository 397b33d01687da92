//! Worlds in which a kernel would do, and ways to change them.

use std::sync::Arc;

use layerzero::model::*;
use layerzero::selection::*;
use layerzero::{Engine, Error};

/// A machine on which every kernel but the reference was seen to be wrong.
pub struct SeenWrong;

impl PerfSource for SeenWrong {
    fn estimate(&self, _: &KernelDescriptor, _: &Facts<'_>) -> Option<Estimate> {
        None
    }
    fn verdict(&self, _: &KernelDescriptor, _: &Facts<'_>) -> Option<Reason> {
        Some(Reason::NumericalMismatch {
            error: "off by 3".into(),
            call: "this call".into(),
            max_error: Some(3.0),
            tolerance: Some(1e-5),
        })
    }
    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}

/// A tensor argument.
pub struct Arg {
    pub name: &'static str,
    pub dtype: DType,
    pub shape: Vec<i64>,
    pub strides: Option<Vec<i64>>,
    pub aligned: bool,
}

pub fn arg(name: &'static str, dtype: DType, shape: &[i64]) -> Arg {
    Arg { name, dtype, shape: shape.to_vec(), strides: None, aligned: true }
}

/// One kernel, one device, one call.
pub struct World {
    pub kernel: KernelDescriptor,
    pub spec: SnapshotSpec,
    pub op: &'static str,
    pub inputs: Vec<Arg>,
    pub params: Vec<(&'static str, ParamValue)>,
    pub layout: Option<Layout>,
    pub context: Context,
}

impl World {
    pub fn new(op: &'static str, device: DeviceSpec, mut kernel: KernelDescriptor) -> World {
        kernel.platforms = vec![device.platform];
        let mut spec = SnapshotSpec { devices: vec![device], ..SnapshotSpec::default() };
        spec.backend(BackendDescriptor::native("lib", "1.0", kernel.platforms.clone()));
        World { kernel, spec, op, inputs: vec![], params: vec![], layout: None, context: Context::default() }
    }

    pub fn device(&mut self) -> &mut DeviceSpec {
        &mut self.spec.devices[0]
    }

    pub fn input(&mut self, name: &str) -> &mut Arg {
        self.inputs.iter_mut().find(|i| i.name == name).unwrap()
    }

    pub fn settings(&mut self) -> &mut Settings {
        &mut self.spec.settings
    }

    pub fn param(&mut self, name: &'static str, value: ParamValue) {
        self.params.retain(|(n, _)| *n != name);
        self.params.push((name, value));
    }

    pub fn call(&self) -> NamedCall<'_> {
        NamedCall {
            inputs: self
                .inputs
                .iter()
                .map(|a| {
                    let mut meta = TensorMeta::new(a.dtype, &a.shape);
                    meta.strides = a.strides.as_deref();
                    meta.aligned = a.aligned;
                    (a.name, meta)
                })
                .collect(),
            params: self.params.clone(),
            layout: self.layout,
            context: self.context,
            ..NamedCall::new()
        }
    }

    /// Why the kernel cannot serve the call, as selection says.
    pub fn reasons(&self) -> Vec<Reason> {
        let mut spec = self.spec.clone();
        spec.kernels.push(Arc::new(self.kernel.clone()));
        let snapshot = spec.build(1).unwrap_or_else(|e| panic!("{e:?}"));
        let call = self.call();
        let rules = spec.settings.bind_rules();
        let (_, bound) = Catalog::get()
            .resolve(self.op, &call, &rules, |ix| snapshot.device(ix))
            .unwrap_or_else(|e| panic!("{}: {e}", self.op));
        let decision = snapshot.select(&bound.query);
        let (ix, _) = snapshot.kernels().find(|(_, k)| k.id == self.kernel.id).unwrap();
        let candidate = decision.candidates.iter().find(|c| c.kernel == ix).expect("the kernel is a candidate");
        assert_eq!(decision.chosen().is_some_and(|c| c.kernel == ix), candidate.accepted());
        candidate.reasons.clone()
    }
}

pub fn any_size(kernel: &mut KernelDescriptor, dims: &[&str]) {
    for dim in dims {
        kernel.dims.insert((*dim).into(), DimRule::default());
    }
}

pub fn attention_kernel() -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new("lib.attention", "attention.causal", "lib");
    kernel.dtypes = DTypeSet::of(&[DType::F16, DType::Bf16]);
    kernel.layouts = vec![Layout::Bshd];
    any_size(&mut kernel, &["head_dim"]);
    kernel
}

/// Causal attention on an A100, with a kernel that does it.
pub fn attention() -> World {
    let device = lz_hardware::described("a100").unwrap();
    let mut world = World::new("attention.causal", device, attention_kernel());
    world.inputs = ["query", "key", "value"].map(|name| arg(name, DType::F16, &[2, 128, 8, 64])).into();
    world.layout = Some(Layout::Bshd);
    world
}

/// Attention over a paged cache on an A100.
pub fn paged() -> World {
    let mut kernel = KernelDescriptor::new("lib.paged", "attention.paged", "lib");
    kernel.dtypes = DTypeSet::of(&[DType::F16]);
    kernel.layouts = vec![Layout::Nhd];
    any_size(&mut kernel, &["head_dim"]);
    let mut world = World::new("attention.paged", lz_hardware::described("a100").unwrap(), kernel);
    world.inputs = vec![
        arg("query", DType::F16, &[3, 8, 64]),
        arg("key_cache", DType::F16, &[40, 16, 8, 64]),
        arg("value_cache", DType::F16, &[40, 16, 8, 64]),
        arg("block_tables", DType::I32, &[3, 5]),
        arg("context_lens", DType::I32, &[3]),
    ];
    world
}

/// A linear layer on an A100.
pub fn linear() -> World {
    let mut kernel = KernelDescriptor::new("lib.linear", "mlp.linear", "lib");
    kernel.dtypes = DTypeSet::of(&[DType::F16]);
    kernel.layouts = vec![Layout::Strided];
    let mut world = World::new("mlp.linear", lz_hardware::described("a100").unwrap(), kernel);
    world.inputs = vec![arg("input", DType::F16, &[4, 32]), arg("weight", DType::F16, &[64, 32])];
    world
}

/// A tokenizer on the host.
pub fn tokenizer() -> World {
    let kernel = KernelDescriptor::new("lib.encode", "tokenize.encode", "lib");
    let mut world = World::new("tokenize.encode", DeviceSpec::new(Platform::Cpu, "host"), kernel);
    let serves = [
        ("tokenizer_id", "bert"),
        ("vocab_hash", "v1"),
        ("merges_hash", "m1"),
        ("added_tokens_hash", "a1"),
        ("special_tokens_hash", "s1"),
        ("normalizer_id", "nfc"),
    ];
    for (name, value) in serves {
        world.kernel.tokenizer.serves.insert(name.into(), vec![value.into()]);
        world.params.push((name, ParamValue::str(value)));
    }
    world.params.push(("texts", ParamValue::Int(4)));
    world.params.push(("length", ParamValue::Int(100)));
    world
}

pub fn changed(mut world: World, change: impl FnOnce(&mut World)) -> Vec<Reason> {
    change(&mut world);
    world.reasons()
}

pub fn attention_with(change: impl FnOnce(&mut World)) -> Vec<Reason> {
    changed(attention(), change)
}

pub fn paged_with(change: impl FnOnce(&mut World)) -> Vec<Reason> {
    changed(paged(), change)
}

pub fn linear_with(change: impl FnOnce(&mut World)) -> Vec<Reason> {
    changed(linear(), change)
}

pub fn asked_for(param: &'static str, value: &str) -> Vec<Reason> {
    changed(tokenizer(), |w| w.param(param, ParamValue::str(value)))
}

pub fn head_dim(rule: DimRule) -> Vec<Reason> {
    attention_with(|w| {
        w.kernel.dims.insert("head_dim".into(), rule);
    })
}

pub fn grid() -> GridRule {
    GridRule {
        x_formula: "batch * heads".into(),
        y_formula: None,
        z_formula: None,
        blocks_per_batch_head: 1,
        tiles_sequence: false,
        tile_size: 128,
        threads_per_block: None,
        shared_bytes_formula: None,
    }
}

pub fn quantized(formats: &[QuantFormat], call: QuantFormat) -> impl FnOnce(&mut World) {
    let formats = formats.to_vec();
    move |w: &mut World| {
        w.kernel.quant = Some(QuantRule { formats, ..QuantRule::default() });
        w.context.quant = Some(QuantSpec::of(call));
    }
}

/// The reason an engine gives for a kernel whose backend's document was refused.
pub fn refused(document: &str) -> Vec<Reason> {
    let engine = Engine::builder().devices(vec![DeviceSpec::new(Platform::Cuda, "gpu")]).build();
    assert!(matches!(engine.load_capabilities("lib", document), Err(Error::Capabilities { .. })));
    let mut kernel = attention_kernel();
    kernel.platforms = vec![Platform::Cuda];
    engine.register(kernel, Arc::new(|_: &mut KernelArgs<'_, '_>| Ok(()))).unwrap();
    let reasons = engine.validate("lib.attention", &attention().call()).unwrap();
    let backend = engine.backends().into_iter().find(|b| b.descriptor.name == "lib").unwrap();
    assert_eq!(backend.unavailable.as_slice(), reasons);
    reasons
}

pub fn unavailable(reason: Reason) -> Vec<Reason> {
    attention_with(|w| w.spec.backends.get_mut("lib").unwrap().unavailable = Some(reason))
}
