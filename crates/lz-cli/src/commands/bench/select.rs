//! `layerzero bench select`: what selection costs, cached and cold, and how lookups scale with threads.

use std::hint::black_box;
use std::process::Command;
use std::sync::{Arc, Barrier};
use std::time::Instant;

use layerzero::Engine;
use lz_model::{
    BackendDescriptor, DType, DTypeSet, DimRule, InputRule, KernelDescriptor, Layout, NamedCall, Platform, Query,
    TensorMeta,
};
use lz_select::{ENTRY_OVERHEAD, Snapshot};
use serde_json::{Value, json};

use super::BenchOptions;
use super::instructions::counted;
use crate::error::CliError;
use crate::printer::Printer;

/// Candidates of the cold selection.
const CANDIDATES: usize = 50;

/// Measures.
pub fn run(options: &BenchOptions) -> Result<Value, CliError> {
    let engine = engine()?;
    let query = query(&engine, 1024)?;
    if let Some(repetitions) = options.probe {
        hit_many_times(&engine, &query, repetitions);
        return Ok(json!({ "bench": "select", "probe": repetitions }));
    }
    let many: Vec<Query> = (1..=256).map(|n| self::query(&engine, 8 * n)).collect::<Result<_, _>>()?;
    let front = quantiles(options, |_| engine.chain(black_box(&query)).map(|p| p.chosen().0));
    // More shapes than a thread's front has slots: the shared table answers.
    let shared = quantiles(options, |i| engine.chain(black_box(&many[i % many.len()])).map(|p| p.chosen().0));
    let cold = engine.with_snapshot(|snapshot| cold(options, snapshot, &query));
    let accepted = engine.with_snapshot(|snapshot| snapshot.select(&query).ranking.len());
    Ok(json!({
        "bench": "select",
        "what": "selection of a kernel for an attention call, 50 candidates",
        "batches": options.batches,
        "batch_size": options.batch_size,
        "p50_ns": front.p50,
        "p99_ns": front.p99,
        "p999_ns": front.p999,
        "timer_ns": front.timer,
        "shared": { "p50_ns": shared.p50, "p99_ns": shared.p99, "p999_ns": shared.p999 },
        "cold": { "candidates": CANDIDATES + 1, "accepted": accepted, "p50_ns": cold.p50, "p99_ns": cold.p99 },
        "entry_bytes_beyond_key": ENTRY_OVERHEAD,
        "key_bytes": size_of::<Query>(),
        "two_threads_over_one": scaling(options, &engine, &query),
        "two_threads_over_one_ceiling": ceiling(options),
        "instructions_per_hit": instructions_per_hit().map_or_else(|why| json!({ "unknown": why }), |n| json!(n)),
        "targets": {
            "p50_ns": 100, "p99_ns": 500, "shared_p50_ns": 100, "cold_p50_ns": 10_000, "cold_p99_ns": 50_000,
            "entry_bytes_beyond_key": 100, "two_threads_over_one": 1.8,
        },
    }))
}

/// An engine for a described H100 with fifty attention kernels, some of which are out.
pub(super) fn engine() -> Result<Engine, CliError> {
    let device = lz_hardware::described("h100").unwrap_or_else(|| lz_model::DeviceSpec::new(Platform::Cuda, "H100"));
    let engine = Engine::builder().devices(vec![device]).build();
    engine.update(|spec| {
        spec.backend(BackendDescriptor::native("bench", "1.0", vec![Platform::Cuda]));
        spec.kernels.extend((0..CANDIDATES).map(|i| Arc::new(kernel(i))));
    })?;
    Ok(engine)
}

fn kernel(i: usize) -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new(format!("bench.attention.{i:02}"), "attention.causal", "bench");
    kernel.platforms = vec![Platform::Cuda];
    kernel.min_sm = Some(if i.is_multiple_of(5) { 100 } else { 80 });
    kernel.dtypes = DTypeSet::of(&[DType::F16, DType::Bf16]);
    kernel.layouts = if i.is_multiple_of(2) { vec![Layout::Bshd] } else { vec![Layout::Bhsd] };
    kernel.requires_last_dim_stride1 = true;
    kernel.shares_kv_heads = !i.is_multiple_of(7);
    kernel.graph_safe = true;
    kernel
        .dims
        .insert("head_dim".into(), DimRule { min: Some(32), max: Some(256), multiple_of: Some(8), one_of: None });
    kernel.dims.insert(
        "seq_k".into(),
        DimRule { max: Some(if i.is_multiple_of(11) { 512 } else { 65_536 }), ..DimRule::default() },
    );
    kernel.inputs.insert("attn_mask".into(), InputRule::default());
    kernel.conditions = if i.is_multiple_of(6) { vec!["seq_q * batch <= 1048576".into()] } else { Vec::new() };
    kernel.workspace = i.is_multiple_of(3).then(|| "batch * heads * seq_q * 4".into());
    kernel.priority = 10 + i as i32;
    kernel
}

pub(super) fn query(engine: &Engine, seq: i64) -> Result<Query, CliError> {
    let (q, kv) = ([2, seq, 32, 128], [2, seq, 8, 128]);
    let call = NamedCall::new()
        .input("query", TensorMeta::new(DType::Bf16, &q))
        .input("key", TensorMeta::new(DType::Bf16, &kv))
        .input("value", TensorMeta::new(DType::Bf16, &kv))
        .layout(Layout::Bshd);
    Ok(engine.bind("attention", &call)?.1.query)
}

/// Times in nanoseconds.
struct Quantiles {
    p50: f64,
    p99: f64,
    p999: f64,
    timer: f64,
}

fn quantile(sorted: &[f64], q: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * q).round() as usize]
}

/// Half of all calls are faster than p50, measured over batches, since the clock costs more than a
/// call does; p99 and p99.9 are over calls timed one by one, the clock's own median taken off.
fn quantiles<T>(options: &BenchOptions, work: impl Fn(usize) -> T) -> Quantiles {
    (0..options.batch_size).for_each(|i| drop(black_box(work(i))));
    let mut batches: Vec<f64> = (0..options.batches)
        .map(|_| {
            let started = Instant::now();
            (0..options.batch_size).for_each(|i| drop(black_box(work(i))));
            started.elapsed().as_nanos() as f64 / options.batch_size as f64
        })
        .collect();
    batches.sort_by(f64::total_cmp);
    let timer = median(one_by_one(options.batch_size * 10, |_| ()));
    let mut single = one_by_one(options.batch_size * 20, &work);
    single.sort_by(f64::total_cmp);
    let alone = |q: f64| (quantile(&single, q) - timer).max(0.0);
    Quantiles { p50: quantile(&batches, 0.5), p99: alone(0.99), p999: alone(0.999), timer }
}

fn one_by_one<T>(count: usize, work: impl Fn(usize) -> T) -> Vec<f64> {
    let time = |i| {
        let started = Instant::now();
        drop(black_box(work(i)));
        started.elapsed().as_nanos() as f64
    };
    (0..count).map(time).collect()
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    quantile(&values, 0.5)
}

/// A whole selection and its chain, nothing cached.
fn cold(options: &BenchOptions, snapshot: &Snapshot, query: &Query) -> Quantiles {
    let work = |_| snapshot.chain(&snapshot.select(black_box(query)));
    for i in 0..options.batches {
        black_box(work(i));
    }
    let mut single = one_by_one(options.batches * 20, work);
    single.sort_by(f64::total_cmp);
    Quantiles { p50: quantile(&single, 0.5), p99: quantile(&single, 0.99), p999: quantile(&single, 0.999), timer: 0.0 }
}

/// Lookups per second of two threads over those of one, the median of interleaved rounds.
fn scaling(options: &BenchOptions, engine: &Engine, query: &Query) -> f64 {
    two_over_one(options, || hit_many_times(engine, query, 1))
}

/// The same for work that shares nothing: what this machine can give at all.
fn ceiling(options: &BenchOptions) -> f64 {
    two_over_one(options, || {
        black_box((0..16u64).fold(1u64, |x, i| black_box(x.wrapping_mul(i | 1))));
    })
}

fn two_over_one(options: &BenchOptions, work: impl Fn() + Sync) -> f64 {
    let count = options.batch_size * 500;
    let rate = |threads: usize| {
        let start = Barrier::new(threads + 1);
        std::thread::scope(|scope| {
            let running: Vec<_> = (0..threads)
                .map(|_| {
                    scope.spawn(|| {
                        (0..100).for_each(|_| work());
                        start.wait();
                        let started = Instant::now();
                        (0..count).for_each(|_| work());
                        started.elapsed()
                    })
                })
                .collect();
            start.wait();
            let slowest = running.into_iter().filter_map(|t| t.join().ok()).max().unwrap_or_default();
            (threads * count) as f64 / slowest.as_secs_f64()
        })
    };
    median(
        (0..9)
            .map(|_| {
                let one = rate(1);
                rate(2) / one
            })
            .collect(),
    )
}

fn hit_many_times(engine: &Engine, query: &Query, repetitions: usize) {
    for _ in 0..repetitions {
        black_box(engine.chain(black_box(query)));
    }
}

/// Instructions of one hit, counted by callgrind: the difference of two runs, divided by the
/// difference in repetitions. The same on every machine for one binary, however noisy.
fn instructions_per_hit() -> Result<f64, String> {
    let few = instructions(1_000)?;
    let many = instructions(11_000)?;
    Ok((many - few) / 10_000.0)
}

fn instructions(repetitions: usize) -> Result<f64, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut probe = Command::new(program);
    probe.args(["bench", "select", "--probe", &repetitions.to_string()]);
    counted(&probe)
}

/// Prints a result for people.
pub fn print(result: &Value, printer: &mut Printer<'_>) -> Result<(), CliError> {
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let row = |name: &str, value: String, target: &str| [name.to_owned(), value, target.to_owned()];
    let ns = |value: &Value| format!("{:.0} ns", number(value));
    let us = |value: &Value| format!("{:.2} µs", number(value) / 1e3);
    let instructions = match result["instructions_per_hit"].as_f64() {
        Some(n) => format!("{n:.0}"),
        None => result["instructions_per_hit"]["unknown"].as_str().unwrap_or("unknown").to_owned(),
    };
    printer.line(result["what"].as_str().unwrap_or_default())?;
    let rows = [
        row("same call again, p50", ns(&result["p50_ns"]), "100 ns"),
        row("same call again, p99", ns(&result["p99_ns"]), "500 ns"),
        row("same call again, p99.9", ns(&result["p999_ns"]), ""),
        row("one of 256 shapes, p50", ns(&result["shared"]["p50_ns"]), "100 ns"),
        row("one of 256 shapes, p99", ns(&result["shared"]["p99_ns"]), ""),
        row("one of 256 shapes, p99.9", ns(&result["shared"]["p999_ns"]), ""),
        row("never seen before, p50", us(&result["cold"]["p50_ns"]), "10 µs"),
        row("never seen before, p99", us(&result["cold"]["p99_ns"]), "50 µs"),
        row("bytes per entry beyond its key", format!("{}", result["entry_bytes_beyond_key"]), "100"),
        row("two threads over one", format!("{:.2}×", number(&result["two_threads_over_one"])), "1.8×"),
        row(
            "two threads over one, sharing nothing",
            format!("{:.2}×", number(&result["two_threads_over_one_ceiling"])),
            "",
        ),
        row("instructions per hit", instructions, ""),
    ];
    printer.table(["measure", "here", "target"], rows)
}
