//! Leave-one-out cross-validation of what was measured.

use std::path::Path;

use layerzero::perf::cross_validation::{CrossValidation, LeaveOut};
use layerzero::perf::regret::Regret;
use lz_model::DeviceIx;
use lz_perfdb::Filter;
use serde::Serialize;

use super::{count, look, refused};
use crate::args::EngineArgs;
use crate::commands::regret;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// Which calls to show.
#[derive(Debug, clap::Args)]
pub struct CrossValidate {
    #[command(flatten)]
    engine: EngineArgs,
    /// What is left out with a call: nothing else, or every call of its model (the same heads, head size and width)
    #[arg(long, value_enum, default_value_t)]
    leave_out: Left,
    /// Show at most this many calls, those that lose most first
    #[arg(long, default_value_t = 20)]
    limit: usize,
}

/// What is left out with a call.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum Left {
    /// Nothing else
    #[default]
    Call,
    /// Every call of its model
    Model,
}

impl From<Left> for LeaveOut {
    fn from(left: Left) -> LeaveOut {
        match left {
            Left::Call => LeaveOut::Call,
            Left::Model => LeaveOut::Model,
        }
    }
}

/// The answer.
#[derive(Serialize)]
struct Answer<'a> {
    path: &'a Path,
    modes: Vec<OfMode>,
    /// Measurements whose kernels or calls are not known here.
    unknown: usize,
    /// Measurements that are out of date.
    outdated: usize,
}

/// The answer for one mode.
#[derive(Serialize)]
struct OfMode {
    mode: &'static str,
    #[serde(flatten)]
    regret: Regret,
}

/// Prints it.
pub fn run(args: &CrossValidate, path: &Path, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let Some(db) = look(path)? else {
        let what = format!("there is no performance database at '{}'", path.display());
        return Err(CliError::argument(what, "measure with 'layerzero tune', or name another one with --db"));
    };
    let session = Session::open(&args.engine, at)?;
    let records = db.records(&Filter::all().valid()).map_err(refused)?;
    let device = args.engine.device.as_ref().map(|_| DeviceIx(0));
    let CrossValidation { mut modes, unknown, outdated } =
        session.engine.cross_validate(&records, device, args.leave_out.into())?;
    session.print_warnings(printer);
    for (_, regret) in &mut modes {
        regret.rows.sort_by(|a, b| b.over_best.total_cmp(&a.over_best).then_with(|| a.label.cmp(&b.label)));
    }
    if printer.wants_json() {
        let modes = modes.into_iter().map(|(mode, regret)| OfMode { mode: mode.as_str(), regret }).collect();
        printer.json(&Answer { path, modes, unknown, outdated })?;
        return Ok(Exit::Ok);
    }
    if modes.is_empty() {
        let hint = match &args.engine.device {
            Some(device) => format!("'{}' has no measurements of '{device}' that count", path.display()),
            None => format!(
                "'{}' has no measurements of this machine that count; of another one's, say which device they are of: \
                 --device h200",
                path.display()
            ),
        };
        printer.line(hint)?;
    }
    for (rows, why) in [(unknown, "kernels or calls that are not known here"), (outdated, "out of date")] {
        if rows > 0 {
            printer.line(format!("{} left out: {why}", count(rows)))?;
        }
    }
    for (mode, regret) in modes {
        let (calls, left) = (regret.rows.len(), regret.left);
        printer.heading(&format!("{}: {calls} calls decided by others, {left} that cannot be", mode.as_str()))?;
        if calls + regret.impossible.len() > 0 {
            regret::print(&regret, args.limit, printer)?;
        }
    }
    Ok(Exit::Ok)
}
