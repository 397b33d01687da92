//! `layerzero bench resilience`: what policy, breakers, counters and rollouts add to a call that was decided before.

use std::hint::black_box;
use std::time::Instant;

use layerzero::Engine;
use layerzero::resilience::{Admission, bench};
use lz_config::Value as Setting;
use lz_model::Query;
use serde_json::{Value, json};

use super::BenchOptions;
use super::select::{engine, median, query};
use crate::error::CliError;
use crate::printer::Printer;

/// Rules of the policy.
const RULES: usize = 20;
/// Rounds in which each side is measured once.
const ROUNDS: usize = 41;

/// Measures.
pub fn run(options: &BenchOptions) -> Result<Value, CliError> {
    let (plain, steered) = (engine()?, engine()?);
    steer(&steered)?;
    let query = query(&plain, 1024)?;
    use_counters(&steered, &query)?;
    let count = options.batches * options.batch_size;
    let hit = |engine: &Engine| {
        let started = Instant::now();
        for _ in 0..count {
            black_box(engine.chain(black_box(&query)));
        }
        started.elapsed().as_nanos() as f64 / count as f64
    };
    let steps = steered.steps(&query)?;
    let guarded = || {
        let started = Instant::now();
        for _ in 0..count {
            black_box(steered.chain(black_box(&query)));
            if let Admission::Closed = black_box(&steps[0].breaker).admit(|| 0) {
                black_box(steps[0].health.record_call());
                steps[0].breaker.record_success();
            }
        }
        started.elapsed().as_nanos() as f64 / count as f64
    };
    let mut rounds: Vec<[f64; 3]> = Vec::new();
    for round in 0..=ROUNDS {
        // By turns, so that neither side always comes after the other.
        let (one, other) = if round % 2 == 0 { (&plain, &steered) } else { (&steered, &plain) };
        let (first, second) = (hit(one), hit(other));
        let (without, with) = if round % 2 == 0 { (first, second) } else { (second, first) };
        rounds.push([without, with, guarded()]);
    }
    // The first warms up.
    rounds.remove(0);
    let over = |f: fn(&[f64; 3]) -> f64| median(rounds.iter().map(f).collect());
    Ok(json!({
        "bench": "resilience",
        "what": "what policy, breakers, counters and rollouts add to a call that was decided before",
        "rounds": ROUNDS,
        "calls_per_round": count,
        "breaker_closed_ns": bench::closed_path(),
        "record_call_ns": bench::record_call(),
        "hit_path": {
            "rules": RULES,
            "rollouts": 1,
            "without_ns": over(|r| r[0]),
            "with_ns": over(|r| r[1]),
            "ratio": over(|r| r[1] / r[0]),
        },
        "hit_path_asked_and_counted": { "with_ns": over(|r| r[2]), "ratio": over(|r| r[2] / r[0]) },
        "targets": { "breaker_closed_ns": 10, "hit_path_ratio": 1.1 },
    }))
}

/// Gives an engine a policy of twenty rules and a canary.
fn steer(engine: &Engine) -> Result<(), CliError> {
    let map = |entries: &[(&str, Setting)]| {
        Setting::Map(entries.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect())
    };
    let rule = |i: usize| {
        let when = Setting::from(format!("seq_q >= {} and batch < {}", 64 * (i + 1), 64 + i).as_str());
        let kernel = Setting::from(format!("bench.attention.{:02}", 2 * i).as_str());
        let action = ["prefer", "avoid"][i % 2];
        map(&[("operation", Setting::from("attention")), ("when", when), (action, kernel)])
    };
    let canary = map(&[
        ("name", Setting::from("bench")),
        ("operation", Setting::from("attention")),
        ("candidate", Setting::from("bench.attention.48")),
        ("mode", Setting::from("canary")),
        ("fraction", Setting::from(0.01)),
    ]);
    engine.configure([
        ("rules".to_owned(), Setting::List((0..RULES).map(rule).collect())),
        ("rollouts".to_owned(), Setting::List(vec![canary])),
    ])?;
    Ok(())
}

/// Counts some calls of every kernel that would serve.
fn use_counters(engine: &Engine, query: &Query) -> Result<(), CliError> {
    for step in engine.steps(query)? {
        for _ in 0..100 {
            engine.succeeded(&step, Admission::Closed, false);
        }
    }
    Ok(())
}

/// Prints a result for people.
pub fn print(result: &Value, printer: &mut Printer<'_>) -> Result<(), CliError> {
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let ns = |value: &Value| format!("{:.1} ns", number(value));
    let times = |value: &Value| format!("{:.3}×", number(value));
    let row = |name: &str, value: String, target: &str| [name.to_owned(), value, target.to_owned()];
    let (hit, counted) = (&result["hit_path"], &result["hit_path_asked_and_counted"]);
    printer.line(result["what"].as_str().unwrap_or_default())?;
    let rows = [
        row("closed breaker, asked and told", ns(&result["breaker_closed_ns"]), "10 ns"),
        row("a call counted", ns(&result["record_call_ns"]), ""),
        row("decided call, nothing configured", ns(&hit["without_ns"]), ""),
        row("decided call, 20 rules and a canary", ns(&hit["with_ns"]), ""),
        row("the latter over the former", times(&hit["ratio"]), "1.1×"),
        row("the same, breaker asked and call counted", ns(&counted["with_ns"]), ""),
        row("that over nothing configured", times(&counted["ratio"]), ""),
    ];
    printer.table(["measure", "here", "target"], rows)
}
