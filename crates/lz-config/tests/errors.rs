//! What the common mistakes are told: file, line, column, key, value, what was expected, the nearest valid key.

use lz_config::{Layers, ProblemKind, Sources, Value};

/// What is wrong with a file of this text, one problem a line.
fn errors(text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layerzero.yaml");
    std::fs::write(&path, text).unwrap();
    let sources = Sources { project: Some(path), ..Sources::default() };
    let error = match Layers::load(&sources).and_then(|layers| layers.resolve()) {
        Ok(config) => format!("no error: {:?}", config.entries().last()),
        Err(error) => error.to_string(),
    };
    error.replace(&format!("{}/", folder.path().display()), "")
}

#[test]
fn common_mistakes() {
    let mistakes = [
        "fallback_enabld: true",
        "strict_mode: maybe",
        "strict_mode: yes",
        "memory_headroom_mb: -1",
        "memory_headroom_mb: 12.5",
        "memory_headroom_mb: '1024'",
        "memory_headroom_mb: 99999999999999999999999",
        "backend_isolation: sub_process",
        "prefer_sources: {flash_attn: true}",
        "prefer_sources: [flash_attn, 3]",
        "version: 2",
        "version: one",
        "breaker: {failure_treshold: 3}",
        "breaker: 5",
        "breaker:\n  timeout_ms: 1000000\n  max_timeout_ms: 10",
        "degradation: {cached_health: 90}",
        "locks:\n  atention.causal: x\n  attention: 5",
        "enabled: true\nenabled: false",
        "rules:\n  - match: {sm: '>=90'}\n    prefr: x",
        "rules:\n  - match: {sn: '>=90'}\n    prefer: x",
        "rules:\n  - match:\n      sm: '=>90'\n      seq_len: long\n    prefer: x",
        "rules:\n  - match: {operation: 'atention.causal', seq_len: [1, [2]]}\n    prefer: x",
        "rules:\n  - condition: seq_lenn > 5\n    prefer: x\n  - when: seq_len >\n    deny: y",
        "rules:\n  - condition: seq_len > 5\n  - prefer: x\n    boost: {points: 5}\n  - filter: determinstic",
        "rules:\n  - match: {sm: 90, rows: 5, seq_q: 4}\n    prefer: x",
        "rules: {match: {}}",
        "rules:\n  - match:\n    prefer: x",
        "rules:\n  - {operation: [], deny: x}\n  - {operation: attention, match: {op: norm.*}, deny: x}",
        "rollouts:\n  - {name: a, operation: rms_norm, candidate: x, mode: canery, fraction: 150%}\n  - {mode: shadow, max_slowdown: 0.5}",
        "schema_version: 3\nkernels: {}",
        "kernels:\n  a:\n    operation: atention\n    implementations: [{name: x}]",
        "kernels:\n  a:\n    operation: attention\n    implementations:\n      - {name: x, dispatch_key: gpu, priority: high}\n      - {dispatch_key: any, constraint: {}}\n      - {name: y, constraints: {dtypes: [flot16], max_heddim: 4, supports_cauzal: true, min_head_dim: x}}",
        "schema_version: 2\ndefaults: {fallback: x}\ndispatch_rules:\n  - {condition: batch > 1}\n  - {condition: batsh > 1, action: {boost: 3}}\npolicies:\n  a: {lock_rules: [{conditions: [sm > 5]}], allow_experimental: maybe}",
        "policy: production",
        "enabled: [",
        "breaker:\n\ttimeout_ms: 5",
        "a: &x 1\nb: *x",
        "enabled: !!bool true",
        "--- {}\n--- {}",
        "[1, 2]",
        "? [a]\n: b",
        "include: 5",
    ];
    let told: Vec<String> =
        mistakes.iter().map(|text| format!("{text}\n--> {}", errors(text).replace('\n', "\n--> "))).collect();
    insta::assert_snapshot!(told.join("\n\n"));
    assert!(told.iter().all(|t| !t.contains("no error")), "every mistake is one");
}

#[test]
fn all_problems_of_all_files_are_told_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (project, user) = (folder.path().join("p.yaml"), folder.path().join("u.yaml"));
    std::fs::write(&project, "enabld: 1\nstrict_mode: 2\ninclude: [i.yaml]").unwrap();
    std::fs::write(folder.path().join("i.yaml"), "plan_mode: 3").unwrap();
    std::fs::write(&user, "locks: 4").unwrap();
    let environment = [("LAYERZERO_VERBOSE".into(), "perhaps".into())].into();
    let error = Layers::load(&Sources { user: Some(user), project: Some(project), environment, ..Sources::default() })
        .unwrap_err();
    let keys: Vec<&str> = error.problems.iter().map(|p| p.key.as_str()).collect();
    assert_eq!(keys, ["enabld", "strict_mode", "plan_mode", "locks", "verbose"]);
    assert_eq!(error.problems[1].value.as_deref(), Some("2"));
}

#[test]
fn a_refused_change_by_code_changes_nothing() {
    let mut layers = Layers::load(&Sources::default()).unwrap();
    let before = layers.clone();
    let entries = [("verbose".to_owned(), Value::Bool(true)), ("breaker.timeout".to_owned(), Value::Int(5))];
    let error = layers.code().set_all(entries).unwrap_err();
    assert_eq!(error.to_string(), "code: breaker.timeout: unknown key; did you mean 'timeout_ms'?");
    assert!(layers.code().lock("atention", "x").unwrap_err().to_string().contains("did you mean 'attention'?"));
    assert!(layers.code().unlock("nothing like it").is_err());
    assert!(layers.code().set("include", Value::names(["a.yaml"])).is_err());
    assert!(layers.code().set("kernels", Value::Map(Vec::new())).is_err());
    assert!(layers.code().set("nonsense", Value::Null).is_err());
    let deep = (0..40).fold(Value::Int(1), |value, _| Value::List(vec![value]));
    assert!(layers.code().set("rules", deep).unwrap_err().to_string().contains("more than 32 levels deep"));
    assert_eq!(layers, before);
}

#[test]
fn an_expression_says_where_it_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layerzero.yaml");
    std::fs::write(&path, "rules:\n  - prefer: x\n    condition: \"batch > 1 and seq_lenn > 4\"\n").unwrap();
    let error = Layers::load(&Sources { project: Some(path), ..Sources::default() }).unwrap_err();
    let problem = &error.problems[0];
    assert!(problem.at.to_string().ends_with(":3:16"), "{}", problem.at);
    assert_eq!(problem.key, "rules[0].condition");
    let ProblemKind::BadExpression { column, hint, .. } = &problem.kind else { panic!("{problem:?}") };
    assert_eq!((*column, hint.as_deref()), (15, Some("did you mean `seq_len`?")));
}
