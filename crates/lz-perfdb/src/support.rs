//! Which of two measurements of the same thing stays.

use std::cmp::Ordering;

use crate::record::{Outcome, Record};
use crate::row::Row;

/// A row that is put replaces one that is not newer.
pub(crate) fn newer(old: &Record, new: &Record) -> bool {
    new.measured_at >= old.measured_at
}

/// A row that is merged replaces one that has less behind it.
pub(crate) fn better(old: &Record, new: &Record) -> bool {
    support(old, new) == Ordering::Less
}

/// Which has more behind it. A total order, so that files may be merged in any order:
///
/// 1. a row that counts, before one that does not;
/// 2. a kernel found wrong, before one that was timed, before one that raised: being wrong is not outvoted, raising may
///    have had any cause;
/// 3. more samples;
/// 4. the smaller noise, relative to the time;
/// 5. the newer one;
/// 6. anything that tells them apart, so that it does not matter which comes first.
pub(crate) fn support(a: &Record, b: &Record) -> Ordering {
    let verdict = |record: &Record| match record.outcome {
        Outcome::Wrong { .. } => 2,
        Outcome::Ok(_) => 1,
        Outcome::Failed { .. } => 0,
    };
    let samples = |record: &Record| record.outcome.timing().map_or(0, |timing| timing.samples);
    let noise = |record: &Record| record.outcome.timing().map_or(0.0, |timing| timing.relative_spread());
    let content = |record: &Record| {
        let row = Row::from(record.clone());
        (row.checksum(), format!("{row:?}"))
    };
    a.is_valid()
        .cmp(&b.is_valid())
        .then_with(|| verdict(a).cmp(&verdict(b)))
        .then_with(|| samples(a).cmp(&samples(b)))
        .then_with(|| noise(b).total_cmp(&noise(a)))
        .then_with(|| a.measured_at.cmp(&b.measured_at))
        .then_with(|| if a == b { Ordering::Equal } else { content(a).cmp(&content(b)) })
}
