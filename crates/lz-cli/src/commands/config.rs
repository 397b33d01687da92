//! `layerzero config`: the settings in force, where each comes from, and what is wrong with a file.

use std::path::PathBuf;

use lz_config::{Config, ConfigWarning, Entry, Setting};
use lz_select::{Finding, Severity, analyse};
use serde::Serialize;
use serde_json::json;

use crate::args::EngineArgs;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::session::Session;
use crate::surroundings::{self, Surroundings};

/// Show the configuration in force, check a file, or print the reference of all settings
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

/// What about the configuration.
#[derive(Debug, clap::Subcommand)]
enum What {
    /// Show every setting, lock, rule and rollout in force
    Show(Show),
    /// Check a configuration file, or the configuration in force: every problem with its line and column
    ///
    /// Names of kernels and libraries must be known. Rules are checked as by 'policy check' and 'ready'. Exits with 3 when
    /// anything is wrong.
    Check(Box<CheckArgs>),
    /// Print the reference of all settings, in Markdown
    Reference,
}

/// What to check.
#[derive(Debug, clap::Args)]
struct CheckArgs {
    /// The file; by default everything that is in force here
    file: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
}

/// What to show.
#[derive(Debug, clap::Args)]
struct Show {
    /// Also show where each value comes from
    #[arg(long)]
    origin: bool,
    /// Only these settings, or groups of them; all by default
    keys: Vec<String>,
}

/// The answer of `show`.
#[derive(Serialize)]
struct Answer<'a> {
    files: &'a [PathBuf],
    entries: Vec<&'a Entry>,
    warnings: &'a [ConfigWarning],
}

/// Answers.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    match &args.what {
        What::Show(show) => self::show(show, at, printer)?,
        What::Check(args) => check(args, at, printer)?,
        What::Reference => reference(printer)?,
    }
    Ok(Exit::Ok)
}

fn show(args: &Show, at: &Surroundings, printer: &mut Printer<'_>) -> Result<(), CliError> {
    let config = at.config()?;
    let entries = wanted(&config, &args.keys)?;
    warn(&config, printer);
    if printer.wants_json() {
        return printer.json(&Answer { files: config.files(), entries, warnings: &config.warnings });
    }
    if args.origin {
        let row = |e: &&Entry| [e.key.clone(), e.value.to_string(), e.origin.to_string()];
        printer.table(["setting", "value", "from"], entries.iter().map(row))
    } else {
        let row = |e: &&Entry| [e.key.clone(), e.value.to_string()];
        printer.table(["setting", "value"], entries.iter().map(row))
    }
}

/// The entries that are asked for: by their key, or all of a group (`breaker`, `locks`, `rules`).
fn wanted<'a>(config: &'a Config, keys: &[String]) -> Result<Vec<&'a Entry>, CliError> {
    let is = |entry: &Entry, key: &str| {
        let rest = entry.key.strip_prefix(key);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    let groups = ["locks", "rules", "rollouts"];
    for key in keys {
        if !groups.contains(&key.as_str()) && !config.entries().iter().any(|entry| is(entry, key)) {
            let known = lz_config::SETTINGS.iter().map(|setting| setting.key).chain(groups);
            let nearest = lz_model::nearest(key, known);
            let what = format!("unknown setting '{key}'{}", lz_model::did_you_mean(&nearest));
            return Err(CliError::argument(what, "list them with 'layerzero config reference'"));
        }
    }
    let asked = |entry: &&Entry| keys.is_empty() || keys.iter().any(|key| is(entry, key));
    Ok(config.entries().iter().filter(asked).collect())
}

fn check(args: &CheckArgs, at: &Surroundings, printer: &mut Printer<'_>) -> Result<(), CliError> {
    let sources = args.file.as_ref().map_or_else(|| at.sources(), |file| at.alone(file));
    let config = surroundings::config(&sources)?;
    let session = Session::unconfigured(&args.engine, at)?;
    let findings = session.engine.with_snapshot(|snapshot| analyse(config.policy(), snapshot));
    warn(&config, printer);
    let (wrong, odd): (Vec<_>, Vec<_>) = findings.into_iter().partition(|f| f.severity == Severity::Error);
    if !wrong.is_empty() {
        return Err(CliError::Engine(layerzero::Error::Config(config.refused(&wrong))));
    }
    let worth_saying = |finding: &&Finding| finding.severity == Severity::Warning;
    odd.iter().filter(worth_saying).for_each(|finding| printer.warning(&finding.to_string()));
    if printer.wants_json() {
        let (files, warnings) = (config.files(), &config.warnings);
        return printer.json(&json!({ "files": files, "warnings": warnings, "findings": odd, "problems": [] }));
    }
    match config.files() {
        [] => printer.line("no files; the environment is in order"),
        files => files.iter().try_for_each(|file| printer.line(format!("{}: no problems", file.display()))),
    }
}

fn reference(printer: &mut Printer<'_>) -> Result<(), CliError> {
    if !printer.wants_json() {
        return printer.bytes(lz_config::reference_markdown().as_bytes());
    }
    let setting = |s: &Setting| {
        json!({
            "key": s.key, "doc": s.doc, "expected": s.kind.expected(), "default": s.default(),
            "variable": s.variable_name(),
        })
    };
    printer.json(&json!({ "settings": lz_config::SETTINGS.iter().map(setting).collect::<Vec<_>>() }))
}

/// Says what is probably a mistake, beside the answer.
pub fn warn(config: &Config, printer: &mut Printer<'_>) {
    config.warnings.iter().for_each(|warning| printer.warning(&warning.to_string()));
}
