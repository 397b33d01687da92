//! Every error can happen, and says what to do about it.

use std::time::Duration;

use lz_perfdb::{Key, Mode, Options, Outcome, PerfDb, Record, StoreError, Timing};

use crate::support::{Place, all, options, record};

#[test]
fn impossible_measurements_are_refused_with_all_that_came_with_them() {
    let place = Place::new();
    let db = place.open();
    let timed = |change: fn(&mut Timing)| {
        let mut timing = Timing { variance_us: Some(1.0), warmup_ms: Some(1.0), ..Timing::new(2.0, 3.0, 0.5, 9) };
        change(&mut timing);
        Record::new(record(1).key, Outcome::Ok(timing))
    };
    let changed = |change: fn(&mut Record)| {
        let mut row = record(1);
        change(&mut row);
        row
    };
    let cases = [
        (timed(|t| t.median_us = f64::NAN), "median_us is NaN; expected a number above 0"),
        (timed(|t| t.median_us = 0.0), "median_us is 0; expected a number above 0"),
        (timed(|t| t.median_us = -1.0), "median_us is -1; expected a number above 0"),
        (timed(|t| t.p95_us = f64::INFINITY), "p95_us is inf; expected a number above 0"),
        (timed(|t| t.p95_us = 1.9), "p95_us is 1.9, below median_us, which is 2"),
        (timed(|t| t.spread_us = -0.1), "spread_us is -0.1; expected 0 or a number above it"),
        (timed(|t| t.variance_us = Some(f64::NAN)), "variance_us is NaN; expected 0 or a number above it"),
        (timed(|t| t.warmup_ms = Some(-1.0)), "warmup_ms is -1; expected 0 or a number above it"),
        (timed(|t| t.samples = 0), "samples is 0; a time needs at least one"),
        (changed(|r| r.max_error = Some(f64::INFINITY)), "max_error is inf; expected 0 or a number above it"),
        (changed(|r| r.measured_at = -1), "measured_at is -1; it counts from 1970"),
        (
            changed(|r| r.key.operation.clear()),
            "operation is empty; a measurement is of a kernel, for an operation, on a device",
        ),
        (changed(|r| r.key.call = "x".repeat(70_000)), "call has 70000 bytes; at most 65536 are kept"),
        (changed(|r| r.contest = Some("x".repeat(70_000))), "contest has 70000 bytes; at most 65536 are kept"),
        (
            changed(|r| r.provenance.torch_version = Some("x".repeat(70_000))),
            "torch_version has 70000 bytes; at most 65536 are kept",
        ),
    ];
    for (row, says) in cases {
        let error = db.put(vec![record(2), row]).wait().unwrap_err();
        assert!(matches!(error, StoreError::Impossible(_)));
        assert_eq!(error.to_string(), format!("a measurement of 'library1.kernel' cannot be: {says}"));
    }
    assert_eq!(all(&db), []);
    db.put(vec![timed(|t| t.spread_us = 0.0)]).wait().unwrap();
}

#[test]
fn long_errors_are_cut_between_characters() {
    let place = Place::new();
    let db = place.open();
    let key = Key::new("k", "op", "d", Mode::Eager, "");
    db.put(vec![Record::new(key, Outcome::Failed { error: "漢".repeat(5000) })]).wait().unwrap();
    let Outcome::Failed { error } = &all(&db)[0].outcome else { panic!() };
    assert_eq!(*error, "漢".repeat(1333));
}

#[test]
fn a_queue_that_stays_full_is_said_and_nothing_is_dropped() {
    let place = Place::new();
    // The writer waits for a lock that is held here.
    let options = Options { queue_rows: 2, put_timeout: Duration::from_millis(10), ..options() };
    let db = PerfDb::open(place.path(), options);
    let other = rusqlite::Connection::open(place.path()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut tickets = Vec::new();
    let refused = (0..100).find_map(|i| {
        let ticket = db.put(vec![record(i)]);
        match ticket.wait_timeout(Duration::ZERO) {
            Some(Err(error)) => Some((i, error)),
            Some(Ok(())) => panic!("it was written under a lock"),
            None => {
                tickets.push(ticket);
                None
            }
        }
    });
    let (first_refused, error) = refused.expect("the queue is full at some time");
    assert!(matches!(error, StoreError::QueueFull { rows: 2, .. }), "{error}");
    assert_eq!(db.stats().refused, 1);
    other.execute_batch("COMMIT").unwrap();
    // A batch larger than the queue waits for its turn.
    let large: Vec<Record> = (200..210).map(record).collect();
    while matches!(db.put(large.clone()).wait(), Err(StoreError::QueueFull { .. })) {}
    tickets.into_iter().for_each(|ticket| ticket.wait().unwrap());
    assert_eq!(all(&db).len() as u64, first_refused + 10);
}
