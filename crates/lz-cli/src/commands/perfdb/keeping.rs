//! Measurements in and out of a database, and out of it for good.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lz_perfdb::{MergeReport, PruneReport, Report, RowProblem, read_records, verify_file, write_records};
use serde::Serialize;

use super::{Which, change, count, format_of, look, refused};
use crate::args::BadText;
use crate::color::Style;
use crate::commands::lock::unwritten;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::surroundings::Surroundings;

/// What to export.
#[derive(Debug, clap::Args)]
pub struct Export {
    #[command(flatten)]
    which: Which,
    /// The format; by default what the file's name says, or jsonl
    #[arg(long, value_parser = ["jsonl", "csv"])]
    format: Option<String>,
    /// The file; by default standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// What to import.
#[derive(Debug, clap::Args)]
pub struct Import {
    /// The exported file; '-' for standard input
    file: PathBuf,
    /// The format; by default what the file's name says, or jsonl
    #[arg(long, value_parser = ["jsonl", "csv"])]
    format: Option<String>,
}

/// What to merge.
#[derive(Debug, clap::Args)]
pub struct Merge {
    /// Databases, or exported files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// What to prune.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = true)]
pub struct Prune {
    /// What was measured longer ago than this: 90s, 45m, 12h, 30d, 8w
    #[arg(long, value_name = "AGE")]
    older_than: Option<Age>,
    /// Measurements that no longer count: made with another version of a library or driver
    #[arg(long)]
    invalid: bool,
    /// All but this many of the newest
    #[arg(long, value_name = "ROWS")]
    keep: Option<usize>,
    /// Damaged rows
    #[arg(long)]
    damaged: bool,
}

/// A time that has passed, written `30d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Age(Duration);

impl FromStr for Age {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Age, BadText> {
        let bad = || BadText::new(format!("'{text}' is no age; write it like 90s, 45m, 12h, 30d or 8w"));
        let (number, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(bad)?;
        let unit: u64 = match unit {
            "s" => 1,
            "m" => 60,
            "h" => 3600,
            "d" => 86_400,
            "w" => 604_800,
            _ => return Err(bad()),
        };
        let number: u64 = number.parse().map_err(|_| bad())?;
        number.checked_mul(unit).map(|seconds| Age(Duration::from_secs(seconds))).ok_or_else(bad)
    }
}

/// What was exported.
#[derive(Serialize)]
struct Exported<'a> {
    file: &'a Path,
    rows: usize,
}

/// Writes rows.
pub fn export(args: &Export, path: &Path, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let Some(db) = look(path)? else {
        let what = format!("'{}' does not exist", path.display());
        return Err(CliError::argument(what, "nothing was measured yet; name another database with --db"));
    };
    let output = args.output.as_ref().map(|file| at.directory.join(file));
    let format = format_of(args.format.as_deref(), output.as_deref());
    let rows = args.which.rows(&db, printer)?;
    let Some(output) = output else {
        let mut bytes = Vec::new();
        write_records(&mut bytes, format, rows).map_err(refused)?;
        printer.bytes(&bytes)?;
        return Ok(Exit::Ok);
    };
    let rows = layerzero::write_file(&output, |to| write_records(to, format, rows).map_err(refused)).map_err(
        |error: CliError| match error {
            CliError::Output(error) => unwritten(&output, &error),
            error => error,
        },
    )?;
    if printer.wants_json() {
        printer.json(&Exported { file: &output, rows })?;
    } else {
        printer.line(format!("{} written to '{}'", count(rows), output.display()))?;
    }
    Ok(Exit::Ok)
}

/// Takes the rows of an exported file.
pub fn import(args: &Import, path: &Path, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let format = format_of(args.format.as_deref(), Some(&args.file));
    let unreadable = |source| CliError::Unreadable { path: args.file.clone(), source };
    // Read before the database is opened, so that a file that cannot be leaves none behind.
    let records = if args.file.as_os_str() == "-" {
        read_records(std::io::stdin().lock(), format)
    } else {
        read_records(File::open(at.directory.join(&args.file)).map_err(unreadable)?, format)
    };
    let records = records.map_err(|error| named(&args.file, refused(error)))?;
    let report = change(path, printer)?.import_records(records).map_err(refused)?;
    print_merged("imported", &report, printer)
}

/// Takes the rows of other databases and files.
pub fn merge(args: &Merge, path: &Path, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let files: Vec<PathBuf> = args.files.iter().map(|file| at.directory.join(file)).collect();
    if let Some(missing) = files.iter().find(|file| !file.is_file()) {
        let source = std::io::Error::from(std::io::ErrorKind::NotFound);
        return Err(CliError::Unreadable { path: missing.clone(), source });
    }
    let db = change(path, printer)?;
    let mut total = MergeReport::default();
    for file in &files {
        let report = db.merge_file(file).map_err(|error| named(file, refused(error)))?;
        total.added += report.added;
        total.replaced += report.replaced;
        total.kept += report.kept;
        total.skipped += report.skipped;
    }
    print_merged("merged", &total, printer)
}

/// The error, with the file it is about.
fn named(file: &Path, error: CliError) -> CliError {
    match error {
        CliError::Argument { what, hint } if !what.contains(&file.display().to_string()) => {
            CliError::argument(format!("{}: {what}", file.display()), hint)
        }
        error => error,
    }
}

fn print_merged(done: &str, report: &MergeReport, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    if report.skipped > 0 {
        printer.warning(&format!("{} could not be read", count(report.skipped)));
    }
    if printer.wants_json() {
        printer.json(report)?;
    } else {
        let MergeReport { added, replaced, kept, .. } = report;
        printer.line(format!("{done}: {} new, {replaced} better than before, {kept} not", count(*added)))?;
    }
    Ok(Exit::Ok)
}

/// Removes rows.
pub fn prune(args: &Prune, path: &Path, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let before = |age: Age| i64::try_from(now.saturating_sub(age.0).as_millis()).unwrap_or(i64::MAX);
    let what = lz_perfdb::Prune {
        measured_before: args.older_than.map(before),
        invalid: args.invalid,
        keep: args.keep,
        unreadable: args.damaged,
    };
    let report =
        if path.exists() { change(path, printer)?.prune(&what).map_err(refused)? } else { PruneReport::default() };
    if printer.wants_json() {
        printer.json(&report)?;
    } else {
        printer.line(format!("{} removed, {} left", count(report.removed), report.left))?;
    }
    Ok(Exit::Ok)
}

/// Looks for damage.
pub fn verify(path: &Path, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let report = verify_file(path).map_err(refused)?;
    let exit = if report.is_clean() { Exit::Ok } else { Exit::No };
    if printer.wants_json() {
        printer.json(&report)?;
        return Ok(exit);
    }
    for line in problems(&report) {
        let label = printer.paint(Style::Bad, "damage");
        printer.line(format!("{label}: {line}"))?;
    }
    if report.is_clean() {
        let version = match report.schema_version {
            version if version < i64::from(report.current_version) => {
                "; of an older version, migrated when next written"
            }
            _ => "",
        };
        printer.line(format!("'{}': {}, no damage{version}", path.display(), count(report.rows)))?;
    } else if report.integrity.is_empty() {
        printer.line("the rest is in order; remove these with 'layerzero perfdb prune --damaged'")?;
    } else {
        printer.line("it is set aside when it is next written, and its whole rows are put into a new one")?;
    }
    Ok(exit)
}

fn problems(report: &Report) -> Vec<String> {
    let row = |p: &RowProblem| format!("row {}: {}", p.row, p.what);
    let rows = report.damaged.iter().chain(&report.impossible).chain(&report.duplicates).map(row);
    report.integrity.iter().cloned().chain(rows).collect()
}
