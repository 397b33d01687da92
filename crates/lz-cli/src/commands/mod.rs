//! The commands, one file each. To add one: write its file, add a line to the list.

pub mod bench;
pub mod compat;
pub mod completions;
pub mod config;
pub mod doctor;
pub mod explain;
pub mod graph;
pub mod hub;
pub mod kernels;
pub mod lock;
pub mod ops;
pub mod perfdb;
pub mod policy;
pub mod ready;
pub mod regret;
pub mod report;
pub mod rollout;
pub mod run;
pub mod schema;
pub mod select;
pub mod solve;
pub mod tune;

use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::surroundings::Surroundings;

/// Makes the command enum and its dispatch out of the lines `Name = module;`. The help of a command is the
/// documentation of its module's `Args`.
macro_rules! commands {
    ($($name:ident = $module:ident;)+) => {
        /// What to do.
        #[derive(Debug, clap::Subcommand)]
        #[allow(missing_docs)] // each command is documented, for its help, in its own file
        pub enum Command { $($name($module::Args)),+ }

        impl Command {
            /// Does it.
            pub fn run(&self, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
                match self { $(Command::$name(args) => $module::run(args, at, printer)),+ }
            }
        }
    };
}

commands! {
    Doctor = doctor;
    Ops = ops;
    Kernels = kernels;
    Select = select;
    Explain = explain;
    Run = run;
    Tune = tune;
    Regret = regret;
    Report = report;
    Perfdb = perfdb;
    Lock = lock;
    Solve = solve;
    Config = config;
    Policy = policy;
    Rollout = rollout;
    Ready = ready;
    Compat = compat;
    Hub = hub;
    Graph = graph;
    Schema = schema;
    Bench = bench;
    Completions = completions;
}
