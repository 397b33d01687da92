//! `layerzero bench select`: how long a plan takes for a call that was seen before.

use std::hint::black_box;
use std::time::Instant;

use layerzero::Engine;
use lz_model::{DType, NamedCall, TensorMeta};
use serde_json::{Value, json};

use super::BenchOptions;
use crate::error::CliError;
use crate::printer::Printer;

/// Times `Engine::plan` on a cached query, in batches, and gives quantiles over the batches.
pub fn run(options: &BenchOptions) -> Result<Value, CliError> {
    let engine = Engine::builder().devices(vec![lz_hardware::detect_cpu()]).build();
    let (query, kv) = ([2, 1024, 32, 128], [2, 1024, 8, 128]);
    let call = NamedCall::new()
        .input("query", TensorMeta::new(DType::Bf16, &query))
        .input("key", TensorMeta::new(DType::Bf16, &kv))
        .input("value", TensorMeta::new(DType::Bf16, &kv));
    let (_, bound) = engine.bind("attention", &call)?;
    engine.plan(&bound.query);
    let mut times: Vec<f64> = (0..options.batches)
        .map(|_| {
            let started = Instant::now();
            for _ in 0..options.batch_size {
                black_box(engine.plan(black_box(&bound.query)));
            }
            started.elapsed().as_nanos() as f64 / options.batch_size as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let quantile = |q: f64| times[((times.len() - 1) as f64 * q) as usize];
    Ok(json!({
        "bench": "select",
        "what": "plan for a cached attention query",
        "batches": options.batches,
        "batch_size": options.batch_size,
        "p50_ns": quantile(0.5),
        "p99_ns": quantile(0.99),
        "min_ns": times[0],
    }))
}

/// Prints a result for people.
pub fn print(result: &Value, printer: &mut Printer<'_>) -> Result<(), CliError> {
    let text = |key: &str| result[key].as_str().unwrap_or_default().to_owned();
    let number = |key: &str| result[key].as_f64().unwrap_or(f64::NAN);
    printer.line(format!("{}: {}", text("bench"), text("what")))?;
    printer.line(format!("  p50  {:.1} ns", number("p50_ns")))?;
    printer.line(format!("  p99  {:.1} ns", number("p99_ns")))?;
    printer.line(format!("  {} batches of {}", number("batches"), number("batch_size")))?;
    Ok(())
}
