//! Whatever is in a file, reading it ends: in layers or in an error, never in a panic.

use std::path::Path;

use lz_config::{Layers, Sources, Value};
use lz_select::SnapshotSpec;
use proptest::prelude::*;

/// Reads a file of these bytes, and everything that follows of it.
fn read(folder: &Path, bytes: &[u8]) {
    let path = folder.join("layerzero.yaml");
    std::fs::write(&path, bytes).unwrap();
    let layers = Layers::load(&Sources { project: Some(path), ..Sources::default() });
    match layers.and_then(|layers| layers.resolve()) {
        Ok(config) => {
            // What can be read can be used.
            let spec = SnapshotSpec { policy: config.policy().clone(), ..SnapshotSpec::default() };
            let built = spec.build(1).map(|_| ());
            assert!(built.is_ok(), "{}\n{built:?}", String::from_utf8_lossy(bytes));
            assert!(!config.entries().is_empty());
        }
        Err(error) => {
            assert!(!error.problems.is_empty());
            assert!(error.problems.len() <= 3 * 33);
            error.problems.iter().for_each(|problem| assert!(!problem.to_string().is_empty()));
        }
    }
}

const DOCUMENTS: &[&str] = &[
    include_str!("data/policy.yaml"),
    include_str!("data/reference.yaml"),
    include_str!("data/kernels.yaml"),
    include_str!("data/rules.yaml"),
    "rollouts:\n  - {name: a, operation: rms_norm, candidate: b, mode: canary, fraction: 1%, seed: 3, max_slowdown: 1.5}\n",
    "rules:\n  - name: x\n    match: {dtype: [float16, 'bf*'], sm: '>=80', causal: true}\n    when: [seq_len > 5, 'batch % 8 == 0']\n    \
     boost: [{kernel: a, points: 5}, {source: b, points: -3}]\n    filter: deterministic or priority > 3\n    lock: y\n",
];

/// Pieces that mean something to a reader of YAML or of our files.
const PIECES: &[&str] = &[
    "\n",
    " ",
    "  ",
    "- ",
    ": ",
    "{",
    "}",
    "[",
    "]",
    "'",
    "\"",
    "#",
    "&a",
    "*a",
    "!t",
    "|",
    ">",
    "?",
    "%",
    "---",
    "...",
    "~",
    "null",
    "true",
    "-1",
    "1e400",
    "99999999999999999999",
    "rules:",
    "match:",
    "attention.*",
    "sm",
    ">=",
    "and",
    "not (",
    "\t",
    "\u{0}",
    "é",
    "include: layerzero.yaml",
    "kernels:",
    "policies:",
    "operation:",
    "*",
    "points: 1",
    "<<: ",
];

/// A change of a text.
#[derive(Clone, Debug)]
enum Change {
    Insert(usize, &'static str),
    Remove(usize, usize),
    Byte(usize, u8),
    Swap(usize, usize),
    Repeat(usize, usize, usize),
}

fn change() -> impl Strategy<Value = Change> {
    let at = || any::<usize>();
    prop_oneof![
        (at(), prop::sample::select(PIECES)).prop_map(|(at, piece)| Change::Insert(at, piece)),
        (at(), 0usize..40).prop_map(|(at, n)| Change::Remove(at, n)),
        (at(), any::<u8>()).prop_map(|(at, byte)| Change::Byte(at, byte)),
        (at(), at()).prop_map(|(a, b)| Change::Swap(a, b)),
        (at(), 1usize..30, 1usize..200).prop_map(|(at, n, times)| Change::Repeat(at, n, times)),
    ]
}

impl Change {
    fn apply(&self, bytes: &mut Vec<u8>) {
        let len = bytes.len();
        if len == 0 {
            return;
        }
        match *self {
            Change::Insert(at, piece) => drop(bytes.splice(at % len..at % len, piece.bytes())),
            Change::Remove(at, n) => drop(bytes.drain(at % len..(at % len + n).min(len))),
            Change::Byte(at, byte) => bytes[at % len] = byte,
            Change::Swap(a, b) => bytes.swap(a % len, b % len),
            Change::Repeat(at, n, times) => {
                let from = at % len;
                let piece = bytes[from..(from + n).min(len)].repeat(times);
                drop(bytes.splice(from..from, piece));
            }
        }
    }
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        any::<f64>().prop_map(Value::Float),
        prop::sample::select(PIECES).prop_map(Value::from),
        ".{0,12}".prop_map(Value::Str),
    ];
    let key = prop::sample::select(vec![
        "match",
        "condition",
        "prefer",
        "deny",
        "boost",
        "kernel",
        "points",
        "operation",
        "name",
        "lock",
        "filter",
        "seq_len",
        "sm",
        "x",
    ]);
    leaf.prop_recursive(4, 24, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::List),
            prop::collection::vec((key.clone().prop_map(str::to_owned), inner), 0..5).prop_map(Value::Map),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        read(tempfile::tempdir().unwrap().path(), &bytes);
    }

    #[test]
    fn any_pieces(pieces in prop::collection::vec(prop::sample::select(PIECES), 0..60)) {
        read(tempfile::tempdir().unwrap().path(), pieces.concat().as_bytes());
    }

    #[test]
    fn documents_with_mistakes(document in prop::sample::select(DOCUMENTS), changes in prop::collection::vec(change(), 1..6)) {
        let mut bytes = document.as_bytes().to_vec();
        changes.iter().for_each(|change| change.apply(&mut bytes));
        read(tempfile::tempdir().unwrap().path(), &bytes);
    }

    #[test]
    fn any_values_from_code(key in prop::sample::select(vec!["rules", "locks", "rollouts", "breaker", "breaker.timeout_ms", "prefer_sources", "policy", "perfdb.path", "a.b.c", "", "."]), value in value()) {
        let mut layers = Layers::load(&Sources::default()).unwrap();
        let before = layers.clone();
        match layers.code().set(key, value) {
            Ok(()) => drop(layers.resolve()),
            Err(_) => prop_assert_eq!(layers, before),
        }
    }

    #[test]
    fn any_environment(entries in prop::collection::btree_map("LAYERZERO_[A-Z_]{0,12}|LAYERZERO_(POLICY|PREFER|LOCK_ATTENTION|CACHE_MAX_SIZE)", ".{0,10}", 0..6)) {
        let _ = Layers::load(&Sources { environment: entries, ..Sources::default() }).and_then(|layers| layers.resolve());
    }
}

/// `LZ_TEST_SCALE=full` runs a thousand times as many cases.
fn cases() -> u32 {
    match std::env::var("LZ_TEST_SCALE").as_deref() {
        Ok("full" | "soak") => 1_000_000,
        _ => 1_000,
    }
}
