//! `layerzero graph`: shows the graphs of compiled models. Python does it; here it is only known by name.

use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::surroundings::Surroundings;

/// Show the graph that a model is compiled to
///
/// `layerzero graph show MODEL` prints the optimised graph of a saved plan, of a transformers configuration, or of
/// MODULE:NAME: as text, for Graphviz (--dot), or drawn (--svg). Needs Python.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// show, a model, and options
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

/// Says who can do it.
pub fn run(args: &Args, _: &Surroundings, _: &mut Printer<'_>) -> Result<Exit, CliError> {
    let asked = std::iter::once("graph").chain(args.rest.iter().map(String::as_str)).collect::<Vec<_>>().join(" ");
    let what = format!("graphs are made by Python, so '{asked}' cannot be done here");
    Err(CliError::argument(what, format!("run 'python -m layerzero {asked}'")))
}
