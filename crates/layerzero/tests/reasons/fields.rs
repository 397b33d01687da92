//! Every field of a context and of a kernel descriptor changes what selection says, in a case of its own. A field without
//! a case does not compile: the list of cases is the pattern the struct is taken apart with.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::*;
use layerzero::selection::{Action, Condition, DeviceMemory, Health, MemoryState, Pattern, PolicySpec};

/// What selection says about a world's call: who serves it, by which score, what is done to the arguments, who is out and
/// why, and what plain torch runs.
fn said(world: &World) -> String {
    let mut spec = world.spec.clone();
    spec.kernels.push(Arc::new(world.kernel.clone()));
    let snapshot = spec.build(1).unwrap_or_else(|e| panic!("{e:?}"));
    let call = world.call();
    let rules = spec.settings.bind_rules();
    let bound = Catalog::get().resolve(world.op, &call, &rules, |ix| snapshot.device(ix)).unwrap().1;
    let decision = snapshot.select(&bound.query);
    let name = |kernel| snapshot.name(kernel);
    let ranked: Vec<_> = decision.ranked().map(|c| (name(c.kernel), c.terms.total(), c.transforms.names())).collect();
    let out = decision.candidates.iter().filter(|c| !c.accepted()).map(|c| (name(c.kernel), &c.reasons));
    let plain = decision.baseline().map(|c| name(c.kernel));
    format!("{ranked:?}, out: {:?}, plain torch: {plain:?}", out.collect::<Vec<_>>())
}

/// A world, changed.
fn with(mut world: World, change: impl FnOnce(&mut World)) -> World {
    change(&mut world);
    world
}

/// Checks that each field has an effect: in the world of its case, giving it the value of its case changes what
/// selection says.
macro_rules! each_has_an_effect {
    ($whole:ident ($fresh:expr) in $place:ident { $($field:ident: $value:expr, in $world:expr;)+ }) => {
        // Whoever adds a field adds a case for it here.
        let $whole { $($field: _),+ } = $fresh;
        $(
            let mut world = $world;
            let before = said(&world);
            world.$place.$field = $value;
            let after = said(&world);
            assert_ne!(before, after, "{} makes no difference", stringify!($field));
        )+
    };
}

#[test]
fn every_field_of_a_context_has_an_effect() {
    each_has_an_effect! { Context (Context::default()) in context {
        deterministic: true, in attention();
        capturing: true, in attention();
        requires_grad: true, in attention();
        batch_invariant: true, in attention();
        tp_invariant: true, in linear();
        kv_strategy: Some(KvStrategy::Virtual), in paged();
        tp_size: 8, in with(linear(), |w| {
            w.context.tp_invariant = true;
            w.kernel.tp = Some(TpRule { max_size: Some(4), reduction_order: ReductionOrder::Tree });
        });
        reduction: Some(ReductionOrder::Ring), in with(linear(), |w| {
            w.context.tp_invariant = true;
            w.kernel.tp = Some(TpRule { max_size: None, reduction_order: ReductionOrder::Tree });
        });
        quant: Some(QuantSpec::of(QuantFormat::Nvfp4)), in linear();
        min_accuracy_rank: 8, in with(linear(), quantized(&[QuantFormat::Mxfp4], QuantFormat::Mxfp4));
        packing: Packing::blocked(32, 1).unwrap(), in linear();
        accuracy: Accuracy::Bf16, in with(linear(), |w| w.kernel.accuracy = Accuracy::Tf32);
        threads: 16, in measured_with_threads(1);
        sdpa: SdpaChoice::new(1, &[]), in attention();
    } }
}

/// A linear layer on the host whose kernel loses to another by what was measured with so many threads.
fn measured_with_threads(threads: u16) -> World {
    with(linear(), |w| {
        w.spec.devices = vec![DeviceSpec::new(Platform::Cpu, "host")];
        w.kernel.platforms = vec![Platform::Cpu];
        w.context.threads = threads;
        let rival = KernelDescriptor { id: "lib.rival".into(), ..w.kernel.clone() };
        let query = Catalog::get().resolve(w.op, &w.call(), &BindRules::default(), |_| None).unwrap().1.query;
        let took = |kernel: &KernelDescriptor, median_us: f64| lz_predict::Observation {
            query,
            kernel: kernel.id.clone(),
            version: kernel.version.clone(),
            baseline: false,
            seen: lz_predict::Seen::Took { median_us, spread_us: 0.1, samples: 50, parts: None },
        };
        let model = lz_predict::Model::new([took(&w.kernel, 90.0), took(&rival, 10.0)], &w.spec.devices);
        w.spec.perf = Arc::new(model);
        w.spec.kernels.push(Arc::new(rival));
    })
}

/// A policy that denies kernels by a pattern.
fn denying(pattern: Pattern) -> impl FnOnce(&mut World) {
    move |w| w.spec.policy = PolicySpec::default().rule("deny", None, Condition::Always, Action::Deny(pattern))
}

/// A second kernel that can serve the call as well.
fn with_rival(world: World) -> World {
    with(world, |w| {
        let rival = KernelDescriptor { id: "lib.rival".into(), ..w.kernel.clone() };
        w.spec.kernels.push(Arc::new(rival));
    })
}

/// Tensors with gaps in the last dimension.
fn strided(world: World) -> World {
    with(world, |w| {
        for input in &mut w.inputs {
            input.strides = Some(vec![2 * 128 * 8 * 64, 2 * 8 * 64, 2 * 64, 2]);
        }
    })
}

fn other_layout(w: &mut World) {
    w.kernel.layouts = vec![Layout::Bhsd];
}

#[test]
fn every_field_of_a_kernel_descriptor_has_an_effect() {
    let named = |name: &str| Pattern::Kernel(name.into());
    let not_installed = |w: &mut World| {
        w.spec.backends.get_mut("lib").unwrap().unavailable = Some(Reason::NotInstalled { library: "lib".into() });
    };
    each_has_an_effect! { KernelDescriptor (attention_kernel()) in kernel {
        id: "other".into(), in with(attention(), denying(named("other")));
        version: "2".into(), in with(attention(), denying(named("lib.attention@2")));
        backend: "absent".into(), in with(attention(), |w| {
            w.spec.backend(BackendDescriptor::native("absent", "1.0", vec![Platform::Cuda]));
            w.spec.backends.get_mut("absent").unwrap().unavailable =
                Some(Reason::NotInstalled { library: "absent".into() });
        });
        library: Some("family".into()), in with(attention(), denying(Pattern::Source("family".into())));
        aliases: vec!["nick".into()], in with(attention(), denying(named("nick")));
        operation: "attention.full".into(), in attention();
        platforms: vec![Platform::Cpu], in attention();
        min_sm: Some(90), in attention();
        max_sm: Some(80), in attention();
        generations: vec!["hopper".into()], in attention();
        min_tensor_core_generation: Some(5), in attention();
        instruction_sets: vec!["wgmma".into()], in attention();
        device_features: vec!["fp8".into()], in attention();
        vendors: vec!["amd".into()], in attention();
        requires: vec!["lib>=2".parse().unwrap()], in attention();
        dtypes: DTypeSet::of(&[DType::Bf16]), in attention();
        layouts: vec![Layout::Bhsd], in attention();
        requires_dtype: Some(DType::F32), in with(linear(), |w| w.kernel.dtypes = DTypeSet::of(&[DType::F32]));
        requires_contiguous: true, in strided(attention());
        requires_last_dim_stride1: true, in strided(attention());
        requires_aligned: true, in with(attention(), |w| w.input("key").aligned = false);
        inputs: BTreeMap::from([("bias".to_owned(), InputRule::default())]),
            in with(linear(), |w| w.inputs.push(arg("bias", DType::F16, &[64])));
        dims: BTreeMap::from([("head_dim".to_owned(), DimRule { max: Some(32), ..DimRule::default() })]), in attention();
        params: BTreeMap::from([("scale".to_owned(), ParamRule::default())]),
            in with(attention(), |w| w.param("scale", ParamValue::Float(0.5)));
        shares_kv_heads: true, in with(attention(), |w| {
            for name in ["key", "value"] {
                w.input(name).shape[2] = 2;
            }
        });
        conditions: vec!["heads > 100".into()], in attention();
        graph_safe: true, in with(attention(), |w| w.context.capturing = true);
        deterministic: true, in with(attention(), |w| w.context.deterministic = true);
        autograd: true, in with(attention(), |w| w.context.requires_grad = true);
        batch_invariant: true, in with(attention(), |w| w.context.batch_invariant = true);
        sdpa: Some(SdpaRole::Math), in with(attention(), |w| w.context.sdpa = SdpaChoice::new(1, &[]));
        standalone: true, in with(attention(), not_installed);
        jit: true, in with(attention(), |w| {
            w.spec.health.insert("lib.attention".into(), Health { cold: true, ..Health::default() });
        });
        tp: Some(TpRule { max_size: None, reduction_order: ReductionOrder::Tree }),
            in with(linear(), |w| w.context.tp_invariant = true);
        kv_strategies: vec![KvStrategy::Virtual], in with(paged(), |w| w.context.kv_strategy = Some(KvStrategy::Virtual));
        quant: Some(QuantRule { formats: vec![QuantFormat::Nvfp4], ..QuantRule::default() }),
            in with(linear(), |w| w.context.quant = Some(QuantSpec::of(QuantFormat::Nvfp4)));
        packing: vec![Packing::blocked(32, 1).unwrap()],
            in with(linear(), |w| w.context.packing = Packing::blocked(32, 1).unwrap());
        accuracy: Accuracy::SplitBf16x2, in linear();
        workspace: Some("batch * 1000".into()), in with(attention(), |w| {
            w.spec.memory = Arc::new(DeviceMemory::of([Some(MemoryState { free: 0, largest_block: 0 })]));
        });
        grid: Some(GridRule { threads_per_block: Some(4096), ..grid() }), in attention();
        tokenizer: TokenizerRule::default(),
            in with(tokenizer(), |w| w.param("tokenizer_id", ParamValue::str("another")));
        priority: 10, in with_rival(attention());
        preferred: Some(Preferred { when: "heads > 0".into(), priority: 10 }), in with_rival(attention());
        transform_cost_hint: 3, in with(attention(), other_layout);
        reference: true, in with(attention(), |w| w.settings().enabled = false);
        baseline: true, in attention();
        proven: false, in attention();
        trust: Trust::Unproven, in with(attention(), |w| {
            (w.kernel.graph_safe, w.context.capturing) = (true, true);
        });
    } }
}
