//! `layerzero compat`: which libraries get on with what is installed. Python tries them; here it is only known by name.

use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::surroundings::Surroundings;

/// Try every library alone and beside the others, and keep what does not work from being loaded
///
/// Each is imported in a process of its own, so that a crash or a hang is a result; each of its kernels serves one small
/// call and is compared with the reference. Needs Python.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Options of the Python command; see them with 'python -m layerzero compat --help'
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    options: Vec<String>,
}

/// Says who can do it.
pub fn run(args: &Args, _: &Surroundings, _: &mut Printer<'_>) -> Result<Exit, CliError> {
    let asked = std::iter::once("compat").chain(args.options.iter().map(String::as_str)).collect::<Vec<_>>().join(" ");
    let what = format!("libraries are tried by Python, so '{asked}' cannot be done here");
    Err(CliError::argument(what, format!("run 'python -m layerzero {asked}'")))
}
