//! `layerzero completions`: completion scripts for shells.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::Cli;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::surroundings::Surroundings;

/// Print the completion script of a shell
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell
    pub shell: Shell,
}

/// Prints the script.
pub fn run(args: &Args, _: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    // The generator panics when it cannot write, and memory can always be written to.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "layerzero", &mut script);
    printer.bytes(&script)?;
    Ok(Exit::Ok)
}
