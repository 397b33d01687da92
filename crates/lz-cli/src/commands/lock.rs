//! `layerzero lock`: decisions, written down; and which of those that were can be kept.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use layerzero::{Engine, Locked, Lockfile, ManifestFile, PinStatus};
use lz_model::{CallSpec, DeviceIx, device_named};
use serde::Serialize;

use crate::args::EngineArgs;
use crate::call::read_calls;
use crate::color::Style;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// Write down which kernel serves each call, with times, in a file that can be kept, compared and replayed
///
/// LAYERZERO_LOCKFILE (or `lockfile:` in layerzero.yaml) applies the file: the same calls get the same kernels on every
/// machine of the same kind, whatever is measured there. A lockfile that applies now is ignored while the new one is
/// written.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exits with 1 when --check finds decisions that cannot be kept.")]
pub struct Args {
    /// The calls, as JSON, one in each line; '-' reads them from standard input. By default those that were measured or
    /// made on this machine
    #[arg(long, value_name = "FILE")]
    calls: Option<PathBuf>,
    /// The file to write; '-' prints it
    #[arg(short, long, value_name = "FILE", default_value = "layerzero.lock")]
    output: PathBuf,
    /// Write nothing; say which decisions of this lockfile cannot be kept here, and why
    #[arg(long, value_name = "FILE", conflicts_with = "calls")]
    check: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
}

/// The answer.
#[derive(Serialize)]
struct Answer<'a> {
    /// The file that was written; none when it was printed.
    output: Option<&'a Path>,
    #[serde(flatten)]
    lockfile: &'a Lockfile,
    left_out: Vec<LeftOut>,
}

/// A call that nothing was decided for.
#[derive(Serialize)]
pub(super) struct LeftOut {
    pub call: CallSpec,
    pub error: String,
}

/// Locks or checks.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let session = Session::unconfigured(&args.engine, at)?;
    session.engine.leave_unread("lockfile");
    let session = session.configured(at)?;
    session.engine.learn();
    if let Some(file) = &args.check {
        let text = read_document("lockfile", &at.directory.join(file))?;
        let lockfile = Lockfile::parse(&text).map_err(|error| unfit("lockfile", file, &error))?;
        let status = session.engine.check_lockfile(&lockfile, &file.display().to_string())?;
        session.print_warnings(printer);
        return told(&status, printer);
    }
    let calls = calls(args.calls.as_deref(), &session, at, printer)?;
    let (lockfile, impossible) = session.engine.lockfile_of(&calls)?;
    let left_out = left_out(args.calls.as_deref(), &calls, impossible)?;
    session.print_warnings(printer);
    warn_of(&left_out, printer);
    let text = lockfile.to_string();
    if text.len() > Lockfile::MAX_BYTES {
        return Err(too_large(text.len(), Lockfile::MAX_BYTES));
    }
    let file = write(&args.output, &text, at)?;
    if printer.wants_json() {
        printer.json(&Answer { output: file.as_deref(), lockfile: &lockfile, left_out })?;
    } else if file.is_some() {
        let bases = bases(&lockfile.entries);
        printer.line(format!("{}: {}{bases}", args.output.display(), decisions(lockfile.entries.len())))?;
    } else {
        printer.bytes(text.as_bytes())?;
    }
    Ok(Exit::Ok)
}

/// `1 decision`, `2 decisions`.
pub(super) fn decisions(n: usize) -> String {
    format!("{n} decision{}", if n == 1 { "" } else { "s" })
}

/// What decisions went by: ` (3 declared, 9 measured)`.
fn bases(entries: &[Locked]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    entries.iter().filter_map(|e| e.basis.as_deref()).for_each(|basis| *counts.entry(basis).or_default() += 1);
    let told: Vec<String> = counts.iter().map(|(basis, n)| format!("{n} {basis}")).collect();
    if told.is_empty() { String::new() } else { format!(" ({})", told.join(", ")) }
}

/// The calls of a file, for the session's device; or those that were measured or made on this machine.
pub(super) fn calls(
    file: Option<&Path>,
    session: &Session,
    at: &Surroundings,
    printer: &mut Printer<'_>,
) -> Result<Vec<(CallSpec, DeviceIx)>, CliError> {
    let calls = match file {
        Some(file) if file == Path::new("-") => on(session.device, read_calls(file)?),
        Some(file) => on(session.device, read_calls(&at.directory.join(file))?),
        None => {
            let mut calls = session.engine.known_calls();
            calls.extend(made(&session.engine, printer));
            calls
        }
    };
    if calls.is_empty() {
        let what = match file {
            Some(file) => format!("there is no call in '{}'", file.display()),
            None => "no call was measured or made on this machine so far".to_owned(),
        };
        return Err(CliError::argument(what, "give calls with --calls, or measure some with 'layerzero tune'"));
    }
    Ok(calls)
}

fn on(device: DeviceIx, calls: Vec<CallSpec>) -> Vec<(CallSpec, DeviceIx)> {
    calls.into_iter().map(|call| (call, device)).collect()
}

/// The calls that processes made on the devices of an engine, of all models.
fn made(engine: &Engine, printer: &mut Printer<'_>) -> Vec<(CallSpec, DeviceIx)> {
    let Ok(path) = engine.manifest_path(None) else { return Vec::new() };
    let manifest = ManifestFile::read(&path).unwrap_or_else(|error| {
        printer.warning(&format!("calls that were made are left out: {error}"));
        ManifestFile::default()
    });
    let (devices, days) = (engine.devices(), engine.config().settings.jit.manifest_stale_days);
    let entries = manifest.models().flat_map(|model| manifest.calls(Some(model), days));
    entries.filter_map(|entry| Some((entry.call, device_named(&devices, &entry.device)?))).collect()
}

/// Of calls that were asked for all must be possible; of those that were found some need not be.
pub(super) fn left_out(
    asked: Option<&Path>,
    calls: &[(CallSpec, DeviceIx)],
    impossible: Vec<(usize, layerzero::Error)>,
) -> Result<Vec<LeftOut>, CliError> {
    match (asked, impossible) {
        (Some(file), mut some) if !some.is_empty() => {
            let (number, error) = some.swap_remove(0);
            let error = CliError::from(error);
            let what = format!("call {} of '{}': {error}", number + 1, file.display());
            Err(CliError::argument(what, error.hint()))
        }
        (_, impossible) => {
            let out =
                |(i, error): (usize, layerzero::Error)| LeftOut { call: calls[i].0.clone(), error: error.to_string() };
            Ok(impossible.into_iter().map(out).collect())
        }
    }
}

pub(super) fn warn_of(left_out: &[LeftOut], printer: &mut Printer<'_>) {
    for out in left_out {
        printer.warning(&format!("left out: {}: {}", out.call, out.error));
    }
}

/// Prints what of a document can be kept.
pub(super) fn told(status: &PinStatus, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let exit = if status.mismatches.is_empty() { Exit::Ok } else { Exit::No };
    if printer.wants_json() {
        printer.json(status)?;
        return Ok(exit);
    }
    let PinStatus { origin, entries, in_force, .. } = status;
    printer.line(match (status.refused, in_force == entries) {
        (true, _) => format!("{origin}: refused as a whole"),
        (false, true) => format!("{origin}: {} can be kept", decisions(*entries)),
        (false, false) => format!("{origin}: {in_force} of {} can be kept", decisions(*entries)),
    })?;
    for mismatch in &status.mismatches {
        let text = printer.paint(Style::Bad, &mismatch.to_string());
        printer.line(format!("  {text}"))?;
    }
    Ok(exit)
}

/// The text of a lockfile or table.
pub(super) fn read_document(what: &'static str, path: &Path) -> Result<String, CliError> {
    lz_config::read_file(path).map_err(|kind| unfit(what, path, &kind))
}

pub(super) fn unfit(what: &'static str, path: &Path, error: &impl ToString) -> CliError {
    CliError::Document { what, path: path.to_owned(), message: error.to_string() }
}

pub(super) fn too_large(bytes: usize, limit: usize) -> CliError {
    let what = format!("the file would have {bytes} bytes; at most {limit} are read");
    CliError::argument(what, "give fewer calls with --calls")
}

/// Puts a text in the place of what a file held, whole or not at all; none is written for `-`.
pub(super) fn write(output: &Path, text: &str, at: &Surroundings) -> Result<Option<PathBuf>, CliError> {
    if output == Path::new("-") {
        return Ok(None);
    }
    let path = at.directory.join(output);
    layerzero::write_file(&path, |to| to.write_all(text.as_bytes())).map_err(|error| unwritten(&path, &error))?;
    Ok(Some(path))
}

/// A file that could not be written, and why.
pub(super) fn unwritten(path: &Path, error: &io::Error) -> CliError {
    CliError::Output(io::Error::new(error.kind(), format!("'{}': {error}", path.display())))
}
