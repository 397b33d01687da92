//! `layerzero kernels`: the registered kernels.

use layerzero::KernelInfo;
use serde::Serialize;

use crate::args::EngineArgs;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// List the registered kernels, and why one cannot run on the device
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only those of this operation or alias
    #[arg(long, value_name = "NAME")]
    op: Option<String>,
    #[command(flatten)]
    engine: EngineArgs,
}

/// The answer.
#[derive(Serialize)]
struct Answer {
    device: Option<String>,
    kernels: Vec<KernelInfo>,
}

/// Prints the list.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let session = Session::open(&args.engine, at)?;
    let kernels = session.engine.list_kernels(args.op.as_deref())?;
    let device = session.device_spec().map(|d| d.name);
    let answer = Answer { device, kernels };
    session.print_warnings(printer);
    if printer.wants_json() {
        printer.json(&answer)?;
        return Ok(Exit::Ok);
    }
    let status = |kernel: &KernelInfo| match kernel.unavailable.as_slice() {
        [] if kernel.reference => "reference".to_owned(),
        [] if kernel.dispatch == "described" => "can be selected".to_owned(),
        [] => "ready".to_owned(),
        reasons => format!("not here: {}", reasons.join("; ")),
    };
    let row = |k: &KernelInfo| {
        let (platforms, dtypes) = (k.platforms.join(", "), k.dtypes.join(", "));
        [
            k.kernel_id.clone(),
            k.version.clone(),
            k.operation.clone(),
            k.priority.to_string(),
            platforms,
            dtypes,
            k.dispatch.into(),
            status(k),
        ]
    };
    let header = ["kernel", "version", "operation", "priority", "platforms", "dtypes", "dispatch", "status"];
    printer.line(format!(
        "{} kernels, on {}",
        answer.kernels.len(),
        answer.device.as_deref().unwrap_or("no device")
    ))?;
    if !answer.kernels.is_empty() {
        printer.table(header, answer.kernels.iter().map(row))?;
    }
    Ok(Exit::Ok)
}
