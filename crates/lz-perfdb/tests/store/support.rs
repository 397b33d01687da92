//! Records, files and numbers for the tests.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use lz_perfdb::{
    Conditions, Filter, Key, MemoryPressure, Mode, Options, Outcome, Parts, PerfDb, PowerState, Provenance, Record,
    Shape, Temperature, Timing,
};
use proptest::prelude::*;
use tempfile::TempDir;

/// `LZ_TEST_SCALE=full` (or `soak`) runs the figures the store promises.
pub fn scaled(quick: usize, full: usize) -> usize {
    match std::env::var("LZ_TEST_SCALE").as_deref() {
        Ok("full" | "soak") => full,
        _ => quick,
    }
}

/// Options that wait for nothing they need not.
pub fn options() -> Options {
    Options { retry_after: Duration::ZERO, busy_timeout: Duration::from_secs(30), ..Options::default() }
}

/// A store in a new directory.
pub struct Place {
    pub folder: TempDir,
}

impl Place {
    pub fn new() -> Place {
        // In memory, where there is such a place: a process that is killed leaves the same files there, and a sync
        // takes no time.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        Place { folder: folder.unwrap() }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("perfdb.sqlite")
    }

    pub fn open(&self) -> PerfDb {
        PerfDb::open(self.path(), options())
    }

    /// What is in the directory, by name.
    pub fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned()).collect();
        names.sort();
        names
    }
}

/// Everything in a store.
pub fn all(db: &PerfDb) -> Vec<Record> {
    db.records(&Filter::all()).unwrap()
}

/// By key.
pub fn by_key(records: impl IntoIterator<Item = Record>) -> BTreeMap<Key, Record> {
    records.into_iter().map(|record| (record.key.clone(), record)).collect()
}

/// A record that is a function of its number, with its own key.
pub fn record(number: u64) -> Record {
    let call = format!(r#"{{"number":{number},"seq_q":{}}}"#, 1 << (number % 14));
    let kernel = format!("library{}.kernel", number % 7);
    let operation = ["attention.gqa.prefill", "norm.rms", "linear"][(number % 3) as usize];
    let mode = if number.is_multiple_of(5) { Mode::Graph } else { Mode::Eager };
    let key = Key::new(kernel, operation, format!("GPU-{}", number % 2), mode, call);
    let median = 10.0 + (number % 1000) as f64 / 7.0;
    let outcome = match number % 11 {
        9 => Outcome::Wrong { error: "differs by 0.5 at [3, 1]".into() },
        10 => Outcome::Failed { error: format!("CUDA error {number}") },
        _ => Outcome::Ok(Timing {
            variance_us: Some(median / 9.0),
            warmup_ms: Some(number as f64 / 3.0),
            parts: number.is_multiple_of(2).then_some(Parts { host_us: median / 3.0, device_us: median }),
            ..Timing::new(median, median * 1.25, median / 50.0, 5 + (number % 40) as u32)
        }),
    };
    Record {
        shape: Shape { sm_version: 90, dtype: "bfloat16".into(), head_dim: 128, seq_bucket: 1024, batch_bucket: 8 },
        max_error: Some(1e-3 / 3.0),
        baseline: number.is_multiple_of(4),
        provenance: Provenance {
            kernel_version: Some("2.8.3".into()),
            driver_version: Some(format!("580.{}", number % 3)),
            torch_version: Some("2.10.0".into()),
            ..Provenance::default()
        },
        conditions: Conditions { temperature: Some(Temperature::Warm), memory_pressure: None, power_state: None },
        measured_at: 1_700_000_000_000 + number as i64,
        contest: Some(format!("contest-{}", number / 4)),
        ..Record::new(key, outcome)
    }
}

/// Numbers that look random and are the same every time.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// Any text, odd ones too.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[a-z0-9_.]{1,12}",
        1 => any::<String>(),
        1 => prop::sample::select(vec!["\"", ",", "a\nb", "\r\n", " x ", "NULL", "null", "1.50", "é漢\u{0}", "'; --"])
            .prop_map(str::to_owned),
    ]
}

fn known() -> impl Strategy<Value = Option<String>> {
    prop::option::of(text()).prop_map(|text| text.filter(|text| !text.is_empty()))
}

/// Any time above zero: subnormal ones and very large ones too.
fn positive() -> impl Strategy<Value = f64> {
    any::<f64>().prop_map(|x| if x.is_finite() && x != 0.0 { x.abs() } else { 1.5 })
}

fn outcome() -> impl Strategy<Value = Outcome> {
    let maybe = || prop::option::of(positive());
    let parts =
        prop::option::of((positive(), positive()).prop_map(|(host_us, device_us)| Parts { host_us, device_us }));
    let timing = (positive(), positive(), positive(), maybe(), 1..u32::MAX, maybe(), parts).prop_map(
        |(a, b, spread_us, variance_us, samples, warmup_ms, parts)| Timing {
            variance_us,
            warmup_ms,
            parts,
            ..Timing::new(a.min(b), a.max(b), spread_us, samples)
        },
    );
    prop_oneof![
        4 => timing.prop_map(Outcome::Ok),
        1 => text().prop_map(|error| Outcome::Wrong { error }),
        1 => text().prop_map(|error| Outcome::Failed { error }),
    ]
}

/// Any key, of few, so that they meet.
pub fn few_keys() -> impl Strategy<Value = Key> {
    let key = (0..3u8, 0..2u8, 0..2u8, any::<bool>(), 0..2u8, prop::sample::select(vec![0, 1, 16]));
    key.prop_map(|(kernel, operation, device, graph, call, threads)| {
        let mode = if graph { Mode::Graph } else { Mode::Eager };
        Key::new(
            format!("k{kernel}"),
            format!("op{operation}"),
            format!("d{device}"),
            mode,
            format!("{{\"c\":{call}}}"),
        )
        .threads(threads)
    })
}

/// Any key at all.
pub fn any_key() -> impl Strategy<Value = Key> {
    let some = || text().prop_map(|text| if text.is_empty() { "x".into() } else { text });
    (some(), some(), some(), prop::sample::select(Mode::ALL), text(), any::<u32>()).prop_map(
        |(kernel, operation, device, mode, call, threads)| {
            Key::new(kernel, operation, device, mode, call).threads(threads)
        },
    )
}

/// Any record with such a key, measured at a time of few.
pub fn any_record(key: impl Strategy<Value = Key>) -> impl Strategy<Value = Record> {
    let shape = (any::<u32>(), text(), any::<u32>(), any::<u32>(), any::<u32>()).prop_map(
        |(sm_version, dtype, head_dim, seq_bucket, batch_bucket)| Shape {
            sm_version,
            dtype,
            head_dim,
            seq_bucket,
            batch_bucket,
        },
    );
    let provenance = prop::array::uniform8(known()).prop_map(|known| {
        let [kernel, backend, layerzero, capabilities, torch, cuda, driver, uuid] = known;
        Provenance {
            kernel_version: kernel,
            backend_version: backend,
            layerzero_version: layerzero,
            capabilities_hash: capabilities,
            torch_version: torch,
            cuda_version: cuda,
            driver_version: driver,
            device_uuid: uuid,
        }
    });
    let conditions = (
        prop::option::of(prop::sample::select(Temperature::ALL)),
        prop::option::of(prop::sample::select(MemoryPressure::ALL)),
        prop::option::of(prop::sample::select(PowerState::ALL)),
    )
        .prop_map(|(temperature, memory_pressure, power_state)| Conditions {
            temperature,
            memory_pressure,
            power_state,
        });
    let rest = (prop::option::of(positive()), any::<bool>(), 0..6i64, known(), known());
    (key, shape, outcome(), provenance, conditions, rest).prop_map(
        |(key, shape, outcome, provenance, conditions, (max_error, baseline, measured_at, contest, invalid))| Record {
            key,
            shape,
            outcome,
            max_error,
            baseline,
            provenance,
            conditions,
            measured_at,
            contest,
            invalid,
        },
    )
}
