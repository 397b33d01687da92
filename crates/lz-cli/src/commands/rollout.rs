//! `layerzero rollout`: kernels in a rollout, and how they do in the processes that try them.

use layerzero::status::{self, ProcessRollouts};
use layerzero::{percent, rollout_line};
use lz_config::Rollout;
use serde::Serialize;

use crate::commands::config::warn;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::surroundings::Surroundings;

/// Show the kernels in a rollout, and their figures
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

/// What about rollouts.
#[derive(Debug, clap::Subcommand)]
enum What {
    /// Show the configured rollouts, and their figures in every process of this user
    ///
    /// Figures are a second old at most. A rollout that was rolled back stays rolled back in its process. To start it
    /// again, call lz.restart_rollout(name) there; to start it again in all processes, write another 'seed' into the
    /// file.
    Status,
}

/// The answer.
#[derive(Serialize)]
struct Answer {
    configured: Vec<Rollout>,
    processes: Vec<ProcessRollouts>,
}

/// Prints the figures.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let What::Status = args.what;
    let config = at.config()?;
    let processes = at.state_dir().map(|dir| status::processes(&dir)).unwrap_or_default();
    warn(&config, printer);
    let answer = Answer { configured: config.rollouts, processes };
    if printer.wants_json() {
        printer.json(&answer)?;
    } else {
        print(&answer, printer)?;
    }
    Ok(Exit::Ok)
}

fn print(answer: &Answer, printer: &mut Printer<'_>) -> Result<(), CliError> {
    if answer.configured.is_empty() {
        printer.line("no rollout is configured here")?;
    } else {
        let row = |r: &Rollout| {
            let fraction = percent(r.fraction);
            let mode = match r.mode {
                lz_config::RolloutMode::Shadow => "shadow",
                lz_config::RolloutMode::Canary => "canary",
            };
            [r.name.clone(), r.operation.clone(), r.candidate.clone(), mode.into(), fraction, r.seed.to_string()]
        };
        printer.line("configured here")?;
        printer.table(
            ["rollout", "operation", "candidate", "mode", "fraction", "seed"],
            answer.configured.iter().map(row),
        )?;
    }
    if answer.processes.is_empty() {
        return printer.line("no process has figures");
    }
    for process in &answer.processes {
        printer.heading(&format!("process {}", process.pid))?;
        process.rollouts.iter().try_for_each(|status| printer.line(format!("  {}", rollout_line(status))))?;
    }
    Ok(())
}
