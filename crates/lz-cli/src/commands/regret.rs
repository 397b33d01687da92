//! `layerzero regret`: how far the choices are from the best in hindsight.

use layerzero::perf::regret::Regret;

use crate::args::EngineArgs;
use crate::error::CliError;
use crate::exit::Exit;
use crate::measuring::{self, MeasureArgs};
use crate::printer::Printer;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// Measure every kernel of these calls and compare what is chosen with the best in hindsight
///
/// Give calls that were not tuned. Nothing is stored. Prints chosen time ÷ best time, and how many times faster than
/// plain torch the choice is; geometric means, the worst, and a histogram.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    measure: MeasureArgs,
}

/// Measures and prints.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let session = Session::open(&EngineArgs::default(), at)?;
    session.engine.learn();
    let wanted = args.measure.wanted(&session, at, printer)?;
    let mut bench = measuring::bench(at)?;
    let regret = session.engine.regret(&wanted, &args.measure.options(&session), &mut *bench, &mut |progress| {
        measuring::show(printer, progress);
        true
    });
    printer.end_progress();
    let regret = regret?;
    if printer.wants_json() {
        printer.json(&regret)?;
    } else {
        print(&regret, usize::MAX, printer)?;
    }
    Ok(if regret.interrupted { Exit::Interrupted } else { Exit::Ok })
}

/// Prints so many calls, how many lose how much, and what that comes to.
pub(super) fn print(regret: &Regret, limit: usize, printer: &mut Printer<'_>) -> Result<(), CliError> {
    let times = |t: Option<f64>| t.map_or_else(|| "–".into(), |t| format!("{t:.2}"));
    let rows = regret.rows.iter().take(limit).map(|r| {
        let best = if r.best == r.chosen { "the same".into() } else { r.best.clone() };
        [r.label.clone(), r.chosen.clone(), best, format!("{:.3}", r.over_best), times(r.times_baseline)]
    });
    printer.table(["call", "chosen", "best", "÷best", "×baseline"], rows)?;
    if let Some(more) = regret.rows.len().checked_sub(limit).filter(|more| *more > 0) {
        printer.line(format!("  {more} more; show them with --limit {}", regret.rows.len()))?;
    }
    for (call, why) in &regret.impossible {
        printer.line(format!("left out: {}: {why}", layerzero::perf::tune::label(call)))?;
    }
    if regret.rows.is_empty() {
        return printer.line("nothing was measured");
    }
    printer.heading("chosen time ÷ best time")?;
    for (low, high) in [(1.0, 1.02), (1.02, 1.05), (1.05, 1.1), (1.1, 1.25), (1.25, f64::INFINITY)] {
        let count = regret.rows.iter().filter(|r| (low..high).contains(&r.over_best)).count();
        let range = if high.is_finite() { format!("{low:.2}–{high:.2}") } else { format!("{low:.2}–") };
        printer.line(format!("  {range:<10} {count:>4} {}", "▪".repeat(count.min(60))))?;
    }
    let on = if regret.device.is_empty() { String::new() } else { format!(" on {}", regret.device) };
    printer.line(format!("\nregret{on}: geomean {:.3}, worst {:.3}", regret.geomean, regret.worst))?;
    if regret.rows.iter().all(|row| row.times_baseline.is_none()) {
        return Ok(());
    }
    printer.line(format!(
        "times the baseline: geomean {:.3}, least {:.3}; where another kernel was chosen {:.3}",
        regret.times_baseline, regret.least_times_baseline, regret.times_baseline_where_other
    ))
}
