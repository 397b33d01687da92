//! The text of lockfiles: what is written is read, and what is wrong is told with its line.

use std::fmt::Write;

use layerzero::{Locked, LockfileError, LockfileProblem as Problem};
use proptest::prelude::*;

use super::*;

/// A lockfile with a bit of everything.
fn sample() -> Lockfile {
    let locked = |call: CallSpec, graph: bool| Locked {
        device: "cuda_sm90_cu130".into(),
        call,
        graph,
        kernel: "flash_attn.v2.causal".into(),
        version: Some("2.5.6".into()),
        time_us: Some(12.34),
        baseline: Some("torch.sdpa".into()),
        baseline_us: Some(23.4),
        basis: Some("measured".into()),
    };
    let map = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let mut lockfile = Lockfile {
        layerzero: "0.1.0".into(),
        devices: map(&[("cuda_sm90_cu130", "NVIDIA H100 \"80GB\"")]),
        backends: map(&[("flash_attn", "2.5.6"), ("my lib", "1")]),
        capabilities: map(&[("flash_attn", "0123456789abcdef")]),
        libraries: map(&[("torch", "2.9.1+cu130")]),
        entries: [512, 64, 128].iter().map(|&s| locked(attention(1, s, s), false)).collect(),
    };
    lockfile.entries.push(locked(attention(1, 64, 64), true));
    lockfile.entries.push(Locked {
        version: None,
        time_us: None,
        baseline: None,
        baseline_us: None,
        basis: None,
        ..locked(rms(4).param("eps", 1e-5), false)
    });
    lockfile.sort();
    lockfile
}

#[test]
fn what_is_written_is_read() {
    let lockfile = sample();
    let text = lockfile.to_string();
    assert_eq!(Lockfile::parse(&text), Ok(lockfile.clone()), "{text}");
    assert_eq!(text.parse::<Lockfile>().unwrap().to_string(), text);
    assert!(text.ends_with('\n') && !text.ends_with("\n\n"));
}

#[test]
fn what_people_read() {
    let mut lockfile = sample();
    lockfile.entries.truncate(2);
    let call = r#"{"op":"attention","tensors":{"key":{"dtype":"float16","shape":[1,64,8,64]},"query":{"dtype":"float16","shape":[1,64,8,64]},"value":{"dtype":"float16","shape":[1,64,8,64]}},"layout":"BSHD"}"#;
    let expected = format!(
        r#"# Decisions of LayerZero, written by 'layerzero lock'. LAYERZERO_LOCKFILE=<this file> puts them in force,
# 'layerzero lock --check <this file>' says which of them cannot be kept here.
format = 1
layerzero = "0.1.0"

[devices]
cuda_sm90_cu130 = "NVIDIA H100 \"80GB\""

[backends]
flash_attn = "2.5.6"
"my lib" = "1"

[capabilities]
flash_attn = "0123456789abcdef"

[libraries]
torch = "2.9.1+cu130"

[[call]]
op = "attention"
device = "cuda_sm90_cu130"
call = '{call}'
kernel = "flash_attn.v2.causal"
version = "2.5.6"
time_us = 12.34
baseline = "torch.sdpa"
baseline_us = 23.4
basis = "measured"

[[call]]
op = "attention"
device = "cuda_sm90_cu130"
call = '{call}'
graph = true
kernel = "flash_attn.v2.causal"
version = "2.5.6"
time_us = 12.34
baseline = "torch.sdpa"
baseline_us = 23.4
basis = "measured"
"#
    );
    assert_eq!(lockfile.to_string(), expected);
}

#[test]
fn sizes_are_sorted_as_numbers() {
    let sizes: Vec<i64> = sample().entries[..4].iter().map(|e| e.call.tensors["query"].shape[1]).collect();
    assert_eq!(sizes, [64, 64, 128, 512]);
}

#[test]
fn one_decision_that_changes_changes_its_lines_alone() {
    let mut changed = sample();
    changed.entries[2].kernel = "flashinfer.single_prefill".into();
    changed.entries[2].version = Some("0.6".into());
    changed.entries[2].time_us = Some(11.0);
    let (before, after) = (sample().to_string(), changed.to_string());
    let different = before.lines().zip(after.lines()).filter(|(a, b)| a != b).count();
    assert_eq!((before.lines().count(), different), (after.lines().count(), 3));
}

#[test]
fn a_further_decision_adds_one_block() {
    let mut more = sample();
    let further = Locked { call: attention(1, 256, 256), ..more.entries[0].clone() };
    let block = format!("\n{further}");
    more.entries.push(further);
    more.sort();
    let (before, after) = (sample().to_string(), more.to_string());
    assert_eq!(after.replacen(&block, "", 1), before);
}

#[test]
fn comments_blanks_and_line_ends_of_others_are_taken() {
    let text = sample().to_string();
    let marked =
        text.replace("[devices]", "[devices]  # here").replace("format = 1\n", "format=1   # the first\n\n\t\n");
    assert_eq!(Lockfile::parse(&marked), Ok(sample()));
    assert_eq!(Lockfile::parse(&text.replace('\n', "\r\n")), Ok(sample()));
}

// --- what is wrong -----------------------------------------------------------------------------

/// A text with one thing replaced, and what is said about it.
#[track_caller]
fn refused(from: &str, to: &str) -> LockfileError {
    let mut lockfile = sample();
    lockfile.entries.truncate(1);
    let text = lockfile.to_string();
    assert!(text.contains(from), "'{from}' in {text}");
    Lockfile::parse(&text.replacen(from, to, 1)).unwrap_err()
}

#[test]
fn every_mistake_is_told_with_its_line_and_what_was_meant() {
    let cases = [
        ("kernel = ", "kernl = ", "line 23: unknown key 'kernl' in a block; did you mean 'kernel'?"),
        ("layerzero = ", "layerzro = ", "line 4: unknown key 'layerzro' at the top; did you mean 'layerzero'?"),
        ("[devices]", "[device]", "line 6: unknown section 'device'; did you mean 'devices'?"),
        ("[[call]]", "[[calls]]", "line 19: unknown section 'calls'; did you mean 'call'?"),
        ("[[call]]", "[call]", "line 19: unknown section 'call'; did you mean 'call'?"),
        ("[devices]", "[[devices]]", "line 6: unknown section 'devices'; did you mean 'devices'?"),
        ("[devices]", "[devices", "line 6: unknown section 'devices'; did you mean 'devices'?"),
        ("format = 1", "format = 2", "line 3: format 2 is not supported; this build reads format 1"),
        ("format = 1\n", "", "line 1: 'format' is missing"),
        ("format = 1", "format = \"1\"", "line 3: 'format' is a number of at least 0, found \"1\""),
        ("time_us = 12.34", "time_us = -1", "line 25: 'time_us' is a number of at least 0, found -1"),
        ("time_us = 12.34", "time_us = nan", "line 25: expected a section or 'key = value', found 'time_us = nan'"),
        ("time_us = 12.34", "time_us = 12.34 µs", "expected a section or 'key = value'"),
        ("time_us = 12.34", "time_us 12.34", "line 25: expected a section or 'key = value', found 'time_us 12.34'"),
        ("time_us = 12.34", "time_us = 1e999", "line 25: expected a section"),
        ("time_us = 12.34", "= 12.34", "line 25: expected a section"),
        ("kernel = \"flash_attn.v2.causal\"", "kernel = 7", "line 23: 'kernel' is a text in quotes, found 7"),
        ("kernel = \"flash_attn.v2.causal\"", "kernel = \"\"", "line 23: 'kernel' is a name, found \"\""),
        ("kernel = \"flash_attn.v2.causal\"\n", "", "line 19: 'kernel' is missing"),
        ("device = \"cuda_sm90_cu130\"\n", "", "line 19: 'device' is missing"),
        ("kernel = ", "graph = 1\nkernel = ", "line 23: 'graph' is true or false, found 1"),
        ("version = \"2.5.6\"", "kernel = \"x\"", "line 24: 'kernel' is stated twice, first on line 23"),
        ("flash_attn = \"2.5.6\"", "flash_attn = 2.5", "line 10: 'flash_attn' is a text in quotes, found 2.5"),
        ("basis = \"measured\"", "basis = \"mesured\"", "did you mean 'measured'?"),
        ("op = \"attention\"", "op = \"rms_norm\"", "line 20: 'op' is rms_norm, but the call is one of attention"),
        ("op = \"attention\"", "op = \"rms\\nnorm\"", "line 20: 'op' is rms\\nnorm, but the call is one of attention"),
        ("\"shape\":[1,64,8,64]", "\"shape\":[1,64,8,-64]", "line 22: the call cannot be made: "),
        ("\"shape\":[1,64,8,64]", "\"shape\":[1,9223372036854775807,8,64]", "line 22: the call cannot be made: "),
        ("\"dtype\":\"float16\"", "\"dtype\":\"float17\"", "line 22: the call cannot be made: "),
        ("\"layout\":\"BSHD\"", "\"layot\":\"BSHD\"", "line 22: the call cannot be made: unknown field `layot`"),
        ("\"key\":", "\"kye\":", "takes no tensor 'kye'"),
        ("call = '{", "call = '", "line 22: the call cannot be made: "),
    ];
    for (from, to, expected) in cases {
        let error = refused(from, to);
        assert!(error.to_string().contains(expected), "{from} -> {to}:\n{error}\n{expected}");
    }
}

#[test]
fn an_unknown_operation_is_named_with_the_nearest() {
    let error = refused("op = \"attention\"", "op = \"atention\"");
    assert!(matches!(error.problem, Problem::OtherOp { .. }), "{error}");
    let text = sample().to_string().replace("\"attention\"", "\"atention\"");
    let error = Lockfile::parse(&text).unwrap_err().to_string();
    assert!(error.contains("unknown operation 'atention'; did you mean 'attention'?"), "{error}");
}

#[test]
fn a_call_decided_twice_is_told_in_whatever_words() {
    let mut lockfile = sample();
    lockfile.entries.truncate(1);
    let mut again = lockfile.entries[0].clone();
    let twice = |again: &Locked| Lockfile::parse(&format!("{lockfile}\n{again}"));
    let first = Problem::DuplicateEntry { first: 19 };
    assert_eq!(twice(&again).unwrap_err(), LockfileError { line: 30, problem: first.clone() });
    // What is at its default may be said; an alias is the operation it stands for; tensors have several names.
    again.call = again.call.param("causal", true);
    assert_eq!(twice(&again).unwrap_err().problem, first);
    again.call.op = "attention.causal".into();
    assert_eq!(twice(&again).unwrap_err().problem, first);
    let query = again.call.tensors.remove("query").unwrap();
    again.call.tensors.insert("q".into(), query);
    assert_eq!(twice(&again).unwrap_err().problem, first);
    // Another mask, another device, another mode: another decision.
    let full = Locked { call: attention(1, 64, 64).param("causal", false), ..again.clone() };
    assert_eq!(twice(&full).map(|l| l.entries.len()), Ok(2));
    assert_eq!(twice(&Locked { device: "cpu".into(), ..again.clone() }).map(|l| l.entries.len()), Ok(2));
    assert_eq!(twice(&Locked { graph: true, ..again.clone() }).map(|l| l.entries.len()), Ok(2));
    // What an alias fixes is part of the call.
    again.call.op = "attention.full".into();
    again.call.params.clear();
    assert_eq!(twice(&again).map(|l| l.entries.len()), Ok(2));
}

#[test]
fn a_text_that_is_too_large_is_refused_at_once() {
    let text = "#".repeat(Lockfile::MAX_BYTES + 1);
    let error = Lockfile::parse(&text).unwrap_err();
    assert_eq!(error.problem, Problem::TooLarge { bytes: Lockfile::MAX_BYTES + 1, limit: Lockfile::MAX_BYTES });
    // Just as large is an answer, and soon.
    let mut text = sample().to_string();
    while text.len() < Lockfile::MAX_BYTES - 100 {
        let _ = writeln!(text, "[[call]]");
    }
    assert!(matches!(Lockfile::parse(&text).unwrap_err().problem, Problem::MissingKey { .. }));
}

/// Edits as bad luck and bad will make them.
#[derive(Clone, Debug)]
pub enum Edit {
    Cut(usize, usize),
    Insert(usize, String),
    Repeat(usize),
    Drop(usize),
}

fn edit() -> impl Strategy<Value = Edit> {
    let pieces = [
        "\"",
        "'",
        "[",
        "]",
        "[[call]]",
        "\n",
        "=",
        "\\",
        "#",
        "{",
        "}",
        "\0",
        "é",
        "\u{2028}",
        "9",
        "-",
        "e999",
        "null",
        "9223372036854775807",
        "-9223372036854775808",
        "format = 1\n",
        "kernel = \"x\"\n",
        ",",
        ":",
        "true",
        "0",
    ];
    prop_oneof![
        (any::<usize>(), 0usize..200).prop_map(|(at, n)| Edit::Cut(at, n)),
        (any::<usize>(), prop::sample::select(pieces.to_vec())).prop_map(|(at, s)| Edit::Insert(at, s.to_owned())),
        (any::<usize>(), "\\PC{0,8}").prop_map(|(at, s)| Edit::Insert(at, s)),
        any::<usize>().prop_map(Edit::Repeat),
        any::<usize>().prop_map(Edit::Drop),
    ]
}

/// The text with edits made to it.
pub fn edited(text: &str, edits: &[Edit]) -> String {
    let mut chars: Vec<char> = text.chars().collect();
    for edit in edits {
        let place = |at: usize| at % (chars.len() + 1);
        match edit {
            Edit::Cut(at, n) => {
                let at = place(*at);
                chars.drain(at..(at + n).min(chars.len()));
            }
            Edit::Insert(at, piece) => {
                let at = place(*at);
                chars.splice(at..at, piece.chars());
            }
            Edit::Repeat(at) | Edit::Drop(at) => {
                let text: String = chars.iter().collect();
                let mut lines: Vec<&str> = text.lines().collect();
                if !lines.is_empty() {
                    let at = at % lines.len();
                    match edit {
                        Edit::Repeat(_) => lines.insert(at, lines[at]),
                        _ => drop(lines.remove(at)),
                    }
                }
                chars = lines.join("\n").chars().collect();
            }
        }
    }
    chars.into_iter().collect()
}

/// Edits of texts, for other documents too.
pub fn edits() -> impl Strategy<Value = Vec<Edit>> {
    prop::collection::vec(edit(), 1..6)
}

/// Whatever is read is written in a way that is read again as the same; an error names a line there is.
fn holds(text: &str) -> Result<(), TestCaseError> {
    match Lockfile::parse(text) {
        Ok(lockfile) => {
            let again = lockfile.to_string();
            prop_assert_eq!(Lockfile::parse(&again), Ok(lockfile), "{}", again);
        }
        Err(error) => {
            prop_assert!(error.line >= 1 && error.line <= text.lines().count().max(1), "{} in {:?}", error, text);
            prop_assert!(!error.to_string().contains('\n'), "{}", error);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(400)))]

    #[test]
    fn any_bytes_are_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        holds(&String::from_utf8_lossy(&bytes))?;
    }

    #[test]
    fn any_lines_are_an_answer(lines in prop::collection::vec("(format = 1|[a-z]{1,9} ?= ?(\"[^\"]{0,9}\"|'.{0,9}'|[0-9.e]{1,6}|true)|\\[\\[call\\]\\]|\\[[a-z]{1,9}\\]|.{0,20})", 0..12)) {
        holds(&lines.join("\n"))?;
    }

    #[test]
    fn a_good_text_with_mistakes_is_an_answer(edits in edits()) {
        holds(&edited(&sample().to_string(), &edits))?;
    }

    #[test]
    fn any_names_are_written_so_that_they_are_read(names in prop::collection::vec("(?s).{1,12}", 5), us in 0.0..1e9f64) {
        let mut lockfile = sample();
        lockfile.layerzero = names[0].clone();
        lockfile.devices.insert(names[1].clone(), names[0].clone());
        lockfile.entries[0].kernel = names[2].clone();
        lockfile.entries[0].version = Some(names[3].clone());
        lockfile.entries[0].time_us = Some(us);
        lockfile.entries[4].call = lockfile.entries[4].call.clone();
        lockfile.entries[4].device = names[4].clone();
        let text = lockfile.to_string();
        prop_assert_eq!(Lockfile::parse(&text), Ok(lockfile), "{}", text);
    }
}
