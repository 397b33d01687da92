//! `layerzero perfdb`: the measurements that are kept, and what can be done with them.

mod cross_validate;
mod keeping;
mod prior;
mod show;

use std::path::{Path, PathBuf};

use lz_expr::glob_matches;
use lz_model::Catalog;
use lz_perfdb::{Filter, Format, Options, PerfDb, Record, State, StoreError};

use crate::commands::config::warn;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::surroundings::Surroundings;

/// Show the measurements that are kept, move them between machines, tidy them up
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The database; by default the one the configuration names (perfdb.path)
    #[arg(long, global = true, value_name = "FILE")]
    db: Option<PathBuf>,
    #[command(subcommand)]
    what: What,
}

/// What about the measurements.
#[derive(Debug, clap::Subcommand)]
enum What {
    /// Show measurements, call by call, the fastest kernel first
    Show(show::Show),
    /// Write measurements as text, for other machines or other programs
    ///
    /// One row per line, with the columns of the database. What is not known is null in JSON and empty in CSV.
    Export(keeping::Export),
    /// Import the rows of an exported file; if a measurement exists already, the newer one is kept
    ///
    /// A file with a mistake anywhere is refused as a whole.
    Import(keeping::Import),
    /// Merge other databases or exported files into this one; the better measurement is kept
    ///
    /// That is the one with more samples, then with less noise, then the newer one. A kernel that one of them found wrong
    /// stays excluded. The other files are only read.
    Merge(keeping::Merge),
    /// Remove measurements: everything that one of the options names
    Prune(keeping::Prune),
    /// Cross-validate predictions by leaving each measured call out; nothing is run
    ///
    /// Each call is left out in turn, and decided by the measurements of the others. The choice is compared with the
    /// measurements of the call: chosen time ÷ best time, and baseline time ÷ chosen time. For the database of another
    /// machine, name its device.
    CrossValidate(cross_validate::CrossValidate),
    /// Show or build priors: times from other machines, used where nothing was measured here
    Prior(prior::Args),
    /// Look for damage, and change nothing; exits with 1 when anything is wrong
    Verify,
}

/// Does it.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let path = path(args, at, printer)?;
    match &args.what {
        What::Show(show) => show::run(show, &path, printer),
        What::Export(export) => keeping::export(export, &path, at, printer),
        What::Import(import) => keeping::import(import, &path, at, printer),
        What::Merge(merge) => keeping::merge(merge, &path, at, printer),
        What::Prune(prune) => keeping::prune(prune, &path, printer),
        What::CrossValidate(args) => cross_validate::run(args, &path, at, printer),
        What::Prior(args) => prior::run(args, &path, at, printer),
        What::Verify => keeping::verify(&path, printer),
    }
}

fn path(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<PathBuf, CliError> {
    if let Some(path) = &args.db {
        return Ok(at.directory.join(path));
    }
    let config = at.config()?;
    warn(&config, printer);
    let homeless = || {
        let what = "the database is in the home directory, and that is not known";
        CliError::argument(what, "say where it is with --db or perfdb.path")
    };
    config.perfdb_path().map(|path| at.directory.join(path)).ok_or_else(homeless)
}

/// Which measurements.
#[derive(Debug, clap::Args)]
struct Which {
    /// Only those of this operation or alias
    #[arg(long, value_name = "NAME")]
    op: Option<String>,
    /// Only those of this kernel; '*' is any run of characters
    #[arg(long, value_name = "ID")]
    kernel: Option<String>,
    /// Only those of devices whose id begins so
    #[arg(long, value_name = "ID")]
    device: Option<String>,
}

impl Which {
    /// The rows of a database that are meant.
    fn rows(&self, db: &PerfDb, printer: &mut Printer<'_>) -> Result<Vec<Record>, CliError> {
        let ops: Option<Vec<&str>> = match &self.op {
            Some(name) => {
                let catalog = Catalog::get();
                Some(catalog.find(name)?.ops.iter().map(|op| catalog.op(*op).id()).collect())
            }
            None => None,
        };
        let is_meant = |record: &Record| {
            let key = &record.key;
            ops.as_ref().is_none_or(|ops| ops.contains(&key.operation.as_str()))
                && self.kernel.as_ref().is_none_or(|kernel| glob_matches(kernel, &key.kernel_id))
                && self.device.as_ref().is_none_or(|device| key.device_id.starts_with(device))
        };
        let mut rows = db.records(&Filter::all()).map_err(refused)?;
        db.notes().iter().for_each(|note| printer.warning(note));
        rows.retain(is_meant);
        Ok(rows)
    }
}

/// Opens a database to look at; `None` when there is none.
fn look(path: &Path) -> Result<Option<PerfDb>, CliError> {
    if !path.exists() {
        return Ok(None);
    }
    let db = PerfDb::open(path, Options { read_only: true, ..Options::default() });
    match db.state() {
        State::Memory { why } => Err(CliError::argument(why, "see what is wrong with 'layerzero perfdb verify'")),
        State::Open | State::Rebuilt { .. } | State::ReadOnly { .. } => Ok(Some(db)),
    }
}

/// Opens a database to change.
fn change(path: &Path, printer: &mut Printer<'_>) -> Result<PerfDb, CliError> {
    let db = PerfDb::open(path, Options::default());
    match db.state() {
        State::Open => Ok(db),
        State::Rebuilt { .. } => {
            printer.warning(&db.state().to_string());
            Ok(db)
        }
        State::Memory { why } | State::ReadOnly { why } => {
            Err(CliError::argument(why, "nothing was changed; name another file with --db"))
        }
    }
}

/// What the store says, with what to do about it.
fn refused(error: StoreError) -> CliError {
    let hint = match &error {
        StoreError::BadLine { .. } | StoreError::OtherSchema { .. } => "nothing of the file was taken; put it right",
        StoreError::Damaged { .. } => "a damaged database is set aside when it is next written",
        StoreError::NotOurs { .. } => "name a database with --db",
        _ => "nothing was changed; check the disk and the permissions",
    };
    CliError::argument(error.to_string(), hint)
}

/// The format that was asked for, or that the name of a file says.
fn format_of(asked: Option<&str>, path: Option<&Path>) -> Format {
    let named = path.and_then(Path::extension).and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase);
    let text = asked.map(str::to_owned).or(named);
    text.and_then(|text| text.parse().ok()).unwrap_or(Format::Jsonl)
}

/// `1 row`, `2 rows`.
fn count(rows: usize) -> String {
    format!("{rows} row{}", if rows == 1 { "" } else { "s" })
}
