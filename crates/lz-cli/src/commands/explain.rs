//! `layerzero explain`: everything about the choice of a kernel.

use crate::args::{CallArgs, EngineArgs, PolicyArgs};
use crate::call::ResolvedCall;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// Explain which kernel serves a call: every candidate, its score, and every reason against it
///
/// Exits with 1 when no kernel can serve the call.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    call: CallArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    policy: PolicyArgs,
}

/// Prints the report.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let call = ResolvedCall::new(&args.call)?;
    let session = Session::deciding(&args.engine, at, &call.op, &args.policy)?;
    let report = session.engine.explain(&call.op, &call.named(session.device))?;
    session.print_warnings(printer);
    if printer.wants_json() {
        printer.raw_json(&report)?;
    } else {
        for line in report.to_string().lines() {
            printer.line(line.trim_end())?;
        }
    }
    Ok(if report.chosen.is_some() { Exit::Ok } else { Exit::No })
}
