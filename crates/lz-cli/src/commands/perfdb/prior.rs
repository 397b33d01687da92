//! Priors: what was measured on other machines, and ships with LayerZero.

use std::fs::File;
use std::path::{Path, PathBuf};

use layerzero::perf::prior::{BuiltPrior, PriorFile};
use layerzero::perf::tune::label;
use lz_perfdb::{Filter, Record, read_records};
use serde::Serialize;

use super::{count, format_of, look, refused};
use crate::args::EngineArgs;
use crate::commands::lock::unwritten;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// What about priors.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Show what ships with LayerZero, or what a file holds
    Show(Show),
    /// Make a prior of a device: for each call and kernel the median over the runs
    ///
    /// Give the databases or exported files of the runs; without any, the configured database is used. 'show' reads the
    /// file. The priors that LayerZero uses are built into the program.
    Build(Build),
}

/// What to show.
#[derive(Debug, clap::Args)]
struct Show {
    /// The name of one that ships, or a file; by default a list of those that ship
    prior: Option<String>,
    /// Show at most this many calls
    #[arg(long, default_value_t = 20)]
    limit: usize,
}

/// What to build.
#[derive(Debug, clap::Args)]
struct Build {
    /// Databases, or exported files, each of one run
    #[arg(value_name = "FILE")]
    runs: Vec<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
    /// The file; by default standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// A prior, in short.
#[derive(Serialize)]
struct Summary {
    name: String,
    device: String,
    origin: String,
    runs: usize,
    kernels: usize,
    calls: usize,
    times: usize,
}

/// One call of a prior.
#[derive(Serialize)]
struct Call {
    call: String,
    mode: &'static str,
    threads: u16,
    baseline: Option<String>,
    baseline_us: Option<f64>,
    fastest: String,
    fastest_us: f64,
}

/// Does it.
pub fn run(args: &Args, path: &Path, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    match &args.what {
        What::Show(show) => self::show(show, at, printer),
        What::Build(build) => self::build(build, path, at, printer),
    }
}

fn show(args: &Show, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let Some(name) = &args.prior else {
        let shipped: Vec<Summary> = PriorFile::shipped().map(|(name, file)| summary(name, &file)).collect();
        if printer.wants_json() {
            printer.json(&shipped)?;
            return Ok(Exit::Ok);
        }
        let row = |s: Summary| {
            [s.name, s.origin, s.runs.to_string(), s.kernels.to_string(), s.calls.to_string(), s.times.to_string()]
        };
        printer.table(["name", "measured on", "runs", "kernels", "calls", "times"], shipped.into_iter().map(row))?;
        return Ok(Exit::Ok);
    };
    let file = match PriorFile::shipped().find(|(shipped, _)| shipped == name) {
        Some((_, file)) => file,
        None => read(&at.directory.join(name), name)?,
    };
    let calls: Vec<Call> = file.calls.iter().filter_map(|times| call(&file, times)).collect();
    if printer.wants_json() {
        printer.json(&serde_json::json!({ "summary": summary(name, &file), "calls": calls }))?;
        return Ok(Exit::Ok);
    }
    printer.line(format!("{name}: {}, {} calls", file.origin(), calls.len()))?;
    let row = |c: &Call| {
        let times = c.baseline_us.map_or_else(String::new, |us| format!("{:.2}", us / c.fastest_us));
        let baseline = c.baseline_us.map_or_else(String::new, |us| format!("{us:.1} µs"));
        [c.call.clone(), c.mode.to_owned(), baseline, c.fastest.clone(), format!("{:.1} µs", c.fastest_us), times]
    };
    let shown = calls.iter().take(args.limit).map(row);
    printer.table(["call", "mode", "baseline", "fastest", "", "×baseline"], shown)?;
    if calls.len() > args.limit {
        printer.line(format!("{} more; show them with --limit {}", calls.len() - args.limit, calls.len()))?;
    }
    Ok(Exit::Ok)
}

fn read(path: &Path, name: &str) -> Result<PriorFile, CliError> {
    let shipped: Vec<&str> = PriorFile::shipped().map(|(name, _)| name).collect();
    let text = std::fs::read_to_string(path).map_err(|error| {
        let what = format!("'{name}' is no prior that ships, and cannot be read as a file: {error}");
        CliError::argument(what, format!("those that ship are: {}", shipped.join(", ")))
    })?;
    PriorFile::parse(&text).map_err(|error| {
        CliError::argument(format!("'{name}': {error}"), "make one with 'layerzero perfdb prior build'")
    })
}

fn summary(name: &str, file: &PriorFile) -> Summary {
    Summary {
        name: name.to_owned(),
        device: file.device.name.clone(),
        origin: file.origin(),
        runs: file.runs,
        kernels: file.kernels.len(),
        calls: file.calls.len(),
        times: file.calls.iter().map(|call| call.times.len()).sum(),
    }
}

fn call(file: &PriorFile, times: &layerzero::perf::prior::PriorTimes) -> Option<Call> {
    let id = |at: usize| file.kernels.get(at).map(|(id, _)| id.clone());
    let (fastest, fastest_us) = times.medians().min_by(|a, b| a.1.total_cmp(&b.1))?;
    let baseline_us = times.medians().find(|(at, _)| Some(*at) == times.baseline).map(|(_, us)| us);
    Some(Call {
        call: label(&times.call),
        mode: if times.graph { "graph" } else { "eager" },
        threads: times.threads,
        baseline: times.baseline.and_then(id),
        baseline_us,
        fastest: id(fastest)?,
        fastest_us,
    })
}

fn build(args: &Build, path: &Path, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let files: Vec<PathBuf> = match args.runs.is_empty() {
        true => vec![path.to_owned()],
        false => args.runs.iter().map(|file| at.directory.join(file)).collect(),
    };
    let runs: Vec<Vec<Record>> = files.iter().map(|file| records(file)).collect::<Result<_, _>>()?;
    let session = Session::asking(&args.engine, at)?;
    let Some(BuiltPrior { file, times, left_out }) = session.engine.build_prior(&runs, session.device) else {
        let what = "none of these measurements is of this device and of kernels that are known here";
        return Err(CliError::argument(what, "say which device they are of: --device h200"));
    };
    session.print_warnings(printer);
    let text = file.to_text().map_err(|error| CliError::argument(error.to_string(), "nothing was written"))?;
    let Some(output) = args.output.as_ref().map(|file| at.directory.join(file)) else {
        printer.bytes(text.as_bytes())?;
        return Ok(Exit::Ok);
    };
    let written = layerzero::write_file(&output, |to| std::io::Write::write_all(to, text.as_bytes()));
    written.map_err(|error: std::io::Error| unwritten(&output, &error))?;
    let bytes = text.len();
    if printer.wants_json() {
        let summary = summary(&output.display().to_string(), &file);
        printer
            .json(&serde_json::json!({ "file": output, "bytes": bytes, "left_out": left_out, "summary": summary }))?;
    } else {
        let (calls, output) = (file.calls.len(), output.display());
        printer.line(format!(
            "{times} times of {calls} calls written to '{output}', {bytes} bytes; {} left out",
            count(left_out)
        ))?;
    }
    Ok(Exit::Ok)
}

/// The measurements of a database or an exported file.
fn records(file: &Path) -> Result<Vec<Record>, CliError> {
    let unreadable = |source| CliError::Unreadable { path: file.to_owned(), source };
    let extension = file.extension().and_then(|extension| extension.to_str());
    if matches!(extension, Some("csv" | "jsonl")) {
        let format = format_of(None, Some(file));
        return read_records(File::open(file).map_err(unreadable)?, format).map_err(refused);
    }
    let Some(db) = look(file)? else {
        return Err(unreadable(std::io::Error::from(std::io::ErrorKind::NotFound)));
    };
    db.records(&Filter::all().valid()).map_err(refused)
}
