//! The binary itself: exit codes, pipes that close, colours.

use std::process::{Command, Output, Stdio};

fn layerzero(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_layerzero"));
    command.args(line.split_whitespace()).env_remove("NO_COLOR").env_remove("XDG_CONFIG_HOME");
    // Whatever is configured on this machine, it is not for these.
    command.env("HOME", env!("CARGO_TARGET_TMPDIR"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("LAYERZERO_")) {
        command.env_remove(name);
    }
    command
}

fn output(line: &str) -> Output {
    layerzero(line).output().unwrap()
}

#[test]
fn every_exit_code_is_one_a_shell_sees() {
    let expected = [
        ("select --op rms_norm --shape input=4x8", 0),
        ("select --op rms_norm --shape input=4x8 --device h100", 1),
        ("select --op rms_nrom", 2),
        ("kernels --capabilities no-such-file.json", 3),
        ("doctor --device h100", 4),
    ];
    for (line, code) in expected {
        assert_eq!(output(line).status.code(), Some(code), "{line}");
    }
}

#[test]
fn a_reader_that_stops_early_is_no_failure() {
    for line in ["ops", "ops --json", "schema", "completions bash", "--help"] {
        let mut child = layerzero(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && err.is_empty(), "{line}: {err}");
    }
}

#[test]
fn an_error_nobody_reads_still_ends_as_one() {
    let mut child = layerzero("ops nonsense --json").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop((child.stdout.take(), child.stderr.take()));
    assert_eq!(child.wait().unwrap().code(), Some(2));
}

#[cfg(unix)]
#[test]
fn arguments_that_are_no_text_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    let garbage = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    let output = layerzero("ops").arg(garbage).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("error[USAGE]"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_said() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = layerzero("ops").stdout(full).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&output.stderr).contains("error[OUTPUT_FAILED]"));
}

#[test]
fn what_is_no_terminal_is_not_coloured_unless_asked() {
    let coloured = |output: &Output| output.stdout.contains(&0x1b);
    assert!(!coloured(&output("ops rms_norm")));
    assert!(coloured(&output("ops rms_norm --color always")));
    // An explicit wish is stronger than the variable.
    assert!(coloured(&layerzero("ops rms_norm --color always").env("NO_COLOR", "1").output().unwrap()));
}
