//! Dispatch: kernels behind one call, what happens when they fail, and what the engine says about it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use layerzero::model::*;
use layerzero::selection::*;
use layerzero::{Arguments, DynamicKernel, Engine, Error, Failure, Warning};
use serde_json::Value;

mod answers;
mod call_path;
mod cases;
mod documents;
mod failing;
mod in_place;
mod layouts;
mod many_kernels;
mod registering;
mod transforms;

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

fn version(number: &str) -> KernelDescriptor {
    KernelDescriptor { version: number.into(), ..descriptor("test.rms", "norm.rms", 80) }
}

/// What can be seen of an engine.
fn seen(engine: &Engine) -> (Vec<layerzero::KernelInfo>, Vec<String>, u64) {
    let backends = engine.backends().iter().map(|b| format!("{b:?}")).collect();
    (engine.list_kernels(None).unwrap(), backends, engine.with_snapshot(Snapshot::epoch))
}

fn views(tensors: &[Tensor; 3]) -> [TensorView<'_>; 3] {
    tensors.each_ref().map(Tensor::view)
}

/// Query, key and value of one layout: 2 sequences, 5 queries, 7 keys, 4 heads over 2.
fn attention_inputs(dtype: DType, layout: Layout) -> [Tensor; 3] {
    let shape = |seq, heads, dim| match layout {
        Layout::Bhsd => [2, heads, seq, dim],
        _ => [2, seq, heads, dim],
    };
    [tensor(dtype, &shape(5, 4, 8), 1), tensor(dtype, &shape(7, 2, 8), 2), tensor(dtype, &shape(7, 2, 6), 3)]
}
