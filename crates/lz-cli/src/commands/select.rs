//! `layerzero select`: the kernel that would serve a call.

use layerzero::{Selection, WhyReport};
use serde::Serialize;

use crate::args::{CallArgs, EngineArgs, PolicyArgs};
use crate::call::ResolvedCall;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// Show which kernel would serve a call, and what would be tried after it
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    call: CallArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    policy: PolicyArgs,
}

/// The answer.
#[derive(Serialize)]
struct Answer {
    device: String,
    #[serde(flatten)]
    selection: Selection,
    /// Why that kernel.
    why: Option<WhyReport>,
    /// Every kernel that would be tried, in order; the first is the selected one.
    chain: Vec<String>,
}

/// Prints the selection.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let call = ResolvedCall::new(&args.call)?;
    let session = Session::deciding(&args.engine, at, &call.op, &args.policy)?;
    let named = call.named(session.device);
    let answer = Answer {
        selection: session.engine.which(&call.op, &named)?,
        chain: session.engine.select(&call.op, &named)?,
        why: session.engine.explain(&call.op, &named).ok().and_then(|report| report.why),
        device: session.device_spec().map_or_else(String::new, |d| d.name),
    };
    session.print_warnings(printer);
    if printer.wants_json() {
        printer.json(&answer)?;
        return Ok(Exit::Ok);
    }
    let Answer { device, selection: Selection { op, kernel_id, version, .. }, why, chain } = &answer;
    printer.line(format!("{kernel_id} {version}"))?;
    printer.line(format!("  serves  {op} on {device}"))?;
    if let Some(why) = why {
        printer.line(format!("  why     {}", why.message))?;
    }
    if chain.len() > 1 {
        printer.line(format!("  then    {}", chain[1..].join(", ")))?;
    }
    Ok(Exit::Ok)
}
