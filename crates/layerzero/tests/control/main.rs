//! The operator's side of an engine: configuration, contexts, rollouts, breakers, levels, readiness.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use layerzero::config::{CodeLayer, Sources, Value};
use layerzero::model::*;
use layerzero::resilience::{Event, Level};
use layerzero::selection::*;
use layerzero::{
    AllocatorMemory, Arguments, Dispatched, DynamicKernel, Engine, EngineBuilder, Error, Overlay, OverlayId, Scope,
    Warning,
};
use tempfile::TempDir;

mod breakers;
mod configuration;
mod errands;
mod failures;
mod levels;
mod memory;
mod names;
mod overlays;
mod readiness;
mod rollouts;
mod sentences;
mod status;
mod walk;
mod watching;

/// An engine with a clock moved by hand, what it told, and a folder for its files.
struct World {
    engine: Arc<Engine>,
    clock: Arc<AtomicU64>,
    events: Arc<Mutex<Vec<Event>>>,
    warnings: Arc<Mutex<Vec<Warning>>>,
    folder: TempDir,
}

impl World {
    fn new() -> World {
        World::made(|builder, _| builder)
    }

    fn made(make: impl FnOnce(EngineBuilder, &Path) -> EngineBuilder) -> World {
        let folder = tempfile::tempdir().unwrap();
        let clock = Arc::new(AtomicU64::new(1_000_000));
        let (events, warnings) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
        let (told, warned) = (events.clone(), warnings.clone());
        let builder = Engine::builder()
            .devices(vec![DeviceSpec::new(Platform::Cpu, "host")])
            .cache(CacheConfig { clock: Clock::Manual(clock.clone()), ..CacheConfig::default() })
            .on_event(move |stamped| told.lock().unwrap().push(stamped.event.clone()))
            .on_warning(move |warning| warned.lock().unwrap().push(warning.clone()));
        World { engine: Arc::new(make(builder, folder.path()).build()), clock, events, warnings, folder }
    }

    /// With kernels for `norm.rms` that fill their output with 1, 2, 3, …, the first preferred.
    fn with_kernels(ids: &[&str]) -> World {
        let world = World::new();
        world.register(ids);
        world
    }

    fn register(&self, ids: &[&str]) {
        for (i, id) in ids.iter().enumerate() {
            self.engine.register(descriptor(id, 90 - i as i32), fill(1.0 + i as f64)).unwrap();
        }
    }

    fn advance(&self, milliseconds: u64) {
        self.clock.fetch_add(milliseconds, Ordering::AcqRel);
    }

    /// Writes a file the way careful tools do: whole, by renaming.
    fn write(&self, name: &str, text: &str) -> PathBuf {
        let (path, unfinished) = (self.folder.path().join(name), self.folder.path().join("unfinished"));
        fs::write(&unfinished, text).unwrap();
        fs::rename(&unfinished, &path).unwrap();
        path
    }

    fn load(&self, text: &str) {
        self.engine.load_config(&self.write("layerzero.yaml", text)).unwrap();
    }

    fn set(&self, key: &str, value: impl Into<Value>) {
        self.engine.configure([(key.to_owned(), value.into())]).unwrap();
    }

    fn events(&self) -> Vec<Event> {
        self.events.lock().unwrap().clone()
    }

    fn names(&self) -> Vec<&'static str> {
        self.events().iter().map(Event::name).collect()
    }

    fn serves(&self) -> String {
        serves(&self.engine.process())
    }

    /// The kernel that serves inside of an overlay.
    fn serves_in(&self, overlay: &Overlay) -> String {
        serves(&self.engine.scope(overlay.id()))
    }
}

/// A kernel made of code for `norm.rms`.
fn descriptor(id: &str, priority: i32) -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new(id, "norm.rms", id.split('.').next().unwrap());
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

/// A kernel that fails when told to, and counts its runs.
#[derive(Clone, Default)]
struct Flaky {
    error: Arc<Mutex<Option<String>>>,
    runs: Arc<AtomicUsize>,
}

impl Flaky {
    fn failing(error: &str) -> Flaky {
        let flaky = Flaky::default();
        flaky.fails_with(Some(error));
        flaky
    }

    fn fails_with(&self, error: Option<&str>) {
        *self.error.lock().unwrap() = error.map(str::to_owned);
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::Acquire)
    }

    fn kernel(&self) -> Arc<dyn DynamicKernel> {
        let (flaky, fine) = (self.clone(), fill(7.0));
        code(move |args| {
            flaky.runs.fetch_add(1, Ordering::AcqRel);
            let error = flaky.error.lock().unwrap().clone();
            error.map_or_else(|| fine.run(args), |error| Err(KernelError::Failed(error)))
        })
    }
}

fn rms(engine: &Engine) -> Result<Dispatched, Error> {
    rms_of(engine, 2)
}

fn rms_of(engine: &Engine, rows: i64) -> Result<Dispatched, Error> {
    rms_rows(&engine.process(), rows)
}

fn rms_in(scope: &Scope<'_>) -> Result<Dispatched, Error> {
    rms_rows(scope, 2)
}

fn rms_rows(engine: &Scope<'_>, rows: i64) -> Result<Dispatched, Error> {
    let x = Tensor::from_f64(DType::F32, &[rows, 4], &vec![1.0; 4 * rows as usize]);
    engine.dispatch("rms_norm", Arguments::new().input("x", x.view()))
}

fn call<'a>(shape: &'a [i64]) -> NamedCall<'a> {
    NamedCall::new().input("input", TensorMeta::new(DType::F32, shape))
}

/// The kernel that serves; asked, planned and run agree.
fn serves(engine: &Scope<'_>) -> String {
    let ran = rms_in(engine).unwrap().kernel_id;
    assert_eq!(engine.which("rms_norm", &call(&[2, 4])).unwrap().kernel_id, ran);
    assert_eq!(engine.select("rms_norm", &call(&[2, 4])).unwrap()[0], ran);
    ran
}

/// Why a kernel is out, in explain's words; empty when it is not.
fn reasons(engine: &Engine, shape: &[i64], kernel: &str) -> String {
    let report = engine.explain("rms_norm", &call(shape)).unwrap();
    let candidate = report.candidates.iter().find(|c| c.kernel_id == kernel).unwrap();
    candidate.reasons.iter().map(|r| r.message.clone()).collect::<Vec<_>>().join("; ")
}
