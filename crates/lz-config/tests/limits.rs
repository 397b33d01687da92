//! Hostile files end in an error, at once and in little memory.

use std::path::{Path, PathBuf};

use lz_config::{ConfigError, Layers, ProblemKind, Sources};
use tempfile::TempDir;

/// What reading a file comes to. A read that waits, or whose work grows with the square of the file, is ended by nextest
/// (`.config/nextest.toml`).
fn load(path: &Path) -> Result<Layers, ConfigError> {
    let sources = Sources { project: Some(path.to_owned()), ..Sources::default() };
    let read = Layers::load(&sources);
    if let Ok(layers) = &read {
        layers.resolve().unwrap();
    }
    read
}

fn write(folder: &TempDir, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// The only thing wrong with a file of these bytes.
fn problem(bytes: impl AsRef<[u8]>) -> ProblemKind {
    let folder = tempfile::tempdir().unwrap();
    let error = load(&write(&folder, "layerzero.yaml", bytes)).unwrap_err();
    assert_eq!(error.problems.len(), 1, "{error}");
    error.problems[0].kind.clone()
}

fn kind_of(path: &Path) -> ProblemKind {
    load(path).unwrap_err().problems[0].kind.clone()
}

#[test]
fn only_regular_files_are_read() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(kind_of(folder.path()), ProblemKind::NotAFile { what: "a directory" });
    assert_eq!(kind_of(Path::new("/dev/zero")), ProblemKind::NotAFile { what: "a device" });
    assert_eq!(kind_of(Path::new("/dev/null")), ProblemKind::NotAFile { what: "a device" });
    let pipe = folder.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    assert_eq!(kind_of(&pipe), ProblemKind::NotAFile { what: "a pipe" });
    let socket = folder.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert_eq!(kind_of(&socket), ProblemKind::NotAFile { what: "a socket" });
    let link = folder.path().join("link");
    std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
    assert_eq!(kind_of(&link), ProblemKind::NotAFile { what: "a device" });
    assert!(matches!(kind_of(&folder.path().join("nothing")), ProblemKind::Unreadable { .. }));
    let circle = folder.path().join("circle");
    std::os::unix::fs::symlink(&circle, &circle).unwrap();
    assert!(matches!(kind_of(&circle), ProblemKind::Unreadable { .. }));
}

#[test]
fn a_gigabyte_is_refused_unread() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layerzero.yaml");
    std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
    assert_eq!(kind_of(&path), ProblemKind::TooLarge { limit: 1 << 20 });
    assert_eq!(problem(vec![b' '; (1 << 20) + 1]), ProblemKind::TooLarge { limit: 1 << 20 });
    assert!(load(&write(&folder, "spaces.yaml", vec![b' '; 1 << 20])).is_ok());
}

#[test]
fn a_file_that_claims_to_be_empty_is_read_within_the_limit() {
    // Files of /proc have length 0 whatever is in them; this one is small, and no map of settings.
    assert!(load(Path::new("/proc/self/status")).is_err());
}

#[test]
fn text_must_be_utf_8() {
    assert_eq!(problem(b"enabled: \xff\xfe"), ProblemKind::NotUtf8 { offset: 9 });
    assert!(matches!(
        problem("enabled: true".encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>()),
        ProblemKind::WrongValue { .. } | ProblemKind::Syntax { .. } | ProblemKind::UnknownKey { .. }
    ));
}

#[test]
fn bombs_do_not_go_off() {
    let laughs = (0..9).fold("a0: &a0 [lol]\n".to_owned(), |text, i| {
        let list = vec![format!("*a{i}"); 9].join(", ");
        format!("{text}a{next}: &a{next} [{list}]\n", next = i + 1)
    });
    assert_eq!(problem(laughs), ProblemKind::Alias);
    assert_eq!(problem("enabled: *nobody"), ProblemKind::Alias);
    assert_eq!(problem("<<: *nobody"), ProblemKind::Alias);
    let deep = [
        "[".repeat(100_000),
        "{a: ".repeat(100_000),
        "- ".repeat(100_000),
        (0..33).map(|i| format!("{}a:\n", "  ".repeat(i))).collect(),
    ];
    for text in deep {
        assert_eq!(problem(&text), ProblemKind::TooDeep { limit: 32 }, "{}", &text[..8]);
    }
}

#[test]
fn thirty_two_levels_are_not_too_deep() {
    let folder = tempfile::tempdir().unwrap();
    let nested = |depth: usize| format!("rules: {}{}", "[".repeat(depth - 1), "]".repeat(depth - 1));
    let kinds = |depth| {
        let error = load(&write(&folder, "layerzero.yaml", nested(depth))).unwrap_err();
        error.problems.into_iter().map(|p| p.kind).collect::<Vec<_>>()
    };
    assert!(kinds(32).iter().all(|kind| !matches!(kind, ProblemKind::TooDeep { .. })));
    assert_eq!(kinds(33), [ProblemKind::TooDeep { limit: 32 }]);
}

#[test]
fn huge_numbers_are_no_numbers() {
    for text in
        ["9223372036854775808", "-9223372036854775809", "0xffffffffffffffffff", "1000000000000000000000000000000"]
    {
        let kind = problem(format!("memory_headroom_mb: {text}"));
        assert!(matches!(kind, ProblemKind::WrongValue { .. }), "{text}: {kind:?}");
    }
    let digits = "9".repeat(1_000_000);
    let ProblemKind::WrongValue { found, .. } = problem(format!("memory_headroom_mb: {digits}")) else { panic!() };
    assert!(found.len() < 100);
    assert!(matches!(
        problem("rollouts: [{name: a, operation: rms_norm, candidate: b, mode: canary, fraction: 1e999}]"),
        ProblemKind::WrongValue { .. }
    ));
}

#[test]
fn a_megabyte_of_mistakes_or_rules_is_one_error() {
    let fill = |line: &dyn Fn(usize) -> String| {
        let mut text = String::new();
        for i in 0.. {
            let line = line(i);
            if text.len() + line.len() >= 1 << 20 {
                return text;
            }
            text.push_str(&line);
        }
        text
    };
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, text: String| {
        let error = load(&write(&folder, name, text)).unwrap_err();
        assert!(error.problems.len() <= 32, "{name}: {} problems", error.problems.len());
    };
    refused("keys", fill(&|i| format!("k{i}: 1\n")));
    refused("twice", fill(&|_| "enabled: true\n".into()));
    refused("rules", format!("rules:\n{}", fill(&|_| "- {deny: x}\n".into())));
    refused(
        "long rules",
        format!("rules:\n{}", fill(&|_| format!("- {{deny: x, when: '{}sm > 1'}}\n", "sm > 1 and ".repeat(300))))
            + "bad",
    );
    refused(
        "bad rules",
        format!("rules:\n{}", fill(&|_| format!("- {{deny: x, when: '{}sn > 1'}}\n", "sm > 1 and ".repeat(300)))),
    );
    refused("match", format!("rules: [{{deny: x, match: {{dtype: [{}]}}}}]", "float16, ".repeat(100_000)));
    refused("locks", format!("locks:\n{}", fill(&|i| format!("  op{i}: x\n"))));
    refused("operations", format!("rules: [{{deny: x, operation: [{}]}}]", "attention, ".repeat(90_000)));
    refused("actions", format!("rules: [{{deny: [{}]}}]", "x, ".repeat(300_000)));
    refused("fields", format!("rules: [{{deny: x, match: {{{}}}}}]", fill(&|i| format!("f{i}: 1, "))));
    refused("includes", format!("include: [{}]", "a, ".repeat(300_000)));
    refused("rollouts", format!("rollouts: [{}]", "{}, ".repeat(200_000)));
    let kernels = "{name: x, priority: 1}, ".repeat(43_000);
    refused("kernels", format!("kernels: {{a: {{operation: attention, implementations: [{kernels}]}}}}"));
    let policies = fill(&|i| format!(" p{i}: {{deny_rules: [{{kernel: x}}]}}\n"));
    refused("policies", format!("policies:\n{policies}"));
}

#[test]
fn includes_go_neither_in_circles_nor_too_far() {
    let folder = tempfile::tempdir().unwrap();
    let told = |path: &Path| {
        let error = load(path).unwrap_err();
        assert_eq!(error.problems.len(), 1, "{error}");
        error.to_string().replace(&format!("{}/", folder.path().display()), "")
    };
    let itself = write(&folder, "itself.yaml", "include: itself.yaml");
    assert_eq!(
        told(&itself),
        "itself.yaml:1:10: include[0]: files include each other in a circle: itself.yaml → itself.yaml"
    );
    let a = write(&folder, "a.yaml", "include: [b.yaml]");
    write(&folder, "b.yaml", "enabled: true\ninclude: [c.yaml]");
    write(&folder, "c.yaml", "include:\n  - ./a.yaml");
    assert_eq!(
        told(&a),
        "c.yaml:2:5: include[0]: files include each other in a circle: a.yaml → b.yaml → c.yaml → ./a.yaml"
    );
    for i in 0..12 {
        write(&folder, &format!("d{i}.yaml"), format!("include: d{}.yaml", i + 1));
    }
    write(&folder, "d12.yaml", "");
    let deep = told(&folder.path().join("d0.yaml"));
    assert!(
        deep.starts_with("d8.yaml:1:10: include[0]: files include files more than 8 deep: d0.yaml → d1.yaml"),
        "{deep}"
    );
    assert!(load(&folder.path().join("d4.yaml")).is_ok());
    let many: Vec<String> = (0..80).map(|i| format!("m{i}.yaml")).collect();
    many.iter().for_each(|name| drop(write(&folder, name, "")));
    let all = write(&folder, "all.yaml", format!("include: [{}]", many.join(", ")));
    assert!(told(&all).contains("include[63]: more than 64 files: all.yaml → m63.yaml"), "{}", told(&all));
}

#[test]
fn a_file_that_is_included_and_cannot_be_read_is_blamed_on_who_includes_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(&folder, "a.yaml", "include:\n  - gone.yaml\n  - /dev/zero\n  - fine.yaml");
    write(&folder, "fine.yaml", "");
    let error = load(&path).unwrap_err().to_string().replace(&format!("{}/", folder.path().display()), "");
    assert_eq!(
        error,
        "a.yaml:2:5: include[0]: 'gone.yaml' cannot be read: No such file or directory (os error 2)\n\
         a.yaml:3:5: include[1]: '/dev/zero' is a device; only regular files are read"
    );
}
