//! Dispatch: kernels behind one call, what happens when they fail, and what the engine says about it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use layerzero::model::*;
use layerzero::selection::*;
use layerzero::{Arguments, DynamicKernel, Engine, Error, Failure, Warning};
use serde_json::Value;

// --- an engine that can be watched ---------------------------------------------------------

/// An engine with a clock moved by hand, and the warnings it gave.
struct Watched {
    engine: Engine,
    clock: Arc<AtomicU64>,
    warnings: Arc<Mutex<Vec<Warning>>>,
}

impl Watched {
    fn new() -> Watched {
        Watched::on(vec![cpu()])
    }

    fn on(devices: Vec<DeviceSpec>) -> Watched {
        let (clock, warnings) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::new())));
        let given = Arc::clone(&warnings);
        let engine = Engine::builder()
            .devices(devices)
            .cache(CacheConfig { clock: Clock::Manual(Arc::clone(&clock)), ..CacheConfig::default() })
            .on_warning(move |warning| given.lock().unwrap().push(warning.clone()))
            .build();
        Watched { engine, clock, warnings }
    }

    fn at(&self, milliseconds: u64) {
        self.clock.store(milliseconds, Ordering::Release);
    }

    fn warnings(&self) -> Vec<Warning> {
        self.warnings.lock().unwrap().clone()
    }

    fn settings(&self, change: impl FnOnce(&mut Settings)) {
        self.engine.update(|spec| change(&mut spec.settings)).unwrap();
    }
}

fn cpu() -> DeviceSpec {
    DeviceSpec::new(Platform::Cpu, "host")
}

/// A kernel made of code, for `op`, preferred over the reference.
fn descriptor(id: &str, op: &str, priority: i32) -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new(id, op, "test");
    kernel.version = "1.0".into();
    kernel.platforms = vec![Platform::Cpu];
    kernel.dtypes = DTypeSet::FLOATS;
    kernel.layouts = vec![Layout::Strided];
    kernel.priority = priority;
    kernel
}

fn code(
    run: impl Fn(&mut KernelArgs<'_, '_>) -> Result<(), KernelError> + Send + Sync + 'static,
) -> Arc<dyn DynamicKernel> {
    Arc::new(run)
}

/// Fills every output with a number.
fn fill(number: f64) -> Arc<dyn DynamicKernel> {
    code(move |args| {
        for output in args.outputs.iter_mut() {
            for index in indices(output.shape()) {
                output.set(&index, number);
            }
        }
        Ok(())
    })
}

fn fails(error: KernelError) -> Arc<dyn DynamicKernel> {
    code(move |_| Err(error.clone()))
}

/// Numbers that every float dtype holds exactly.
fn numbers(count: i64, salt: i64) -> Vec<f64> {
    (0..count).map(|i| ((i * 37 + salt * 11) % 17 - 8) as f64 / 8.0).collect()
}

fn tensor(dtype: DType, shape: &[i64], salt: i64) -> Tensor {
    Tensor::from_f64(dtype, shape, &numbers(shape.iter().product(), salt))
}

fn input() -> Tensor {
    tensor(DType::F32, &[2, 4], 1)
}

fn rms(engine: &Engine, x: &Tensor) -> Result<layerzero::Dispatched, Error> {
    engine.dispatch("rms_norm", Arguments::new().input("x", x.view()))
}

/// `x / sqrt(mean(x^2) + 1e-6)`, by hand.
fn rms_by_hand(x: &Tensor) -> Vec<f64> {
    let columns = *x.shape().last().unwrap() as usize;
    let row = |row: &[f64]| {
        let mean: f64 = row.iter().map(|v| v * v).sum::<f64>() / columns as f64;
        row.iter().map(|v| v / (mean + 1e-6).sqrt()).collect::<Vec<f64>>()
    };
    x.to_f64().chunks(columns).flat_map(row).collect()
}

fn assert_close(got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance * (1.0 + w.abs()), "element {i} is {g}, expected {w}");
    }
}

fn rms_call<'a>(shape: &'a [i64]) -> NamedCall<'a> {
    NamedCall::new().input("input", TensorMeta::new(DType::F32, shape))
}

// --- one call, many kernels ----------------------------------------------------------------

#[test]
fn static_and_dynamic_kernels_stand_behind_the_same_call() {
    let w = Watched::new();
    let x = input();
    let by_reference = rms(&w.engine, &x).unwrap();
    assert_eq!((by_reference.op, &*by_reference.kernel_id), ("norm.rms", "lz_cpu.ref.norm.rms"));
    assert_close(&by_reference.output().unwrap().to_f64(), &rms_by_hand(&x), 1e-6);

    w.engine.register(descriptor("test.rms", "norm.rms", 80), fill(7.0)).unwrap();
    let done = rms(&w.engine, &x).unwrap();
    assert_eq!(done.kernel_id, "test.rms");
    assert_eq!(done.outputs.len(), 1);
    assert_eq!(done.outputs[0].0, "output");
    assert_eq!(done.output().unwrap(), &Tensor::from_f64(DType::F32, &[2, 4], &[7.0; 8]));
    assert!(done.failures.is_empty() && w.warnings().is_empty());

    let kinds = w.engine.list_kernels(Some("rms_norm")).unwrap();
    let kinds: Vec<(&str, &str)> = kinds.iter().map(|k| (k.kernel_id.as_str(), k.dispatch)).collect();
    assert_eq!(kinds, [("lz_cpu.ref.norm.rms", "static"), ("test.rms", "dynamic")]);
}

#[test]
fn a_dynamic_kernel_gets_the_arguments_checked_and_completed() {
    let w = Watched::new();
    let seen = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&seen);
    let kernel = code(move |args| {
        assert_eq!(args.op().id(), "norm.rms");
        assert_eq!((args.dim("rows"), args.dim("hidden")), (2, 4));
        assert_eq!(args.param("eps"), ParamValue::Float(1e-6));
        assert!(args.input("weight").is_none());
        assert_eq!(args.input("x").unwrap().shape(), [2, 4]);
        assert_eq!((args.outputs.len(), args.outputs[0].shape()), (1, &[2, 4][..]));
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    w.engine.register(descriptor("test.rms", "norm.rms", 80), kernel).unwrap();
    let done = rms(&w.engine, &input()).unwrap();
    assert_eq!((done.kernel_id.as_str(), seen.load(Ordering::Relaxed)), ("test.rms", 1), "{:?}", done.failures);
}

// --- failing -------------------------------------------------------------------------------

#[test]
fn a_kernel_that_fails_in_any_way_is_followed_by_the_next_and_at_last_by_the_reference() {
    let w = Watched::new();
    let out_of_memory = KernelError::OutOfMemory("4 GiB".into());
    let engine = &w.engine;
    engine.register(descriptor("test.first", "norm.rms", 90), fails(KernelError::Failed("no luck".into()))).unwrap();
    engine.register(descriptor("test.second", "norm.rms", 80), code(|_| panic!("at {}", "the disco"))).unwrap();
    engine.register(descriptor("test.third", "norm.rms", 70), fails(out_of_memory.clone())).unwrap();
    // Writes half of the result before it gives up.
    let half = code(|args: &mut KernelArgs<'_, '_>| {
        args.outputs[0].set(&[0, 0], 99.0);
        Err(KernelError::Failed("half way".into()))
    });
    engine.register(descriptor("test.fourth", "norm.rms", 60), half).unwrap();

    let x = input();
    let done = rms(engine, &x).unwrap();
    assert_eq!(done.kernel_id, "lz_cpu.ref.norm.rms");
    assert_close(&done.output().unwrap().to_f64(), &rms_by_hand(&x), 1e-6);
    let failure = |id: &str, error| Failure { kernel_id: id.into(), error };
    assert_eq!(
        done.failures,
        [
            failure("test.first", KernelError::Failed("no luck".into())),
            failure("test.second", KernelError::Failed("panicked: at the disco".into())),
            failure("test.third", out_of_memory),
            failure("test.fourth", KernelError::Failed("half way".into())),
        ]
    );
    let plan = engine.select("rms_norm", &rms_call(&[2, 4])).unwrap();
    assert_eq!(plan, ["test.first", "test.second", "test.third", "test.fourth", "lz_cpu.ref.norm.rms"]);
}

#[test]
fn a_chain_longer_than_a_plan_still_ends_in_the_reference() {
    let w = Watched::new();
    for i in 0..20 {
        let kernel = descriptor(&format!("test.k{i:02}"), "norm.rms", 90 - i);
        w.engine.register(kernel, fails(KernelError::Failed(format!("{i}")))).unwrap();
    }
    let x = input();
    let done = rms(&w.engine, &x).unwrap();
    assert_eq!(done.kernel_id, "lz_cpu.ref.norm.rms");
    assert_close(&done.output().unwrap().to_f64(), &rms_by_hand(&x), 1e-6);
    let tried: Vec<&str> = done.failures.iter().map(|f| f.kernel_id.as_str()).collect();
    assert_eq!(tried, ["test.k00", "test.k01", "test.k02", "test.k03", "test.k04", "test.k05"]);
}

#[test]
fn a_fallback_is_said_once_a_minute() {
    let w = Watched::new();
    w.engine.register(descriptor("test.rms", "norm.rms", 90), fails(KernelError::Failed("no luck".into()))).unwrap();
    let x = input();
    for at in [0, 1, 30_000, 59_999] {
        w.at(at);
        rms(&w.engine, &x).unwrap();
    }
    let expected = Warning::FellBack {
        op: "norm.rms",
        failed: "test.rms".into(),
        error: "no luck".into(),
        served: "lz_cpu.ref.norm.rms".into(),
    };
    assert_eq!(w.warnings(), std::slice::from_ref(&expected));
    for word in ["norm.rms", "test.rms", "no luck", "lz_cpu.ref.norm.rms"] {
        assert!(expected.to_string().contains(word), "{expected}");
    }
    // Another cause is not silenced by this one.
    w.engine
        .register(descriptor("test.gelu", "activation.gelu", 90), fails(KernelError::Failed("no luck".into())))
        .unwrap();
    w.engine.dispatch("gelu", Arguments::new().input("x", x.view())).unwrap();
    assert_eq!(w.warnings().len(), 2);
    w.at(60_000);
    rms(&w.engine, &x).unwrap();
    rms(&w.engine, &x).unwrap();
    assert_eq!(w.warnings().len(), 3);
    assert_eq!(w.warnings()[2], expected);
}

#[test]
fn without_fallback_the_first_failure_is_the_end() {
    let w = Watched::new();
    w.engine.register(descriptor("test.rms", "norm.rms", 90), fails(KernelError::OutOfMemory("4 GiB".into()))).unwrap();
    w.settings(|s| s.fallback_enabled = false);
    let error = rms(&w.engine, &input()).unwrap_err();
    assert_eq!(error.code(), "KERNEL_EXECUTION_FAILED");
    let text = error.to_string();
    let Error::Execution { op, chain } = error else { panic!("{error}") };
    assert_eq!(op, "norm.rms");
    assert_eq!(chain, [Failure { kernel_id: "test.rms".into(), error: KernelError::OutOfMemory("4 GiB".into()) }]);
    assert!(text.contains("test.rms") && text.contains("4 GiB"), "{text}");
    assert!(w.warnings().is_empty());
    w.settings(|s| s.fallback_enabled = true);
    assert_eq!(rms(&w.engine, &input()).unwrap().kernel_id, "lz_cpu.ref.norm.rms");
}

fn bad_data() -> KernelError {
    KernelError::BadData { input: "indices", at: vec![0], value: 9, expected: "but the table has 3 rows".into() }
}

#[test]
fn bad_data_stops_the_chain() {
    let w = Watched::new();
    let ran = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&ran);
    w.engine.register(descriptor("test.first", "embedding.lookup", 90), fails(bad_data())).unwrap();
    let counting = code(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    w.engine.register(descriptor("test.second", "embedding.lookup", 80), counting).unwrap();
    let (ids, table) = (Tensor::from_ints(DType::I64, &[1], &[0]), tensor(DType::F32, &[3, 2], 0));
    let call = |ids: &Tensor| {
        w.engine.dispatch("embedding", Arguments::new().input("indices", ids.view()).input("weight", table.view()))
    };
    let error = call(&ids).unwrap_err();
    assert!(error.hint().contains("data of the call is invalid"), "{}", error.hint());
    let Error::Execution { chain, .. } = error else { panic!() };
    assert_eq!(chain, [Failure { kernel_id: "test.first".into(), error: bad_data() }]);
    assert_eq!(ran.load(Ordering::Relaxed), 0);

    // The reference says so as well, after another kernel merely failed.
    w.engine.unregister("test.first", "1.0").unwrap();
    w.engine.unregister("test.second", "1.0").unwrap();
    w.engine
        .register(descriptor("test.first", "embedding.lookup", 90), fails(KernelError::Failed("no luck".into())))
        .unwrap();
    let Error::Execution { chain, .. } = call(&Tensor::from_ints(DType::I64, &[1], &[9])).unwrap_err() else {
        panic!()
    };
    assert_eq!(chain.len(), 2);
    assert!(matches!(&chain[1].error, KernelError::BadData { input: "indices", value: 9, .. }), "{chain:?}");
}

// --- in place ------------------------------------------------------------------------------

fn cache_kernel(id: &str, op: &str, kernel: Arc<dyn DynamicKernel>) -> (KernelDescriptor, Arc<dyn DynamicKernel>) {
    let mut descriptor = descriptor(id, op, 90);
    descriptor.dtypes = DTypeSet::FLOATS_AND_FP8;
    descriptor.layouts = vec![Layout::Nhd, Layout::Hnd, Layout::Strided];
    (descriptor, kernel)
}

/// Overwrites everything it can, then fails.
fn vandal() -> Arc<dyn DynamicKernel> {
    code(|args| {
        for output in args.outputs.iter_mut() {
            for index in indices(output.shape()) {
                output.set(&index, 1.0);
            }
        }
        Err(KernelError::Failed("gave up".into()))
    })
}

#[test]
fn a_kernel_that_scribbles_on_the_cache_and_fails_leaves_no_trace() {
    let w = Watched::new();
    for op in ["kv_cache.append", "kv_cache.compact"] {
        let (descriptor, kernel) = cache_kernel(&format!("vandal.{op}"), op, vandal());
        w.engine.register(descriptor, kernel).unwrap();
    }
    let fresh = || [tensor(DType::F16, &[3, 2, 2, 2], 5), tensor(DType::F16, &[3, 2, 2, 2], 6)];
    let new = [tensor(DType::F16, &[2, 2, 2], 7), tensor(DType::F16, &[2, 2, 2], 8)];
    let slots = Tensor::from_ints(DType::I64, &[2], &[4, -1]);
    let moves = Tensor::from_ints(DType::I32, &[1, 2], &[2, 0]);

    let [mut keys, mut values] = fresh();
    let done = w
        .engine
        .dispatch(
            "kv_append",
            Arguments::new()
                .input("key", new[0].view())
                .input("value", new[1].view())
                .input("slot_mapping", slots.view())
                .update("key_cache", keys.view_mut())
                .update("value_cache", values.view_mut()),
        )
        .unwrap();
    assert_eq!((done.kernel_id.as_str(), done.failures.len()), ("lz_cpu.ref.kv_cache.append", 1));
    assert!(done.outputs.is_empty(), "the caches were updated in place");
    for ((cache, old), new) in [keys, values].iter().zip(fresh()).zip(&new) {
        let mut want = old.to_f64();
        want[16..20].copy_from_slice(&new.to_f64()[..4]); // slot 4 is the first slot of page 2
        assert_eq!(cache.to_f64(), want);
    }

    let [mut keys, mut values] = fresh();
    let moved = w.engine.dispatch(
        "kv_compact",
        Arguments::new()
            .input("moves", moves.view())
            .update("key_cache", keys.view_mut())
            .update("value_cache", values.view_mut()),
    );
    assert_eq!(moved.unwrap().failures[0].kernel_id, "vandal.kv_cache.compact");
    for (cache, old) in [keys, values].iter().zip(fresh()) {
        let old = old.to_f64();
        let want = [&old[16..], &old[8..]].concat();
        assert_eq!(cache.to_f64(), want, "page 2 became page 0");
    }
}

#[test]
fn a_call_that_fails_altogether_leaves_no_trace_either() {
    let w = Watched::new();
    let (descriptor, kernel) = cache_kernel("vandal", "kv_cache.append", vandal());
    w.engine.register(descriptor, kernel).unwrap();
    let mut caches = [tensor(DType::F32, &[1, 2, 1, 2], 5), tensor(DType::F32, &[1, 2, 1, 2], 6)];
    let before = caches.clone();
    let new = tensor(DType::F32, &[1, 1, 2], 7);
    let beyond = Tensor::from_ints(DType::I64, &[1], &[100]);
    let [keys, values] = &mut caches;
    let error = w
        .engine
        .dispatch(
            "kv_append",
            Arguments::new()
                .input("key", new.view())
                .input("value", new.view())
                .input("slot_mapping", beyond.view())
                .update("key_cache", keys.view_mut())
                .update("value_cache", values.view_mut()),
        )
        .unwrap_err();
    let Error::Execution { chain, .. } = error else { panic!("{error}") };
    assert_eq!(chain.len(), 2);
    assert_eq!(caches, before);
}

#[test]
fn every_bit_of_a_cache_is_put_back() {
    let w = Watched::new();
    let (descriptor, kernel) = cache_kernel("vandal", "kv_cache.append", vandal());
    w.engine.register(descriptor, kernel).unwrap();
    let new = tensor(DType::F32, &[1, 1, 16], 7);
    let nowhere = Tensor::from_ints(DType::I64, &[1], &[-1]);
    // Every code an eight-bit float has, both zeros and every NaN among them.
    let codes: Vec<u8> = (0..=255).collect();
    for dtype in [DType::F8E4M3, DType::F8E5M2] {
        let (mut keys, mut values) = (codes.clone(), codes.clone());
        let shape = [4, 4, 1, 16];
        let done = w.engine.dispatch(
            "kv_append",
            Arguments::new()
                .input("key", new.view())
                .input("value", new.view())
                .input("slot_mapping", nowhere.view())
                .update("key_cache", TensorViewMut::contiguous(dtype, &shape, &mut keys).unwrap())
                .update("value_cache", TensorViewMut::contiguous(dtype, &shape, &mut values).unwrap()),
        );
        assert_eq!(done.unwrap().failures.len(), 1, "the vandal ran, and nothing was to be written");
        let changed: Vec<String> = codes
            .iter()
            .zip(&keys)
            .filter(|(old, new)| old != new)
            .map(|(old, new)| format!("{old:#04x} became {new:#04x}"))
            .collect();
        assert!(changed.is_empty(), "{dtype}: {changed:?}");
        assert_eq!(values, codes);
    }
}

#[test]
fn a_tensor_that_is_updated_must_be_given_as_one() {
    let w = Watched::new();
    let (new, cache) = (tensor(DType::F32, &[1, 1, 2], 1), tensor(DType::F32, &[1, 1, 1, 2], 2));
    let slot = Tensor::from_ints(DType::I64, &[1], &[0]);
    let error = w
        .engine
        .dispatch(
            "kv_append",
            Arguments::new()
                .input("key", new.view())
                .input("value", new.view())
                .input("slot_mapping", slot.view())
                .input("key_cache", cache.view())
                .input("value_cache", cache.view()),
        )
        .unwrap_err();
    assert!(error.to_string().contains("'key_cache'; pass it as an updated tensor"), "{error}");
}

#[test]
fn a_tensor_that_is_only_read_may_not_panic_when_given_as_updated() {
    let result = std::panic::catch_unwind(|| {
        let mut x = input();
        Watched::new().engine.dispatch("rms_norm", Arguments::new().update("x", x.view_mut())).map(|_| ())
    });
    assert!(result.is_ok(), "an error, or a result, but no panic");
}

#[test]
fn a_result_too_large_to_exist_is_an_error_and_not_a_panic() {
    let result = std::panic::catch_unwind(|| {
        let slopes = tensor(DType::F32, &[2], 0);
        let huge = ParamValue::Int(1 << 40);
        let arguments = Arguments::new().input("slopes", slopes.view()).param("seq_q", huge).param("seq_k", huge);
        Watched::new().engine.dispatch("alibi_bias", arguments).map(|_| ())
    });
    assert!(result.expect("no panic").is_err());
}

// --- transforms ----------------------------------------------------------------------------

/// Attention as a library would have it: BSHD, float32, contiguous, causal or not, nothing else. It
/// refuses anything it did not declare, so a call it serves was really adapted.
fn picky(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
    let [q, k, v] = ["query", "key", "value"].map(|name| args.input(name).unwrap().clone());
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

/// Query, key and value of one layout: 2 sequences, 5 queries, 7 keys, 4 heads over 2.
fn attention_inputs(dtype: DType, layout: Layout) -> [Tensor; 3] {
    let shape = |seq, heads, dim| match layout {
        Layout::Bhsd => [2, heads, seq, dim],
        _ => [2, seq, heads, dim],
    };
    [tensor(dtype, &shape(5, 4, 8), 1), tensor(dtype, &shape(7, 2, 8), 2), tensor(dtype, &shape(7, 2, 6), 3)]
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
        let metas = views.each_ref().map(TensorView::meta);
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

fn views(tensors: &[Tensor; 3]) -> [TensorView<'_>; 3] {
    tensors.each_ref().map(Tensor::view)
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

// --- registering ---------------------------------------------------------------------------

fn version(number: &str) -> KernelDescriptor {
    KernelDescriptor { version: number.into(), ..descriptor("test.rms", "norm.rms", 80) }
}

#[test]
fn of_several_versions_the_newest_is_preferred_and_any_can_be_locked_or_removed() {
    let w = Watched::new();
    for (number, result) in [("1.9", 19.0), ("1.10", 110.0), ("1.2", 12.0)] {
        w.engine.register(version(number), fill(result)).unwrap();
    }
    let x = input();
    let result = || rms(&w.engine, &x).unwrap().output().unwrap().to_f64()[0];
    let which = || w.engine.which("norm.rms", &rms_call(&[2, 4])).unwrap().version;
    assert_eq!((result(), which().as_str()), (110.0, "1.10"));

    w.engine.update(|spec| spec.policy = PolicySpec::default().lock("norm.rms", "test.rms@1.2")).unwrap();
    assert_eq!((result(), which().as_str()), (12.0, "1.2"));
    let locked_out = w.engine.validate("test.rms@1.10", &rms_call(&[2, 4])).unwrap();
    assert_eq!(locked_out, [Reason::PolicyLocked { locked: "test.rms@1.2".into() }]);
    assert_eq!(w.engine.validate("test.rms@1.2", &rms_call(&[2, 4])).unwrap(), []);

    w.engine.update(|spec| spec.policy = PolicySpec::default()).unwrap();
    w.engine.unregister("test.rms", "1.10").unwrap();
    assert_eq!((result(), which().as_str()), (19.0, "1.9"));
    w.engine.register(version("1.10"), fill(111.0)).unwrap();
    assert_eq!(result(), 111.0, "the implementation went with its registration");
    for number in ["1.10", "1.9", "1.2"] {
        w.engine.unregister("test.rms", number).unwrap();
    }
    assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, "lz_cpu.ref.norm.rms");
    let again = w.engine.unregister("test.rms", "1.2").unwrap_err();
    assert_eq!(again.code(), "UNKNOWN_KERNEL");
}

#[test]
fn a_newer_version_that_fails_is_followed_by_the_older() {
    let w = Watched::new();
    w.engine.register(version("2.0"), fails(KernelError::Failed("regression".into()))).unwrap();
    w.engine.register(version("1.0"), fill(1.0)).unwrap();
    let done = rms(&w.engine, &input()).unwrap();
    assert_eq!((done.failures.len(), done.output().unwrap().to_f64()[0]), (1, 1.0));
}

/// What can be seen of an engine.
fn seen(engine: &Engine) -> (Vec<layerzero::KernelInfo>, Vec<String>, u64) {
    let backends = engine.backends().iter().map(|b| format!("{b:?}")).collect();
    (engine.list_kernels(None).unwrap(), backends, engine.with_snapshot(Snapshot::epoch))
}

#[test]
fn a_registration_that_is_refused_leaves_the_engine_as_it_was() {
    let w = Watched::new();
    w.engine.register(version("1.0"), fill(1.0)).unwrap();
    let x = input();
    rms(&w.engine, &x).unwrap();
    let before = seen(&w.engine);

    let broken = |change: fn(&mut KernelDescriptor)| {
        let mut kernel = descriptor("other.kernel", "norm.rms", 90);
        kernel.backend = "other".into();
        change(&mut kernel);
        kernel
    };
    let refused: [(KernelDescriptor, &str); 7] = [
        (version("1.0"), "'test.rms' version 1.0 is registered twice"),
        (broken(|k| k.conditions = vec!["rows >".into()]), "other.kernel"),
        (broken(|k| k.conditions = vec!["rwos > 1".into()]), "rwos"),
        (broken(|k| drop(k.dims.insert("hiden".into(), DimRule::default()))), "hiden"),
        (
            broken(|k| {
                k.dims.insert("hidden".into(), DimRule { multiple_of: Some(0), ..DimRule::default() });
            }),
            "multiple_of",
        ),
        (broken(|k| k.layouts = vec![Layout::Bshd]), "no named layouts"),
        (broken(|k| k.operation = "norm.rsm".into()), "norm.rms"),
    ];
    for (kernel, words) in refused {
        let error = w.engine.register(kernel, fill(9.0)).unwrap_err();
        assert_eq!(error.code(), "INVALID_CONFIGURATION", "{error}");
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(seen(&w.engine), before);
        assert_eq!(rms(&w.engine, &x).unwrap().output().unwrap().to_f64()[0], 1.0);
    }
    let error = w.engine.update(|spec| spec.policy = PolicySpec::default().lock("norm.rsm", "x")).unwrap_err();
    assert!(error.to_string().contains("norm.rsm"), "{error}");
    assert_eq!(seen(&w.engine), before);
}

// --- capabilities --------------------------------------------------------------------------

/// Appendix D of the specification.
const APPENDIX_D: &str = include_str!("../../lz-model/tests/fixtures/appendix_d.json");

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

// --- layouts -------------------------------------------------------------------------------

#[test]
fn an_ambiguous_layout_is_said_once_a_minute_per_shape_and_refused_in_strict_mode() {
    let w = Watched::new();
    let tensors = |n: i64| ["query", "key", "value"].map(|_| tensor(DType::F32, &[1, n, n, 8], n));
    let call = |n: i64, layout: Option<Layout>| {
        let tensors = tensors(n);
        let [q, k, v] = views(&tensors);
        let mut arguments = Arguments::new().input("query", q).input("key", k).input("value", v);
        if let Some(layout) = layout {
            arguments = arguments.layout(layout);
        }
        w.engine.dispatch("attention", arguments).map(|done| done.output().unwrap().to_f64())
    };
    let four = call(4, None).unwrap();
    assert_eq!(four, call(4, Some(Layout::Bshd)).unwrap(), "BSHD is assumed");
    assert_ne!(four, call(4, Some(Layout::Bhsd)).unwrap());
    w.at(59_999);
    call(4, None).unwrap();
    let ambiguous = |n: i64| Warning::AmbiguousLayout { op: "attention.standard.prefill", shape: vec![1, n, n, 8] };
    assert_eq!(w.warnings(), [ambiguous(4)]);
    assert!(ambiguous(4).to_string().contains("[1, 4, 4, 8]"));
    call(6, None).unwrap();
    assert_eq!(w.warnings(), [ambiguous(4), ambiguous(6)]);
    w.at(60_000);
    call(4, None).unwrap();
    call(6, None).unwrap();
    assert_eq!(w.warnings(), [ambiguous(4), ambiguous(6), ambiguous(4)]);

    w.settings(|s| s.strict = true);
    let error = call(4, None).unwrap_err();
    assert_eq!(error.code(), "AMBIGUOUS_LAYOUT");
    assert!(error.to_string().contains("[1, 4, 4, 8]"), "{error}");
    assert_eq!(call(4, Some(Layout::Bshd)).unwrap(), four);
    assert_eq!(w.warnings().len(), 3);
}

// --- what the engine says ------------------------------------------------------------------

/// An engine with an accepted kernel, one that needs a transform, one that is out, and the reference.
fn mixed() -> Watched {
    let w = Watched::new();
    let mut out = descriptor("test.out", "norm.rms", 95);
    out.dims.insert("hidden".into(), DimRule { min: Some(1000), ..DimRule::default() });
    out.requires = vec!["torch>=2.4".parse().unwrap()];
    let mut turned = descriptor("test.turned", "norm.rms", 60);
    turned.dtypes = DTypeSet::of(&[DType::F64]);
    turned.requires_dtype = Some(DType::F64);
    let mut small = descriptor("test.small", "norm.rms", 95);
    small.dims.insert("rows".into(), DimRule { max: Some(1), ..DimRule::default() });
    for kernel in [out, turned, small, descriptor("test.good", "norm.rms", 80)] {
        w.engine.register(kernel, fill(1.0)).unwrap();
    }
    w.engine.update(|spec| spec.policy = PolicySpec::default().prefer_source("test")).unwrap();
    w
}

#[test]
fn an_explanation_says_what_was_chosen_who_was_considered_and_why_not() {
    let w = mixed();
    let report = w.engine.explain("rms_norm", &rms_call(&[2, 4])).unwrap();
    assert_eq!((report.op, report.chosen.as_deref()), ("norm.rms", Some("test.good")));
    let ids: Vec<&str> = report.candidates.iter().map(|c| c.kernel_id.as_str()).collect();
    assert_eq!(ids[..3], ["test.good", "test.turned", "lz_cpu.ref.norm.rms"]);
    assert_eq!(report.candidates.len(), 5);
    let ranks: Vec<Option<usize>> = report.candidates.iter().map(|c| c.rank).collect();
    assert_eq!(ranks, [Some(1), Some(2), Some(3), None, None]);
    assert_eq!(report.candidates[0].score, Some(100.0), "80 and 20 for the preferred library");
    assert_eq!(report.candidates[1].transforms, ["cast"]);
    assert_eq!(report.candidates[1].score, Some(75.0), "60, 20 for the library, less 5 for a cast");
    assert_eq!(report.rules, ["prefer test"]);

    let json: Value = serde_json::to_value(&report).unwrap();
    assert_eq!(json["schema_version"], "1.0");
    assert_eq!(json["chosen"], "test.good");
    assert_eq!(json["basis"], "declared");
    assert_eq!(json["dims"], serde_json::json!({"rows": 2, "hidden": 4}));
    let candidate =
        |id: &str| json["candidates"].as_array().unwrap().iter().find(|c| c["kernel_id"] == id).unwrap().clone();
    assert_eq!(candidate("test.good")["accepted"], true);
    assert_eq!(candidate("test.good")["terms"]["policy"], 20.0);
    let small = candidate("test.small");
    assert_eq!((&small["accepted"], &small["score"]), (&Value::Bool(false), &Value::Null));
    assert_eq!(small["reasons"][0]["code"], "CONSTRAINT_FAILED");
    assert!(small["reasons"][0]["message"].as_str().unwrap().contains("rows"), "{small}");
    assert_eq!(candidate("test.out")["reasons"][0]["code"], "VERSION_UNSUPPORTED");
    assert_eq!(candidate("test.out")["reasons"][0]["required"], "torch>=2.4");

    let text = report.to_string();
    for id in ids {
        assert!(text.contains(id), "{id} is not in\n{text}");
    }
    for words in ["norm.rms on host", "chosen   test.good", "[CONSTRAINT_FAILED]", "[VERSION_UNSUPPORTED]", "rows=2"] {
        assert!(text.contains(words), "{words} is not in\n{text}");
    }
}

#[test]
fn an_explanation_without_a_choice_says_so() {
    let w = mixed();
    w.engine.update(|spec| spec.policy = PolicySpec::default().lock("norm.rms", "nobody")).unwrap();
    let report = w.engine.explain("norm.rms", &rms_call(&[2, 4])).unwrap();
    assert_eq!(report.chosen, None);
    assert!(report.to_string().contains("no kernel can serve this call"), "{report}");
    let error = rms(&w.engine, &input()).unwrap_err();
    assert_eq!(error.code(), "NO_KERNEL_FOUND");
    let text = error.to_string();
    assert!(text.contains("test.good") && text.contains("[POLICY_LOCKED]"), "{text}");
}

#[test]
fn everything_the_engine_says_about_a_call_agrees() {
    let w = mixed();
    for shape in [[2, 4], [1, 4], [1, 2000], [3, 1500]] {
        let call = rms_call(&shape);
        let report = w.engine.explain("norm.rms", &call).unwrap();
        let which = w.engine.which("norm.rms", &call).unwrap();
        let plan = w.engine.select("norm.rms", &call).unwrap();
        assert_eq!(report.chosen.as_ref(), Some(&which.kernel_id));
        assert_eq!(Some(which.score), report.candidates[0].score);
        let ranked: Vec<&str> = report.candidates.iter().filter(|c| c.accepted).map(|c| c.kernel_id.as_str()).collect();
        assert_eq!(plan, ranked, "{shape:?}");
        let listed: Vec<String> =
            w.engine.list_kernels(Some("norm.rms")).unwrap().into_iter().map(|k| k.kernel_id).collect();
        let mut considered: Vec<&str> = report.candidates.iter().map(|c| c.kernel_id.as_str()).collect();
        considered.sort_unstable();
        assert_eq!(listed, considered);
        for candidate in &report.candidates {
            let reasons = w.engine.validate(&candidate.kernel_id, &call).unwrap();
            let reported: Vec<Reason> = candidate.reasons.iter().map(|r| r.reason.clone()).collect();
            assert_eq!(reasons, reported, "{}", candidate.kernel_id);
            assert_eq!(reasons.is_empty(), plan.contains(&candidate.kernel_id));
        }
        for info in w.engine.list_kernels(Some("norm.rms")).unwrap() {
            if !info.unavailable.is_empty() {
                assert!(!plan.contains(&info.kernel_id), "{}", info.kernel_id);
            }
        }
        let x = tensor(DType::F32, &shape, 3);
        assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, which.kernel_id);
    }
    assert_eq!(w.engine.which("norm.rms", &rms_call(&[1, 4])).unwrap().kernel_id, "test.small");
    let error = w.engine.validate("test.god", &rms_call(&[1, 4])).unwrap_err();
    assert!(error.to_string().contains("did you mean 'test.good'?"), "{error}");
    let error = w.engine.list_kernels(Some("norm.rsm")).unwrap_err();
    assert_eq!(error.code(), "UNKNOWN_OPERATION");
}

#[test]
fn two_versions_of_a_kernel_can_be_told_apart_in_a_plan() {
    let w = Watched::new();
    w.engine.register(version("1.0"), fill(1.0)).unwrap();
    w.engine.register(version("2.0"), fill(2.0)).unwrap();
    let plan = w.engine.select("norm.rms", &rms_call(&[2, 4])).unwrap();
    assert_eq!(plan.len(), 3);
    assert_ne!(plan[0], plan[1], "which version comes first?");
}

#[test]
fn a_change_is_seen_by_the_next_call_although_decisions_are_cached() {
    let w = Watched::new();
    let x = input();
    assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, "lz_cpu.ref.norm.rms");
    w.engine.register(descriptor("test.rms", "norm.rms", 80), fill(1.0)).unwrap();
    assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, "test.rms");
    w.engine.update(|spec| spec.policy = PolicySpec::default().deny("test.*")).unwrap();
    assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, "lz_cpu.ref.norm.rms");
    w.engine.update(|spec| spec.policy = PolicySpec::default()).unwrap();
    w.settings(|s| s.enabled = false);
    assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, "lz_cpu.ref.norm.rms", "only references run");
    w.settings(|s| s.enabled = true);
    w.engine.unregister("test.rms", "1.0").unwrap();
    assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, "lz_cpu.ref.norm.rms");
}

// --- the cases of testdata/ ----------------------------------------------------------------

fn number(value: &Value) -> f64 {
    match value.as_str() {
        Some(text) => text.parse().unwrap(),
        None => value.as_f64().unwrap(),
    }
}

fn all_numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(number).collect()
}

fn extents(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect()
}

/// The memory of an argument, and how it is looked at.
struct Memory {
    name: String,
    dtype: DType,
    bytes: Vec<u8>,
    shape: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
}

impl Memory {
    fn read(name: &str, value: &Value) -> Memory {
        let (dtype, shape) = (value["dtype"].as_str().unwrap().parse().unwrap(), extents(&value["shape"]));
        let data = all_numbers(&value["data"]);
        let bytes = Tensor::from_f64(dtype, &[data.len() as i64], &data).bytes().to_vec();
        let strides = value.get("strides").map_or_else(|| row_major(&shape).to_vec(), extents);
        let offset = value.get("offset").map_or(0, |o| o.as_i64().unwrap());
        Memory { name: name.into(), dtype, bytes, shape, strides, offset }
    }

    fn view(&self) -> TensorView<'_> {
        TensorView::strided(self.dtype, &self.shape, &self.strides, self.offset, &self.bytes).unwrap()
    }

    fn view_mut(&mut self) -> TensorViewMut<'_> {
        TensorViewMut::strided(self.dtype, &self.shape, &self.strides, self.offset, &mut self.bytes).unwrap()
    }
}

fn compare(op: &Op, got: &TensorView<'_>, expected: &Value) -> Result<(), String> {
    let dtype: DType = expected["dtype"].as_str().unwrap().parse().unwrap();
    if got.dtype() != dtype || got.shape() != extents(&expected["shape"]) {
        return Err(format!("is {} {:?}", got.dtype(), got.shape()));
    }
    let exact = expected["exact"].as_bool().unwrap_or(false);
    let tolerance = op.schema().tolerances.of(dtype);
    for (i, (got, want)) in got.to_f64().into_iter().zip(all_numbers(&expected["data"])).enumerate() {
        let equal = got == want || got.is_nan() && want.is_nan();
        let close = (got - want).abs() <= tolerance.atol + tolerance.rtol * want.abs();
        if !(equal || !exact && close) {
            return Err(format!("element {i} is {got}, expected {want}"));
        }
    }
    Ok(())
}

fn run_case(engine: &Engine, op: &Op, case: &Value) -> Result<(), String> {
    let updated =
        |name: &str| op.schema().outputs.iter().any(|o| matches!(o, schema::Output::Updates(n) if *n == name));
    let all = case["inputs"].as_object().unwrap().iter().map(|(name, value)| Memory::read(name, value));
    let (mut caches, inputs): (Vec<Memory>, Vec<Memory>) = all.partition(|m| updated(&m.name));
    let mut arguments = Arguments::new();
    for memory in &inputs {
        arguments = arguments.input(&memory.name, memory.view());
    }
    for memory in &mut caches {
        let name = match op.input_index(&memory.name) {
            Some(index) => op.schema().inputs[index].name,
            None => return Err(format!("no input {}", memory.name)),
        };
        arguments = arguments.update(name, memory.view_mut());
    }
    for (name, value) in case["params"].as_object().unwrap() {
        let value = match value {
            Value::Bool(b) => ParamValue::Bool(*b),
            Value::String(s) if op.param_index(name).is_some_and(|i| op.schema().params[i].ty != ParamType::Float) => {
                ParamValue::str(s)
            }
            Value::Number(n) if n.is_i64() => ParamValue::Int(n.as_i64().unwrap()),
            other => ParamValue::Float(number(other)),
        };
        arguments = arguments.param(name, value);
    }
    if let Some(layout) = case["layout"].as_str() {
        arguments = arguments.layout(layout.parse().unwrap());
    }
    let result = engine.dispatch(case["call"].as_str().unwrap(), arguments);
    if case.get("error").is_some() {
        return match result {
            Err(Error::Execution { chain, .. }) if chain.iter().all(|f| f.error.is_callers_fault()) => Ok(()),
            other => Err(format!("expected bad data to be refused, got {other:?}")),
        };
    }
    let done = result.map_err(|e| e.to_string())?;
    if done.op != op.id() {
        return Err(format!("was taken for {}", done.op));
    }
    let expected = case["expect"].as_object().unwrap();
    let mut compared = 0;
    for (name, tensor) in &done.outputs {
        compare(op, &tensor.view(), &expected[*name]).map_err(|e| format!("{name} {e}"))?;
        compared += 1;
    }
    for cache in &caches {
        compare(op, &cache.view(), &expected[&cache.name]).map_err(|e| format!("{} {e}", cache.name))?;
        compared += 1;
    }
    if compared == expected.len() { Ok(()) } else { Err(format!("{compared} results, expected {}", expected.len())) }
}

#[test]
fn every_case_of_every_operation_is_dispatched_right() {
    let w = Watched::new();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/ops");
    let (mut count, mut wrong) = (0, Vec::new());
    for op in Catalog::get().ops().iter().filter(|op| op.schema().kind != schema::OpKind::Tokenization) {
        let path = folder.join(format!("{}.json", op.id()));
        let text = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file: Value = serde_json::from_slice(&text).unwrap();
        for case in file["cases"].as_array().unwrap() {
            count += 1;
            if let Err(error) = run_case(&w.engine, op, case) {
                wrong.push(format!("{} / {}: {error}", op.id(), case["name"]));
            }
        }
    }
    assert!(count > 1000, "only {count} cases were found");
    assert!(wrong.is_empty(), "{} of {count} cases are wrong:\n{}", wrong.len(), wrong.join("\n"));
}
