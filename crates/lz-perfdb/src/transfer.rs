//! Rows as lines of text: JSON Lines, and CSV with the same columns.

use std::io::{BufRead, BufReader, Read, Write};

use serde::Deserialize;

use crate::error::StoreError;
use crate::record::Record;
use crate::row::{ADDED, COLUMNS, Row};
use crate::schema::{OLDEST_READABLE, SCHEMA_VERSION};
use crate::words::words;

words! {
    /// A format of exported files. Both have one row per line and say the version in each.
    Format {
        /// One JSON object per line; what is not known is `null`.
        Jsonl = "jsonl",
        /// Comma-separated values under a header, one type per column; what is not known is empty.
        Csv = "csv",
    }
}

/// The longest line that is read.
const MAX_LINE: u64 = 4 << 20;

/// Writes rows; gives how many.
pub fn write_records(mut writer: impl Write, format: Format, records: Vec<Record>) -> Result<usize, StoreError> {
    let count = records.len();
    let rows = records.into_iter().map(Row::from);
    match format {
        Format::Jsonl => {
            for row in rows {
                serde_json::to_writer(&mut writer, &row).map_err(|e| unwritable(e.into()))?;
                writer.write_all(b"\n").map_err(unwritable)?;
            }
        }
        Format::Csv => {
            let mut csv = csv::WriterBuilder::new().has_headers(false).from_writer(&mut writer);
            csv.write_record(header()).map_err(|e| unwritable(e.into()))?;
            for row in rows {
                csv.serialize(row).map_err(|e| unwritable(e.into()))?;
            }
            csv.flush().map_err(unwritable)?;
        }
    }
    writer.flush().map_err(unwritable)?;
    Ok(count)
}

fn unwritable(source: std::io::Error) -> StoreError {
    StoreError::Io { doing: "write the rows".into(), source }
}

fn header() -> impl Iterator<Item = &'static str> {
    ["schema_version"].into_iter().chain(COLUMNS.iter().copied())
}

/// Reads rows: all of them, or what is wrong with the first that is none.
pub fn read_records(reader: impl Read, format: Format) -> Result<Vec<Record>, StoreError> {
    match format {
        Format::Jsonl => read_jsonl(reader),
        Format::Csv => read_csv(reader),
    }
}

/// What of a line is looked at first: a line of another version may have anything else in it.
#[derive(Deserialize)]
struct Version {
    schema_version: Option<u64>,
}

fn read_jsonl(reader: impl Read) -> Result<Vec<Record>, StoreError> {
    let mut reader = BufReader::new(reader);
    let mut records = Vec::new();
    let mut bytes = Vec::new();
    for line in 1.. {
        bytes.clear();
        let read =
            (&mut reader).take(MAX_LINE).read_until(b'\n', &mut bytes).map_err(StoreError::io("read the rows"))?;
        if read == 0 {
            break;
        }
        let bad = |what: String| StoreError::BadLine { line, what };
        if read as u64 == MAX_LINE && !bytes.ends_with(b"\n") {
            return Err(bad(format!("is longer than {MAX_LINE} bytes")));
        }
        let text = std::str::from_utf8(&bytes).map_err(|_| bad("is not UTF-8".into()))?.trim();
        // Editors leave empty lines at the end.
        if text.is_empty() {
            continue;
        }
        if !text.starts_with('{') {
            return Err(bad("is no JSON object".into()));
        }
        let version: Version = serde_json::from_str(text).map_err(|error| bad(one_line(&error)))?;
        check_version(line, version.schema_version)?;
        records.push(serde_json::from_str(text).map_err(|error| bad(one_line(&error)))?);
    }
    Ok(records)
}

/// What serde_json says, without the number of the only line it knows.
fn one_line(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" at line 1 column ") {
        Some((what, column)) if error.line() == 1 => format!("{what} (column {column})"),
        _ => text,
    }
}

fn check_version(line: u64, found: Option<u64>) -> Result<(), StoreError> {
    match found {
        None => Err(StoreError::BadLine { line, what: "schema_version is missing".into() }),
        Some(found) if (u64::from(OLDEST_READABLE)..=u64::from(SCHEMA_VERSION)).contains(&found) => Ok(()),
        Some(found) => Err(StoreError::OtherSchema { line, found }),
    }
}

fn read_csv(reader: impl Read) -> Result<Vec<Record>, StoreError> {
    let mut csv = csv::Reader::from_reader(reader);
    let found = csv.headers().map_err(unreadable)?.clone();
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let bad = |line: u64, what: String| StoreError::BadLine { line, what };
    let Some(version) = found.iter().position(|name| name == "schema_version") else {
        return Err(bad(1, "the header has no schema_version".into()));
    };
    let header_problem = wrong_header(&found);
    let mut records = Vec::new();
    for row in csv.records() {
        let row = row.map_err(unreadable)?;
        let line = row.position().map_or(1, csv::Position::line);
        let text = row.get(version).unwrap_or_default();
        let number = text.parse().map_err(|_| bad(line, format!("schema_version is '{text}', which is no number")))?;
        check_version(line, Some(number))?;
        // A file of another version may have other columns, and its version is the better thing to say.
        if let Some(what) = &header_problem {
            return Err(bad(1, what.clone()));
        }
        let row: Row = row.deserialize(Some(&found)).map_err(|error| bad(line, wrong_value(&error, &found)))?;
        records.push(Record::try_from(row).map_err(|contradiction| bad(line, contradiction.to_string()))?);
    }
    header_problem.map_or(Ok(records), |what| Err(bad(1, what)))
}

fn wrong_header(found: &csv::StringRecord) -> Option<String> {
    let twice = |(at, name): (usize, &str)| {
        found.iter().take(at).any(|before| before == name).then(|| format!("the header has '{name}' twice"))
    };
    let unknown = |name: &str| {
        let nearest = lz_model::nearest(name, header()).map(str::to_owned);
        let hint = lz_model::did_you_mean(&nearest);
        (!header().any(|known| known == name)).then(|| format!("the header has an unknown column '{name}'{hint}"))
    };
    let missing = |name: &str| (!found.iter().any(|f| f == name)).then(|| format!("the header has no '{name}'"));
    found
        .iter()
        .enumerate()
        .find_map(twice)
        .or_else(|| found.iter().find_map(unknown))
        .or_else(|| header().take(1 + ADDED).find_map(missing))
}

fn wrong_value(error: &csv::Error, found: &csv::StringRecord) -> String {
    let csv::ErrorKind::Deserialize { err, .. } = error.kind() else { return error.to_string() };
    let column = err.field().and_then(|at| usize::try_from(at).ok()).and_then(|at| found.get(at));
    format!("{}{}", column.map(|name| format!("{name}: ")).unwrap_or_default(), err.kind())
}

fn unreadable(error: csv::Error) -> StoreError {
    let line = error.position().map_or(1, csv::Position::line);
    let what = match error.into_kind() {
        csv::ErrorKind::Io(source) => return StoreError::Io { doing: "read the rows".into(), source },
        csv::ErrorKind::Utf8 { .. } => "is not UTF-8".into(),
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            format!("has {len} values where the header has {expected_len}")
        }
        other => format!("{other:?}"),
    };
    StoreError::BadLine { line, what }
}
