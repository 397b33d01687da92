//! Decisions that were made before: lockfiles and dispatch tables, their texts, and what they do.

use std::collections::BTreeMap;
use std::sync::Arc;

use layerzero::model::*;
use layerzero::selection::*;
use layerzero::{DynamicKernel, Engine, Lockfile, MismatchKind, Scope};

mod baked;
mod configured;
mod explained;
mod lock;
mod mismatches;
mod replayed;
mod solve;
mod table_text;
mod tables;
mod text;
#[path = "../../../lz-select/tests/world/mod.rs"]
#[allow(dead_code)] // the soundness tests use the rest of it
mod world;

/// `LZ_TEST_SCALE=full` runs a hundred times as many cases.
fn cases(few: u32) -> u32 {
    match std::env::var("LZ_TEST_SCALE").as_deref() {
        Ok("full" | "soak") => few * 100,
        _ => few,
    }
}

fn host() -> DeviceSpec {
    DeviceSpec::new(Platform::Cpu, "host")
}

fn h100() -> DeviceSpec {
    let mut device = DeviceSpec::new(Platform::Cuda, "H100");
    device.sm = Some(90);
    device.versions.insert("cuda".into(), "13.0".into());
    device.completed(&GenerationTable::builtin())
}

fn engine_on(devices: Vec<DeviceSpec>) -> Engine {
    Engine::builder().devices(devices).on_warning(|_| ()).build()
}

/// An engine with kernels for `norm.rms`, the first preferred.
fn engine_with(ids: &[&str]) -> Engine {
    let engine = engine_on(vec![host()]);
    for (i, id) in ids.iter().enumerate() {
        register(&engine, id, "1.0", 90 - i as i32);
    }
    engine
}

fn descriptor(id: &str, version: &str, priority: i32) -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new(id, "norm.rms", id.split('.').next().unwrap());
    kernel.version = version.into();
    kernel.platforms = vec![Platform::Cpu];
    kernel.dtypes = DTypeSet::FLOATS;
    kernel.layouts = vec![Layout::Strided];
    kernel.priority = priority;
    kernel
}

fn nothing() -> Arc<dyn DynamicKernel> {
    Arc::new(|_: &mut KernelArgs<'_, '_>| Ok(()))
}

fn register(engine: &Engine, id: &str, version: &str, priority: i32) {
    engine.register(descriptor(id, version, priority), nothing()).unwrap();
}

fn rms(rows: i64) -> CallSpec {
    CallSpec::new("rms_norm").tensor("input", DType::F32, &[rows, 64])
}

fn on_first(calls: impl IntoIterator<Item = CallSpec>) -> Vec<(CallSpec, DeviceIx)> {
    calls.into_iter().map(|call| (call, DeviceIx(0))).collect()
}

/// Dense attention in half precision.
fn attention(batch: i64, seq_q: i64, seq_k: i64) -> CallSpec {
    CallSpec::new("attention")
        .tensor("query", DType::F16, &[batch, seq_q, 8, 64])
        .tensor("key", DType::F16, &[batch, seq_k, 8, 64])
        .tensor("value", DType::F16, &[batch, seq_k, 8, 64])
        .layout(Layout::Bshd)
}

/// The kernel that serves a call; asked, planned and cached agree.
fn serves(engine: &Engine, call: &CallSpec) -> String {
    serves_in(&engine.process(), call)
}

fn serves_in(engine: &Scope<'_>, call: &CallSpec) -> String {
    let named = call.named(DeviceIx(0), Context::default());
    let which = engine.which(&call.op, &named).unwrap().kernel_id;
    for _ in 0..2 {
        let planned = engine.select(&call.op, &named).unwrap().remove(0);
        assert_eq!(planned.split('@').next().unwrap(), which);
    }
    which
}

fn query(engine: &Engine, call: &CallSpec, capturing: bool) -> Query {
    let context = Context { capturing, ..Context::default() };
    engine.bind(&call.op, &call.named(DeviceIx(0), context)).unwrap().1.query
}

/// Times by kernel and, within it, by the rows of a norm: what is not listed is not known.
struct Times(BTreeMap<(&'static str, i64), f64>);

impl PerfSource for Times {
    fn estimate(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Estimate> {
        let key = self.0.keys().find(|(id, rows)| *id == kernel.id && *rows == facts.query.dim(0))?;
        let median_us = self.0[key];
        Some(Estimate {
            median_us,
            spread_us: 0.0,
            apart_us: None,
            sides: None,
            samples: 9,
            kind: EstimateKind::Measured,
            trusted: true,
        })
    }

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        self.0.keys().flat_map(|(_, rows)| [(0, *rows), (0, rows + 1)]).collect()
    }
}

fn timed(engine: &Engine, times: &[(&'static str, i64, f64)]) {
    let times = Times(times.iter().map(|&(id, rows, us)| ((id, rows), us)).collect());
    engine.update(|spec| spec.perf = Arc::new(times)).unwrap();
}
