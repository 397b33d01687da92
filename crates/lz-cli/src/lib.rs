//! The command `layerzero`: what this machine has, which kernel serves a call, and why.
//!
//! Arguments are *parsed* by [clap] into what was written ([`args`]), *resolved* by a command into
//! what is meant ([`surroundings`], [`session`], [`call`]), and the answer goes through the [`printer`], as text for
//! people or as JSON. Each command is a file in [`commands`] and a line in its list.
//!
//! ```
//! let (mut out, mut err) = (Vec::new(), Vec::new());
//! let code = lz_cli::run(["layerzero", "ops", "rms_norm"], &mut out, &mut err);
//! assert_eq!(code, 0);
//! assert!(String::from_utf8(out).unwrap().starts_with("norm.rms: root-mean-square normalization\n"));
//! ```
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | the answer is no: no kernel can serve the call, a kernel failed, a checked file differs |
//! | 2 | the command line or the call is wrong |
//! | 3 | a configuration, a capabilities document or a device description is wrong |
//! | 4 | the environment cannot be used: no device, or no kernel that runs on one |
//! | 130 | somebody stopped it |
#![forbid(unsafe_code)]

pub mod args;
pub mod call;
pub mod color;
pub mod commands;
pub mod device;
pub mod error;
mod escape;
pub mod exit;
pub mod host;
pub mod measuring;
pub mod printer;
pub mod program;
pub mod session;
pub mod surroundings;

use std::ffi::OsString;
use std::io::Write;

use clap::Parser;

use crate::args::{Cli, ColorChoice};
use crate::color::Paint;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::surroundings::Surroundings;

/// Which of the two outputs people are looking at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terminals {
    /// `out` is a terminal.
    pub out: bool,
    /// `err` is a terminal.
    pub err: bool,
}

/// Runs the command line and gives the exit code. The first argument is the program's name.
pub fn run<I>(args: I, out: &mut dyn Write, err: &mut dyn Write) -> i32
where
    I: IntoIterator<Item: Into<OsString>>,
{
    run_on(args, out, err, Terminals::default())
}

/// As [`run`], for outputs that may be terminals, which decides about colours.
pub fn run_on<I>(args: I, out: &mut dyn Write, err: &mut dyn Write, terminals: Terminals) -> i32
where
    I: IntoIterator<Item: Into<OsString>>,
{
    run_in(args, out, err, terminals, Surroundings::of_process())
}

/// As [`run_on`], in surroundings that need not be those of this process.
pub fn run_in<I>(
    args: I,
    out: &mut dyn Write,
    err: &mut dyn Write,
    terminals: Terminals,
    surroundings: Surroundings,
) -> i32
where
    I: IntoIterator<Item: Into<OsString>>,
{
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    let parsed = Cli::try_parse_from(&args);
    let (json, color) = match &parsed {
        Ok(cli) => (cli.global.json, cli.global.color),
        // What was parsed before the mistake is not known, so the flag is looked for as it is written.
        Err(_) => (args.iter().any(|a| a == "--json"), ColorChoice::Auto),
    };
    let mut printer = Printer::new(out, err, json, Paint::new(color, terminals.out), Paint::new(color, terminals.err));
    printer.set_watched(terminals.err);
    let answered = match parsed {
        Ok(cli) => {
            let surroundings = Surroundings { config: cli.global.config, ..surroundings };
            cli.command.run(&surroundings, &mut printer)
        }
        Err(refusal) if refusal.use_stderr() => Err(CliError::Usage(refusal)),
        Err(help) => printer.help(&help).map(|()| Exit::Ok),
    };
    let written = answered.and_then(|exit| printer.flush().map(|()| exit));
    written.unwrap_or_else(|error| printer.error(&error)).code()
}
