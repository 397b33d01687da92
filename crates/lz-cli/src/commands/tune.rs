//! `layerzero tune`: measure the kernels of calls on this machine, and remember.

use layerzero::perf::tune::{TuneOptions, TuneReport, Tuned, label};

use crate::args::EngineArgs;
use crate::error::CliError;
use crate::exit::Exit;
use crate::measuring::{self, MeasureArgs};
use crate::printer::Printer;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// Measure every kernel that can serve these calls, side by side; the fastest are used from then on
///
/// Each is first compared with the reference: one that is wrong is never timed and never chosen. Results are kept in
/// the performance database as they come, so that stopping loses nothing; what was measured before is not measured
/// again.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  layerzero tune --model gpt2 --budget 60s\n  layerzero tune attention.causal --dtype \
                        bfloat16 --dim seq_len=512,2048 --dim head_dim=128\n  layerzero tune rms_norm --shape 512x4096"
)]
pub struct Args {
    #[command(flatten)]
    measure: MeasureArgs,
    /// Measure again what was measured before
    #[arg(long)]
    force: bool,
}

/// Measures and prints what is chosen now.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let session = Session::open(&EngineArgs::default(), at)?;
    let wanted = args.measure.wanted(&session, at, printer)?;
    let options = TuneOptions { force: args.force, ..args.measure.options(&session) };
    let mut bench = measuring::bench(at)?;
    let report = session.engine.tune(&wanted, &options, &mut *bench, &mut |progress| {
        measuring::show(printer, progress);
        true
    });
    printer.end_progress();
    let report = report?;
    session.print_warnings(printer);
    if printer.wants_json() {
        printer.json(&report)?;
    } else {
        print(&report, printer)?;
    }
    Ok(if report.interrupted { Exit::Interrupted } else { Exit::Ok })
}

fn print(report: &TuneReport, printer: &mut Printer<'_>) -> Result<(), CliError> {
    if !report.tuned.is_empty() {
        printer.table(["call", "chosen", "runner-up", "×baseline"], report.tuned.iter().map(row))?;
    }
    let out = report.tuned.iter().flat_map(|t| t.out.iter().map(move |(kernel, why)| (label(&t.call), kernel, why)));
    for (call, kernel, why) in out {
        printer.line(format!("out: {kernel} for {call}: {why}"))?;
    }
    for (call, why) in &report.impossible {
        printer.line(format!("not measured: {}: {why}", label(call)))?;
    }
    let count = |n: usize| format!("{n} call{}", if n == 1 { "" } else { "s" });
    printer.line(format!(
        "measured {} on {} in {:.1} s, {} known before",
        count(report.tuned.len()),
        report.device,
        report.spent_s,
        report.known
    ))?;
    if !report.left.is_empty() {
        printer.line(format!("the budget did not suffice for {}; run it again to go on", count(report.left.len())))?;
    }
    if report.interrupted {
        printer.line("stopped; what was measured is kept, run it again to go on")?;
    }
    if let Some(why) = &report.not_kept {
        printer.warning(&format!("results are not kept: {why}"));
    }
    Ok(())
}

fn row(tuned: &Tuned) -> [String; 4] {
    let text = |kernel: &Option<String>| match kernel {
        None => "–".to_owned(),
        Some(kernel) => {
            let stats = tuned.timings.iter().find(|t| t.candidate == *kernel).and_then(|t| t.stats.as_ref());
            stats.map_or_else(|| kernel.clone(), |s| format!("{kernel} {:.1} µs", s.median_us))
        }
    };
    let times = tuned.times_baseline.map_or_else(|| "–".into(), |t| format!("{t:.2}"));
    [label(&tuned.call), text(&tuned.chosen), text(&tuned.runner_up), times]
}
