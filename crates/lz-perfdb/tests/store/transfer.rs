//! Exported files: what goes out comes in again, and nothing else does.

use lz_perfdb::{Filter, Format, MergeReport, PerfDb, Record, SCHEMA_VERSION, StoreError, read_records};
use proptest::prelude::*;

use crate::support::{Place, all, any_key, any_record, by_key, record, scaled};

fn exported(db: &PerfDb, format: Format) -> String {
    let mut bytes = Vec::new();
    db.export(&mut bytes, format, &Filter::all()).unwrap();
    String::from_utf8(bytes).unwrap()
}

fn holding(rows: Vec<Record>) -> PerfDb {
    let db = PerfDb::in_memory();
    db.put(rows).wait().unwrap();
    db
}

proptest! {
    #![proptest_config(ProptestConfig { cases: scaled(60, 4000) as u32, ..ProptestConfig::default() })]

    #[test]
    fn out_and_in_and_out_again_is_the_same(rows in prop::collection::vec(any_record(any_key()), 0..5)) {
        let db = holding(rows);
        for format in Format::ALL {
            let text = exported(&db, *format);
            let again = PerfDb::in_memory();
            again.import(text.as_bytes(), *format).unwrap();
            prop_assert_eq!(all(&again), all(&db), "{}", text);
            prop_assert_eq!(exported(&again, *format), text);
        }
    }

    #[test]
    fn a_file_that_was_changed_is_refused_or_read_never_a_panic(
        rows in prop::collection::vec(any_record(any_key()), 1..4),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in any::<bool>(),
    ) {
        for format in Format::ALL {
            let mut bytes = exported(&holding(rows.clone()), *format).into_bytes();
            let at = at.index(bytes.len());
            if cut { bytes.truncate(at) } else { bytes[at] = byte }
            if let Ok(records) = read_records(bytes.as_slice(), *format) {
                prop_assert!(records.iter().all(|r| r.check().is_ok()));
            }
        }
    }

    #[test]
    fn any_text_is_refused_or_read(text in any::<String>(), bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        for format in Format::ALL {
            let _ = read_records(text.as_bytes(), *format);
            let _ = read_records(bytes.as_slice(), *format);
        }
    }
}

#[test]
fn the_columns_are_stable() {
    let header = "schema_version,kernel_id,operation,device_id,mode,call,sm_version,dtype,head_dim,seq_bucket,batch_bucket,\
                  outcome,error,median_us,p95_us,spread_us,variance_us,samples,warmup_ms,max_error,baseline,kernel_version,\
                  backend_version,layerzero_version,capabilities_hash,torch_version,cuda_version,driver_version,device_uuid,\
                  temperature,memory_pressure,power_state,measured_at,contest,valid,invalid_why,\
                  host_us,device_us,threads";
    let text = exported(&holding(vec![record(1)]), Format::Csv);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], header);
    let row = r#"4,library1.kernel,norm.rms,GPU-1,eager,"{""number"":1,""seq_q"":2}",90,bfloat16,128,1024,8,ok,,10.142857142857142,12.678571428571427,0.20285714285714285,1.126984126984127,6,0.3333333333333333,0.0003333333333333333,false,2.8.3,,,,2.10.0,,580.1,,warm,,,1700000000001,contest-0,true,,,,"#;
    assert_eq!(lines[1], row);
    assert_eq!(exported(&PerfDb::in_memory(), Format::Csv), format!("{header}\n"));
    let line = exported(&holding(vec![record(9)]), Format::Jsonl);
    let json: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&line).unwrap();
    let mut names: Vec<&str> = json.keys().map(String::as_str).collect();
    let mut expected: Vec<&str> = header.split(',').collect();
    names.sort_unstable();
    expected.sort_unstable();
    assert_eq!(names, expected);
    assert_eq!(
        (&json["outcome"], &json["median_us"], &json["schema_version"]),
        (&"wrong".into(), &().into(), &4.into())
    );
}

#[test]
fn importing_is_putting() {
    let place = Place::new();
    let db = place.open();
    let older = Record { measured_at: 5, ..record(1) };
    let newer = Record { measured_at: i64::MAX, ..record(2) };
    db.put(vec![older, newer.clone()]).wait().unwrap();
    let text = exported(&holding(vec![record(1), record(2), record(3)]), Format::Jsonl);
    let report = db.import_jsonl(text.as_bytes()).unwrap();
    assert_eq!(report, MergeReport { added: 1, replaced: 1, kept: 1, skipped: 0 });
    assert_eq!(by_key(all(&db)), by_key([record(1), newer, record(3)]));
    // Files may be put one behind the other.
    let twice = format!("{text}{text}\n");
    assert_eq!(db.import_jsonl(twice.as_bytes()).unwrap().added, 0);
}

#[test]
fn a_filter_applies_to_what_is_exported() {
    let db = holding((0..20).map(record).collect());
    let mut bytes = Vec::new();
    let written = db.export(&mut bytes, Format::Jsonl, &Filter::all().operation("linear")).unwrap();
    let rows = read_records(bytes.as_slice(), Format::Jsonl).unwrap();
    assert!(written == rows.len() && written > 0 && rows.iter().all(|r| r.key.operation == "linear"));
}

#[test]
fn mistakes_are_named_with_their_line_and_nothing_is_taken() {
    let place = Place::new();
    let db = place.open();
    db.put(vec![record(9)]).wait().unwrap();
    let jsonl = exported(&holding(vec![record(0), record(1)]), Format::Jsonl);
    let csv = exported(&holding(vec![record(0), record(1)]), Format::Csv);
    let last = |text: &str, from: &str, to: &str| {
        let at = text.rfind(from).unwrap_or_else(|| panic!("{from} in {text}"));
        [&text[..at], to, &text[at + from.len()..]].concat()
    };
    let cases = [
        (
            Format::Jsonl,
            last(&jsonl, "\"eager\"", "\"lazy\""),
            "line 2: unknown variant `lazy`, expected `eager` or `graph` (column 106)",
        ),
        (
            Format::Jsonl,
            last(&jsonl, "\"samples\":6", "\"samples\":0"),
            "line 2: samples is 0; a time needs at least one",
        ),
        (
            Format::Jsonl,
            last(&jsonl, "\"samples\":6", "\"sampels\":6"),
            "line 2: unknown field `sampels`, expected one of",
        ),
        (Format::Jsonl, last(&jsonl, "\"samples\":6,", ""), "line 2: missing field `samples`"),
        (
            Format::Jsonl,
            last(&jsonl, "\"samples\":6", "\"samples\":-6"),
            "line 2: invalid value: integer `-6`, expected u32",
        ),
        (Format::Jsonl, last(&jsonl, "}\n", "\n"), "line 2: EOF while parsing"),
        (Format::Jsonl, last(&jsonl, "\"schema_version\":4,", ""), "line 2: schema_version is missing"),
        (
            Format::Jsonl,
            last(&jsonl, "\"schema_version\":4", "\"schema_version\":9"),
            "line 2: schema_version is 9, this version reads 2 to 4",
        ),
        (Format::Jsonl, "[]\n".into(), "line 1: is no JSON object"),
        (Format::Jsonl, format!("\n\n{jsonl}x"), "line 5: is no JSON object"),
        (
            Format::Jsonl,
            last(&jsonl, "\"error\":null", "\"error\":\"but\""),
            "line 2: outcome is ok, yet error is 'but'",
        ),
        (
            Format::Jsonl,
            last(&jsonl, "\"valid\":true", "\"valid\":false,\"valid\":true"),
            "line 2: duplicate field `valid`",
        ),
        (Format::Csv, last(&csv, ",eager,", ",lazy,"), "line 3: unknown variant `lazy`, expected `eager` or `graph`"),
        (Format::Csv, last(&csv, ",6,", ",six,"), "line 3: samples: invalid digit found in string"),
        (Format::Csv, last(&csv, ",6,", ",6,7,"), "line 3: has 40 values where the header has 39"),
        (
            Format::Csv,
            last(&csv, ",10.142857142857142,", ",NaN,"),
            "line 3: median_us is NaN; expected a number above 0",
        ),
        (Format::Csv, last(&csv, "\n4,", "\n5,"), "line 3: schema_version is 5, this version reads 2 to 4"),
        (Format::Csv, last(&csv, "\n4,", "\ntwo,"), "line 3: schema_version is 'two', which is no number"),
        (
            Format::Csv,
            last(&csv, ",samples,", ",sampels,"),
            "line 1: the header has an unknown column 'sampels'; did you mean 'samples'?",
        ),
        (Format::Csv, last(&csv, ",samples,", ",p95_us,"), "line 1: the header has 'p95_us' twice"),
        (Format::Csv, "schema_version,kernel_id\n".into(), "line 1: the header has no 'operation'"),
        (
            Format::Csv,
            "schema_version,of_the_future\n9,x\n".into(),
            "line 2: schema_version is 9, this version reads 2 to 4",
        ),
        (Format::Csv, "kernel_id\nx\n".into(), "line 1: the header has no schema_version"),
    ];
    for (format, text, says) in cases {
        let error = db.import(text.as_bytes(), format).unwrap_err();
        assert!(error.to_string().starts_with(says), "{error}\n{says}");
        assert_eq!(all(&db), [record(9)], "{says}: all or nothing");
    }
    assert_eq!(SCHEMA_VERSION, 4);
    let error = db.import(&b"\xff\xfe\n"[..], Format::Jsonl).unwrap_err();
    assert_eq!(error.to_string(), "line 1: is not UTF-8");
    let error = db.import(&b"schema_version\n\xff\n"[..], Format::Csv).unwrap_err();
    assert_eq!(error.to_string(), "line 2: is not UTF-8");
    let endless = vec![b' '; 5 << 20];
    assert!(matches!(db.import(endless.as_slice(), Format::Jsonl), Err(StoreError::BadLine { line: 1, .. })));
}

/// The columns that were added are at the end, and what they hold may not be known.
#[test]
fn files_of_the_version_before_are_read() {
    let rows: Vec<Record> =
        (0..30).map(record).filter(|r| r.outcome.timing().is_none_or(|t| t.parts.is_none())).collect();
    let db = holding(rows);
    let csv: Vec<String> = exported(&db, Format::Csv)
        .lines()
        .map(|line| match line.strip_suffix(",,,").and_then(|line| line.strip_prefix('4')) {
            Some(row) => format!("2{row}"),
            None => line.strip_suffix(",host_us,device_us,threads").unwrap().to_owned(),
        })
        .collect();
    let jsonl = exported(&db, Format::Jsonl)
        .replace("\"schema_version\":4", "\"schema_version\":2")
        .replace(",\"host_us\":null,\"device_us\":null,\"threads\":null", "");
    for (format, text) in [(Format::Csv, csv.join("\n")), (Format::Jsonl, jsonl)] {
        assert!(!text.contains("host_us"), "{text}");
        let again = PerfDb::in_memory();
        again.import(text.as_bytes(), format).unwrap();
        assert_eq!(all(&again), all(&db));
    }
}

#[test]
fn readers_and_writers_that_fail_are_said() {
    struct Broken;
    impl std::io::Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("unplugged"))
        }
    }
    impl std::io::Write for Broken {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("unplugged"))
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let db = holding(vec![record(1)]);
    for format in Format::ALL {
        let error = db.import(Broken, *format).unwrap_err().to_string();
        assert_eq!(error, "cannot read the rows: unplugged");
        let error = db.export(Broken, *format, &Filter::all()).unwrap_err().to_string();
        assert_eq!(error, "cannot write the rows: unplugged");
    }
}
