//! Rows in and out, against a map.

use std::collections::BTreeMap;
use std::time::Duration;

use lz_perfdb::{Filter, Key, Mode, Options, Outcome, PerfDb, Record, Timing};
use proptest::prelude::*;

use crate::support::{Place, all, any_key, any_record, by_key, few_keys, options, record, scaled};

#[derive(Clone, Debug)]
enum Step {
    Put(Vec<Record>),
    /// Marks the rows measured before a time.
    Invalidate(i64),
    Reopen,
    Read(Filter),
}

fn filter() -> impl Strategy<Value = Filter> {
    let key = (any::<[bool; 6]>(), few_keys());
    (key, any::<bool>(), prop::option::of(any::<bool>()), prop::option::of(0..6i64), prop::option::of(0..9usize))
        .prop_map(|(([kernel, operation, device, mode, call, threads], key), valid_only, baseline, since, limit)| {
            Filter {
                kernel_id: kernel.then_some(key.kernel_id),
                operation: operation.then_some(key.operation),
                device_id: device.then_some(key.device_id),
                mode: mode.then_some(key.mode),
                call: call.then_some(key.call),
                threads: threads.then_some(key.threads),
                contest: None,
                baseline,
                valid_only,
                since,
                limit,
            }
        })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => prop::collection::vec(any_record(few_keys()), 0..6).prop_map(Step::Put),
        1 => (0..7i64).prop_map(Step::Invalidate),
        1 => Just(Step::Reopen),
        3 => filter().prop_map(Step::Read),
    ]
}

/// What a filter means, said another way.
fn expected(model: &BTreeMap<Key, Record>, filter: &Filter) -> Vec<Record> {
    let mut wanted: Vec<Record> = model.values().cloned().collect();
    for (name, value) in [
        ("kernel", &filter.kernel_id),
        ("operation", &filter.operation),
        ("device", &filter.device_id),
        ("call", &filter.call),
        ("contest", &filter.contest),
    ] {
        let Some(value) = value else { continue };
        wanted.retain(|r| match name {
            "kernel" => r.key.kernel_id == *value,
            "operation" => r.key.operation == *value,
            "device" => r.key.device_id == *value,
            "call" => r.key.call == *value,
            _ => r.contest.as_deref() == Some(value),
        });
    }
    wanted.retain(|r| filter.mode != Some(Mode::Eager) || r.key.mode == Mode::Eager);
    wanted.retain(|r| filter.mode != Some(Mode::Graph) || r.key.mode == Mode::Graph);
    wanted.retain(|r| filter.threads.unwrap_or(r.key.threads) == r.key.threads);
    wanted.retain(|r| filter.baseline != Some(!r.baseline));
    wanted.retain(|r| !(filter.valid_only && r.invalid.is_some()));
    wanted.retain(|r| filter.since.unwrap_or(i64::MIN) <= r.measured_at);
    wanted.sort_by_key(|r| {
        let k = r.key.clone();
        (k.operation, k.device_id, k.call, k.mode, k.threads, k.kernel_id)
    });
    wanted.into_iter().take(filter.limit.unwrap_or(usize::MAX)).collect()
}

fn put_in(model: &mut BTreeMap<Key, Record>, records: &[Record]) {
    for record in records {
        let stays = model.get(&record.key).is_some_and(|old| old.measured_at > record.measured_at);
        if !stays {
            model.insert(record.key.clone(), record.clone());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: scaled(40, 4000) as u32, ..ProptestConfig::default() })]

    #[test]
    fn the_store_is_a_map_in_which_the_newer_stays(steps in prop::collection::vec(step(), 1..14), on_disk in prop::bool::weighted(0.8)) {
        let place = Place::new();
        let mut db = if on_disk { place.open() } else { PerfDb::in_memory() };
        let mut model = BTreeMap::new();
        for step in steps {
            match step {
                Step::Put(records) => {
                    put_in(&mut model, &records);
                    db.put(records).wait().unwrap();
                }
                Step::Invalidate(before) => {
                    let why = |r: &Record| (r.measured_at < before).then(|| format!("before {before}"));
                    let mut marked = 0;
                    for row in model.values_mut().filter(|r| r.invalid.is_none() && r.measured_at < before) {
                        row.invalid = Some(format!("before {before}"));
                        marked += 1;
                    }
                    prop_assert_eq!(db.invalidate(why).unwrap(), marked);
                }
                Step::Reopen if on_disk => {
                    drop(db);
                    db = place.open();
                }
                Step::Reopen => {}
                Step::Read(filter) => prop_assert_eq!(db.records(&filter).unwrap(), expected(&model, &filter)),
            }
        }
        prop_assert_eq!(by_key(all(&db)), model);
    }

    #[test]
    fn any_record_comes_back_to_the_last_bit(record in any_record(any_key())) {
        let place = Place::new();
        let db = place.open();
        db.put(vec![record.clone()]).wait().unwrap();
        prop_assert_eq!(&all(&db), std::slice::from_ref(&record));
        drop(db);
        prop_assert_eq!(&all(&place.open()), &[record]);
    }
}

#[test]
fn rows_put_from_many_threads_are_all_there() {
    let place = Place::new();
    let db = place.open();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let db = &db;
            scope.spawn(move || {
                let tickets: Vec<_> = (0..40).map(|i| db.put(vec![record(thread * 40 + i)])).collect();
                tickets.into_iter().for_each(|ticket| ticket.wait().unwrap());
            });
        }
        // Readers see whole batches of what there is, at any time.
        (0..20).for_each(|_| drop(all(&db)));
    });
    assert_eq!(by_key(all(&db)), by_key((0..320).map(record)));
    assert_eq!(db.stats().written, 320);
}

#[test]
fn a_dropped_ticket_and_a_dropped_store_lose_nothing() {
    let place = Place::new();
    let db = place.open();
    (0..50).for_each(|i| drop(db.put(vec![record(i)])));
    drop(db);
    assert_eq!(by_key(all(&place.open())), by_key((0..50).map(record)));
}

#[test]
fn a_put_never_overwrites_a_newer_row() {
    let place = Place::new();
    let db = place.open();
    let at = |measured_at: i64, median: f64| Record {
        measured_at,
        ..Record::new(record(1).key, Outcome::Ok(Timing::new(median, median, 0.0, 1)))
    };
    db.put(vec![at(100, 1.0)]).wait().unwrap();
    db.put(vec![at(99, 2.0)]).wait().unwrap();
    assert_eq!(all(&db), [at(100, 1.0)]);
    db.put(vec![at(100, 3.0)]).wait().unwrap();
    assert_eq!(all(&db), [at(100, 3.0)], "of equally old ones the last put stays");
    db.put(vec![at(101, 4.0), at(7, 5.0)]).wait().unwrap();
    assert_eq!(all(&db), [at(101, 4.0)]);
}

#[test]
fn what_is_older_than_the_time_to_live_does_not_count() {
    let place = Place::new();
    place.open().put(vec![Record { measured_at: 1_000, ..record(0) }, Record::new(record(1).key, record(1).outcome)]);
    let db = PerfDb::open(place.path(), Options { ttl: Some(Duration::from_secs(3600)), ..options() });
    assert_eq!(db.records(&Filter::all().valid()).unwrap().len(), 1);
    let old = &db.records(&Filter::all().kernel("library0.kernel")).unwrap()[0];
    assert_eq!(old.invalid.as_deref(), Some("measured longer ago than counts (3600 s)"));
    // It is a view: the file is as it was.
    drop(db);
    assert!(all(&place.open()).iter().all(Record::is_valid));
    // Nor is it exported as if it were marked.
    let db = PerfDb::open(place.path(), Options { ttl: Some(Duration::from_secs(3600)), ..options() });
    let mut text = Vec::new();
    db.export_jsonl(&mut text).unwrap();
    assert!(!String::from_utf8(text).unwrap().contains("longer ago"));
}
