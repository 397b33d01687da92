//! The engine of this process.

use std::sync::{Arc, OnceLock};

use layerzero::model::DeviceIx;
use layerzero::{AllocatorMemory, Engine, Warning};
use pyo3::prelude::*;

use crate::process;

static ENGINE: OnceLock<Arc<Engine>> = OnceLock::new();

/// The engine. It begins with the CPU alone: looking for GPUs initialises their driver, which a process that forks
/// workers must not do. The first CUDA tensor, or `doctor`, looks.
#[inline]
pub fn engine() -> &'static Arc<Engine> {
    ENGINE.get_or_init(|| {
        let engine = Arc::new(
            Engine::builder()
                .cpu_only()
                .compiled_elsewhere()
                .kernels_follow()
                .simd_kernels()
                .on_warning(warn)
                .on_event(crate::events::emitted)
                .build(),
        );
        engine.set_memory_source(Box::new(held));
        engine.attend();
        engine
    })
}

/// The engine, if it was made.
pub fn existing() -> Option<&'static Arc<Engine>> {
    ENGINE.get()
}

/// The program ends: the engine's threads stop, and no call goes straight any more.
pub fn end() {
    if let Some(engine) = ENGINE.get() {
        engine.end();
    }
}

/// This process is a child that was forked.
pub fn forked() {
    if let Some(engine) = ENGINE.get() {
        engine.forked();
    }
}

/// What torch's allocator holds of a device's memory; `None` where it holds nothing, or cannot say.
fn held(device: DeviceIx) -> Option<AllocatorMemory> {
    if process::is_over_for_this_thread() {
        return None;
    }
    Python::attach(|py| {
        let told = py.import("layerzero.memory").and_then(|module| module.call_method1("held", (device.0,)));
        match told.and_then(|told| told.extract::<Option<(i64, i64, i64)>>()) {
            Ok(told) => told.map(|(driver_free, unused, largest_unused)| AllocatorMemory {
                driver_free,
                unused,
                largest_unused,
            }),
            Err(error) => {
                error.write_unraisable(py, None);
                None
            }
        }
    })
}

/// Hands a warning to Python's `warnings`.
fn warn(warning: &Warning) {
    if process::is_over_for_this_thread() {
        return;
    }
    let text = warning.to_string();
    Python::attach(|py| {
        let given = py.import("layerzero.errors").and_then(|errors| errors.call_method1("warn", (text,)));
        if let Err(error) = given {
            // Under `-W error` a warning is an exception, and there is no call here it could end.
            error.write_unraisable(py, None);
        }
    });
}
