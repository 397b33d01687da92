//! What can still be read of a damaged file.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::connect;
use crate::record::{Key, Record};
use crate::sql::{self, Fetched};

/// The rows of a damaged file that are as they were written, of each key the newest. Checksums tell them.
pub(crate) fn records(path: &Path) -> Vec<Record> {
    let mut found = BTreeMap::new();
    // A row takes more than this, so there cannot be more of them; a tree that leads in circles can say so forever.
    let most = fs::metadata(path).map_or(0, |metadata| metadata.len() / 64) + 1000;
    let Ok(connection) = connect::reading(path, Duration::ZERO) else { return Vec::new() };
    // A page that cannot be read ends the way through the table; what lies behind it is reached from the other end.
    for direction in ["ASC", "DESC"] {
        let suffix = format!("ORDER BY id {direction} LIMIT {most}");
        if sql::scan(&connection, &suffix, [], |fetched| keep(&mut found, fetched)).is_ok() {
            break;
        }
    }
    found.into_values().collect()
}

fn keep(found: &mut BTreeMap<Key, Record>, fetched: Fetched) {
    let Ok(record) = fetched.record() else { return };
    match found.get(&record.key) {
        Some(known) if known.measured_at >= record.measured_at => {}
        _ => drop(found.insert(record.key.clone(), record)),
    }
}
