//! `layerzero ready`: the checklist before production, as a gate.

use layerzero::{CheckStatus, Readiness};

use crate::args::EngineArgs;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::program::Libraries;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// Check that this machine and its configuration are fit for production
///
/// Exits with 0 if it is ready, with 1 if not, with 2 if that cannot be found out. Warnings do not count. Only a running
/// process knows its own breakers and telemetry: call lz.readiness_check() there.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    engine: EngineArgs,
}

/// Prints the checks.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let opened = Session::open_anyway(&args.engine, Libraries::Imported, at).and_then(|(session, refused)| {
        // A document that was refused is a check that fails; one that cannot be read says nothing at all.
        let unreadable = |error: &CliError| matches!(error, CliError::Unreadable { .. });
        refused.into_iter().find(unreadable).map_or(Ok(session), Err)
    });
    let session = match opened {
        Ok(session) => session,
        Err(error) => {
            printer.error(&error);
            return Ok(Exit::Usage);
        }
    };
    if args.engine.device.is_none() {
        session.engine.refresh_memory();
    }
    session.engine.learn_if_there();
    let mut checks = session.engine.readiness().checks;
    for check in checks.iter_mut().filter(|check| ["telemetry", "drift"].contains(&check.name)) {
        check.status = CheckStatus::Skipped;
        check.detail = "a process alone knows; see lz.readiness_check()".into();
        check.hint = String::new();
    }
    let readiness = Readiness::of(checks);
    if printer.wants_json() {
        printer.json(&readiness)?;
    } else {
        readiness.to_string().lines().try_for_each(|line| printer.line(line))?;
    }
    Ok(if readiness.ready { Exit::Ok } else { Exit::No })
}
