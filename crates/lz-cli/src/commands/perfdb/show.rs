//! Measurements for people: call by call, the fastest first.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use layerzero::perf::tune::label;
use lz_model::CallSpec;
use lz_perfdb::{Outcome, Record};
use serde::Serialize;

use super::{Which, count, look};
use crate::color::Style;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;

/// What to show.
#[derive(Debug, clap::Args)]
pub struct Show {
    #[command(flatten)]
    which: Which,
    /// Also those that no longer count, and why
    #[arg(long)]
    invalid: bool,
    /// Show at most this many
    #[arg(long, default_value_t = 100)]
    limit: usize,
}

/// The answer.
#[derive(Serialize)]
struct Answer<'a> {
    path: &'a Path,
    /// How many there are.
    total: usize,
    /// Those that are shown.
    rows: &'a [Record],
}

/// Prints them.
pub fn run(show: &Show, path: &Path, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let db = look(path)?;
    let mut rows = match &db {
        Some(db) => show.which.rows(db, printer)?,
        None => Vec::new(),
    };
    rows.retain(|row| show.invalid || row.is_valid());
    rows.sort_by(|a, b| group(a).cmp(&group(b)).then_with(|| time(a).total_cmp(&time(b))));
    let total = rows.len();
    rows.truncate(show.limit);
    if printer.wants_json() {
        printer.json(&Answer { path, total, rows: &rows })?;
        return Ok(Exit::Ok);
    }
    match db {
        None => printer.line(format!("no measurements: '{}' does not exist", path.display()))?,
        Some(_) if total == 0 => printer.line(format!("'{}' has no such measurements", path.display()))?,
        Some(_) => printer.line(format!("'{}': {}", path.display(), count(total)))?,
    }
    for of_call in rows.chunk_by(|a, b| group(a) == group(b)) {
        print(of_call, printer)?;
    }
    if total > rows.len() {
        printer.line(format!("{} more; show them with --limit {total}", count(total - rows.len())))?;
    }
    Ok(Exit::Ok)
}

/// What was measured side by side, or could have been.
fn group(row: &Record) -> (&str, &str, &str, u32, &str) {
    (&row.key.operation, &row.key.device_id, row.key.mode.as_str(), row.key.threads, &row.key.call)
}

/// What rows of a call are sorted by: kernels without a time come last.
fn time(row: &Record) -> f64 {
    match &row.outcome {
        Outcome::Ok(timing) => timing.median_us,
        Outcome::Wrong { .. } => f64::MAX,
        Outcome::Failed { .. } => f64::INFINITY,
    }
}

fn print(rows: &[Record], printer: &mut Printer<'_>) -> Result<(), CliError> {
    let Some(key) = rows.first().map(|row| &row.key) else { return Ok(()) };
    let call = key.call.parse::<CallSpec>().map_or_else(|_| format!("{} {}", key.operation, key.call), |c| label(&c));
    let threads = match key.threads {
        0 => String::new(),
        1 => ", 1 thread".into(),
        threads => format!(", {threads} threads"),
    };
    printer.heading(&format!("{} on {}, {}{threads}", shortened(&call), key.device_id, key.mode))?;
    let baseline = rows.iter().find(|row| row.baseline).and_then(|row| row.outcome.timing());
    let cells: Vec<[String; 7]> = rows
        .iter()
        .map(|row| {
            let age = age(row.measured_at);
            let remark = remark(row, printer);
            let Outcome::Ok(timing) = &row.outcome else {
                return [row.key.kernel_id.clone(), "–".into(), "".into(), "".into(), "".into(), age, remark];
            };
            let faster = baseline.map_or_else(String::new, |b| format!("{:.2}", b.median_us / timing.median_us));
            let median = format!("{:.1} µs", timing.median_us);
            let noise = format!("±{:.1}", timing.spread_us);
            [row.key.kernel_id.clone(), median, noise, faster, timing.samples.to_string(), age, remark]
        })
        .collect();
    printer.table(["kernel", "median", "noise", "×baseline", "rounds", "measured", ""], cells)
}

fn remark(row: &Record, printer: &Printer<'_>) -> String {
    let mut remarks = Vec::new();
    if row.baseline {
        remarks.push("the baseline".to_owned());
    }
    match &row.outcome {
        Outcome::Ok(_) => {}
        Outcome::Wrong { error } => remarks.push(printer.paint(Style::Bad, &format!("wrong: {}", shortened(error)))),
        Outcome::Failed { error } => remarks.push(printer.paint(Style::Bad, &format!("failed: {}", shortened(error)))),
    }
    if let Some(why) = &row.invalid {
        remarks.push(printer.paint(Style::Warning, &format!("does not count: {why}")));
    }
    remarks.join("; ")
}

/// The first line of a text, and not more of it than fits.
fn shortened(text: &str) -> String {
    const MOST: usize = 100;
    let line = text.lines().next().unwrap_or_default();
    if line.chars().count() <= MOST && line.len() == text.len() {
        return line.to_owned();
    }
    format!("{}…", line.chars().take(MOST).collect::<String>())
}

/// How long ago a moment was.
fn age(measured_at: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64);
    let seconds = (now - measured_at) / 1000;
    match seconds {
        i64::MIN..60 => "just now".into(),
        60..3600 => format!("{} min ago", seconds / 60),
        3600..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}
