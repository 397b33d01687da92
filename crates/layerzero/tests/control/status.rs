//! The file other processes see rollouts by.

use std::os::unix::fs::PermissionsExt;

use layerzero::resilience::rollout::RolloutCall;
use layerzero::resilience::{Rollout, Verdict};
use layerzero::status::{ProcessRollouts, processes, state_dir};

use super::*;

const CANARY: &str = "rollouts:\n  - {name: new, operation: rms_norm, candidate: new.rms, mode: canary, fraction: 1.0, min_samples: 30}\n";

/// An engine with a canary, and the canary.
fn world(dir: &str) -> (World, Arc<Rollout>, PathBuf) {
    let w = World::made(|builder, folder| builder.state_dir(folder.join(dir)));
    w.register(&["new.rms", "old.rms"]);
    w.load(CANARY);
    let query = w.engine.bind("rms_norm", &call(&[2, 4])).unwrap().1.query;
    let rollout = w.engine.process().comparison(&query, &w.engine.steps(&query).unwrap()).unwrap().0;
    let dir = w.folder.path().join(dir);
    (w, rollout, dir)
}

fn samples(dir: &Path) -> Vec<u64> {
    processes(dir).iter().map(|process| process.rollouts[0].samples).collect()
}

#[test]
fn it_is_written_once_a_second_and_at_once_when_the_verdict_changes() {
    let (w, rollout, dir) = world("state");
    assert!(processes(&dir).is_empty(), "nothing was tried");
    for _ in 0..10 {
        w.engine.tried(&rollout, RolloutCall::OK);
    }
    assert_eq!(samples(&dir), [1], "the others came within a second");
    w.advance(999);
    w.engine.tried(&rollout, RolloutCall::OK);
    assert_eq!(samples(&dir), [1]);
    w.advance(1);
    w.engine.tried(&rollout, RolloutCall::OK);
    assert_eq!(samples(&dir), [12]);
    for _ in 12..30 {
        w.engine.tried(&rollout, RolloutCall::OK);
    }
    assert_eq!(samples(&dir), [30]);
    let process = processes(&dir).remove(0);
    assert_eq!((process.pid, &process.rollouts[0].verdict), (std::process::id(), &Verdict::Healthy));
    for _ in 0..30 {
        w.engine.tried(&rollout, RolloutCall::FAILED);
    }
    assert!(matches!(processes(&dir)[0].rollouts[0].verdict, Verdict::RolledBack { .. }));
    w.engine.rearm("new");
    assert_eq!(samples(&dir), [0]);
    // A process without rollouts has no file.
    w.load("version: 1\n");
    assert!(fs::read_dir(&dir).unwrap().next().is_none());
}

#[test]
fn it_is_for_its_user_alone() {
    let (w, rollout, dir) = world("deep/in/state");
    w.engine.tried(&rollout, RolloutCall::OK);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let file = dir.join(format!("rollouts-{}.json", std::process::id()));
    assert_eq!((mode(&dir), mode(&file)), (0o700, 0o600));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "nothing else is left there");
}

#[test]
fn where_nothing_can_be_written_one_warning_is_given_and_nothing_else_happens() {
    // A file stands where the folder would be: not even root can write there.
    let (w, rollout, dir) = world("state");
    fs::write(&dir, "in the way").unwrap();
    for _ in 0..100 {
        w.advance(1000);
        w.engine.tried(&rollout, RolloutCall::FAILED);
    }
    assert!(w.names().contains(&"rolled_back"), "{:?}", w.names());
    assert_eq!(w.serves(), "old.rms");
    let warnings = w.warnings.lock().unwrap().clone();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].to_string().contains("rollout status"), "{}", warnings[0]);
}

#[test]
fn processes_that_are_gone_are_forgotten() {
    let (w, rollout, dir) = world("state");
    w.engine.tried(&rollout, RolloutCall::OK);
    let mine = processes(&dir).remove(0);
    let put = |name: &str, process: &ProcessRollouts| {
        fs::write(dir.join(name), serde_json::to_string(process).unwrap()).unwrap();
    };
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let dead = child.id();
    child.wait().unwrap();
    put(&format!("rollouts-{dead}.json"), &ProcessRollouts { pid: dead, ..mine.clone() });
    // The number lives again, as another process.
    let parent = std::os::unix::process::parent_id();
    put(&format!("rollouts-{parent}.json"), &ProcessRollouts { pid: parent, started: 1, ..mine.clone() });
    // Of another machine that shares the folder, and things that are none of ours.
    put("rollouts-1.json", &ProcessRollouts { pid: 1, place: "elsewhere".into(), ..mine.clone() });
    fs::write(dir.join("rollouts-2.json"), "{").unwrap();
    fs::write(dir.join("notes.txt"), "mine").unwrap();
    assert_eq!(processes(&dir), [mine]);
    let mut left: Vec<_> = fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    let own = format!("rollouts-{}.json", std::process::id());
    let mut expected = vec!["notes.txt".to_owned(), "rollouts-1.json".into(), "rollouts-2.json".into(), own];
    expected.sort();
    assert_eq!(left, expected);
}

#[test]
fn it_lies_where_the_environment_says() {
    let dir = |variables: &[(&str, &str)]| {
        state_dir(&variables.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect())
    };
    assert_eq!(dir(&[("XDG_STATE_HOME", "/x"), ("HOME", "/h")]), Some("/x/layerzero".into()));
    assert_eq!(dir(&[("XDG_STATE_HOME", ""), ("HOME", "/h")]), Some("/h/.local/state/layerzero".into()));
    assert_eq!(dir(&[]), None);
    // By the environment of its sources.
    let w = World::with_kernels(&["new.rms", "old.rms"]);
    let home = w.folder.path().to_str().unwrap().to_owned();
    let sources = Sources {
        project: Some(w.write("layerzero.yaml", CANARY)),
        environment: [("HOME".to_owned(), home)].into_iter().collect(),
        ..Sources::default()
    };
    w.engine.load_sources(&sources).unwrap();
    let query = w.engine.bind("rms_norm", &call(&[2, 4])).unwrap().1.query;
    let (rollout, ..) = w.engine.process().comparison(&query, &w.engine.steps(&query).unwrap()).unwrap();
    w.engine.tried(&rollout, RolloutCall::OK);
    assert_eq!(samples(&w.folder.path().join(".local/state/layerzero")), [1]);
}
