//! The call path on host tensors: sequences of failures, against the model in `testdata/cases/call_path.py`, which calls
//! from Python are held to as well (`tests/control/test_call_path.py`).

use std::collections::BTreeMap;

use layerzero::resilience::BreakerState;

use super::*;

#[derive(serde::Deserialize)]
struct Sequences {
    threshold: u64,
    sequences: Vec<Sequence>,
}

#[derive(serde::Deserialize)]
struct Sequence {
    seed: u64,
    op: String,
    fallback: bool,
    workspaces: BTreeMap<String, i64>,
    calls: Vec<Made>,
    open: Vec<String>,
}

#[derive(serde::Deserialize)]
struct Made {
    kernels: BTreeMap<String, String>,
    expected: Expected,
}

#[derive(serde::Deserialize)]
struct Expected {
    ran: Vec<String>,
    served: Option<String>,
    end: String,
}

type Script = Arc<Mutex<(BTreeMap<String, String>, Vec<String>)>>;

/// A kernel that does what the script says. One that fails has spoiled half of what it was to write.
fn scripted(name: &str, op: &'static str, script: &Script) -> Arc<dyn DynamicKernel> {
    let (name, script) = (name.to_owned(), Arc::clone(script));
    let reference = lz_cpu::KERNELS.iter().copied().find(|kernel| kernel.ops().contains(&op)).unwrap();
    code(move |args| {
        let behaviour = {
            let mut script = script.lock().unwrap();
            script.1.push(name.clone());
            script.0[&name].clone()
        };
        let spoil = |args: &mut KernelArgs<'_, '_>| {
            let row = match op {
                "norm.rms" => return,
                "kv_cache.append" => args.input("slot_mapping").unwrap().get_int(&[0]) / args.dim("block_size"),
                _ => args.input("moves").unwrap().get_int(&[0, 1]),
            };
            let slot = match op {
                "kv_cache.append" => args.input("slot_mapping").unwrap().get_int(&[0]) % args.dim("block_size"),
                _ => 0,
            };
            let output = &mut args.outputs[0];
            for rest in indices(&output.shape()[2..]) {
                output.set(&[row, slot, rest[0], rest[1]], 77.0);
            }
        };
        match behaviour.as_str() {
            "serves" => reference.run(args),
            "refuses the data" => {
                let expected = "anything else".to_owned();
                Err(KernelError::BadData { input: "input", at: vec![0], value: 0, expected })
            }
            "runs out of memory" => {
                spoil(args);
                Err(KernelError::OutOfMemory("scripted".into()))
            }
            _ => {
                spoil(args);
                Err(KernelError::Failed("it broke".into()))
            }
        }
    })
}

/// Makes the call of an operation. Gives how it ended, and whether its answer, or what it updated, is right.
fn make(engine: &Engine, op: &str) -> (Result<layerzero::Dispatched, Error>, bool) {
    let caches = || [tensor(DType::F32, &[4, 2, 2, 3], 5), tensor(DType::F32, &[4, 2, 2, 3], 6)];
    let [mut keys, mut values] = caches();
    let mut want: Vec<Vec<f64>> = caches().iter().map(Tensor::to_f64).collect();
    let page = 2 * 2 * 3;
    match op {
        "norm.rms" => {
            let x = tensor(DType::F32, &[3, 8], 1);
            let done = rms(engine, &x);
            let is_close = |(got, want): (&f64, &f64)| (got - want).abs() < 1e-5;
            let is_right = done
                .as_ref()
                .is_ok_and(|done| done.output().unwrap().to_f64().iter().zip(&rms_by_hand(&x)).all(is_close));
            (done, is_right)
        }
        "kv_cache.append" => {
            let new = [tensor(DType::F32, &[3, 2, 3], 7), tensor(DType::F32, &[3, 2, 3], 8)];
            let slots = [5, 0, 2];
            for (want, new) in want.iter_mut().zip(&new) {
                for (token, slot) in slots.iter().enumerate() {
                    want[*slot * 6..*slot * 6 + 6].copy_from_slice(&new.to_f64()[token * 6..token * 6 + 6]);
                }
            }
            let slots = Tensor::from_ints(DType::I64, &[3], &slots.map(|slot| slot as i64));
            let arguments = Arguments::new()
                .input("key", new[0].view())
                .input("value", new[1].view())
                .input("slot_mapping", slots.view())
                .update("key_cache", keys.view_mut())
                .update("value_cache", values.view_mut());
            (engine.dispatch(op, arguments), keys.to_f64() == want[0] && values.to_f64() == want[1])
        }
        _ => {
            let moves = [(3, 0), (0, 1), (2, 2)];
            for want in &mut want {
                let before = want.clone();
                for (from, to) in moves {
                    want[to * page..(to + 1) * page].copy_from_slice(&before[from * page..(from + 1) * page]);
                }
            }
            let flat: Vec<i64> = moves.iter().flat_map(|&(from, to)| [from as i64, to as i64]).collect();
            let moves = Tensor::from_ints(DType::I64, &[3, 2], &flat);
            let arguments = Arguments::new()
                .input("moves", moves.view())
                .update("key_cache", keys.view_mut())
                .update("value_cache", values.view_mut());
            (engine.dispatch(op, arguments), keys.to_f64() == want[0] && values.to_f64() == want[1])
        }
    }
}

fn replay(sequence: &Sequence, threshold: u64) {
    let w = Watched::new();
    let op = Catalog::get().ops().iter().find(|op| op.id() == sequence.op).unwrap().id();
    w.settings(|settings| settings.fallback_enabled = sequence.fallback);
    let entries = [
        ("fallback_enabled".to_owned(), layerzero::config::Value::from(sequence.fallback)),
        ("degradation.enabled".to_owned(), layerzero::config::Value::from(false)),
        ("breaker.failure_threshold".to_owned(), layerzero::config::Value::from(threshold as i64)),
    ];
    w.engine.configure(entries).unwrap();
    let script: Script = Arc::default();
    for (number, (name, workspace)) in sequence.workspaces.iter().enumerate() {
        let mut kernel = descriptor(&format!("{name}.{op}"), op, 90 - 10 * number as i32);
        kernel.layouts = vec![Layout::Nhd, Layout::Strided];
        kernel.workspace = Some(workspace.to_string());
        w.engine.register(kernel, scripted(name, op, &script)).unwrap();
    }
    for (at, made) in sequence.calls.iter().enumerate() {
        *script.lock().unwrap() = (made.kernels.clone(), Vec::new());
        let (done, is_right) = make(&w.engine, op);
        let end = match &done {
            Ok(_) => "served",
            Err(Error::Execution { chain, .. }) if chain.iter().any(|f| f.error.is_callers_fault()) => "refused",
            Err(Error::Execution { .. }) => "unserved",
            Err(other) => panic!("{other}"),
        };
        let ran: Vec<&str> = made.expected.ran.iter().map(String::as_str).filter(|k| *k != "reference").collect();
        let place = format!("sequence {} call {at}", sequence.seed);
        assert_eq!(
            (end, script.lock().unwrap().1.clone()),
            (made.expected.end.as_str(), ran.iter().map(|k| (*k).to_owned()).collect()),
            "{place}"
        );
        if let Ok(done) = done {
            let served = made.expected.served.as_deref().unwrap();
            let prefix = if served == "reference" { "lz_cpu" } else { served };
            assert!(done.kernel_id.starts_with(prefix), "{place}: {} served, expected {served}", done.kernel_id);
            assert!(is_right, "{place}: {} served, and the answer is wrong", done.kernel_id);
        }
    }
    let open = w.engine.health().breakers.into_iter().filter(|b| b.op == op && b.view.state != BreakerState::Closed);
    let mut open: Vec<String> = open.map(|b| b.kernel.split('.').next().unwrap().to_owned()).collect();
    open.sort();
    assert_eq!(open, sequence.open, "sequence {}", sequence.seed);
}

#[test]
fn sequences_of_failures_follow_the_model() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/call_path.json");
    let known: Sequences = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(known.sequences.len() >= 100);
    known.sequences.iter().for_each(|sequence| replay(sequence, known.threshold));
}
