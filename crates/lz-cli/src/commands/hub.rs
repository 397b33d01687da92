//! `layerzero hub`: locks kernels of the Hugging Face hub. Python does it; here it is only known by name.

use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::surroundings::Surroundings;

/// Write the hashes of the hub kernels that may be loaded
///
/// Of every kernel that the setting backends.hub_allow names, the SHA-256 of each file in the local cache. A kernel whose
/// files are others is refused afterwards. Nothing is downloaded. Needs Python.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Write nothing; say which kernels differ from the lockfile
    #[arg(long)]
    check: bool,
}

/// Says who can do it.
pub fn run(args: &Args, _: &Surroundings, _: &mut Printer<'_>) -> Result<Exit, CliError> {
    let asked = if args.check { "hub --check" } else { "hub" };
    let what = format!("kernels of the hub are looked at by Python, so '{asked}' cannot be done here");
    Err(CliError::argument(what, format!("run 'python -m layerzero {asked}'")))
}
