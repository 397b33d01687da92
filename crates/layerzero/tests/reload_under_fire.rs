//! Reload under fire: many threads call while the configuration changes, half of the time into something invalid.
//!
//! Every valid file locks an operation to one of two kernels. No call fails; a call gets a kernel that some file locked
//! which was in force between its beginning and its end; one that begins after a reload has returned sees it.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use layerzero::model::*;
use layerzero::{Arguments, Engine};

const THREADS: u64 = 32;

/// How many reloads; ten times as many at full scale.
fn reloads() -> u64 {
    let full = std::env::var("LZ_TEST_SCALE").is_ok_and(|scale| scale == "full");
    if full { 10_000 } else { 1_000 }
}

fn engine() -> Engine {
    let engine = Engine::builder().devices(vec![DeviceSpec::new(Platform::Cpu, "host")]).build();
    for (which, id) in KERNELS.into_iter().enumerate() {
        let mut kernel = KernelDescriptor::new(id, "norm.rms", "test");
        kernel.platforms = vec![Platform::Cpu];
        kernel.dtypes = DTypeSet::of(&[DType::F32]);
        kernel.layouts = vec![Layout::Strided];
        let fill = move |args: &mut KernelArgs<'_, '_>| {
            for index in indices(args.outputs[0].shape()) {
                args.outputs[0].set(&index, which as f64);
            }
            Ok(())
        };
        engine.register(kernel, Arc::new(fill)).unwrap();
    }
    engine
}

const KERNELS: [&str; 2] = ["test.zero", "test.one"];

/// Which kernel the nth valid file locks: neither always the same nor always the other.
fn locked_by(n: u64) -> usize {
    (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63) as usize
}

fn put(path: &Path, text: &[u8]) {
    let unfinished = path.with_extension("unfinished");
    fs::write(&unfinished, text).unwrap();
    fs::rename(&unfinished, path).unwrap();
}

fn put_valid(path: &Path, n: u64) {
    put(path, format!("# {n}\nlocks: {{norm.rms: {}}}\n", KERNELS[locked_by(n)]).as_bytes());
}

/// Makes the file invalid, in one of many ways, each of which would change what is served if it were taken.
fn put_invalid(path: &Path, n: u64) {
    let other = KERNELS[1 - locked_by(n / 2)];
    let text = match n % 8 {
        0 => format!("locks: {{norm.rms: {other}}}\nnonsense: 1\n"),
        1 => format!("locks: {{norm.rms: {other}}}\nfallback_enabled: maybe\n"),
        2 => format!("locks: {{norm.rms: {other}\n"),
        3 => format!("locks: {{norm.rms: {other}, norm.rsm: {other}}}\n"),
        4 => format!("include: layerzero.yaml\nlocks: {{norm.rms: {other}}}\n"),
        5 => format!("locks: {{norm.rms: {other}x}}\n"),
        6 => return put(path, b"locks: {norm.rms: \xff}\n"),
        _ => return drop(fs::remove_file(path)),
    };
    put(path, text.as_bytes());
}

/// The files that may decide about a call: from the last that was in force for certain to the last that may be.
struct InForce {
    certainly: AtomicU64,
    perhaps: AtomicU64,
    over: AtomicBool,
}

#[test]
fn no_call_fails_and_none_follows_neither_policy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layerzero.yaml");
    let engine = engine();
    put_valid(&path, 0);
    engine.load_config(&path).unwrap();
    let files = InForce { certainly: AtomicU64::new(0), perhaps: AtomicU64::new(0), over: AtomicBool::new(false) };
    let (calls, during) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (engine, files, calls, during) = (&engine, &files, &calls, &during);
            scope.spawn(move || {
                let rows = 1 << (thread % 8);
                let x = Tensor::from_f64(DType::F32, &[rows, 4], &vec![3.0; 4 * rows as usize]);
                while !files.over.load(Ordering::Acquire) {
                    let first = files.certainly.load(Ordering::SeqCst);
                    let got = if thread % 2 == 0 { dispatched(engine, &x) } else { selected(engine, &x) };
                    let last = files.perhaps.load(Ordering::SeqCst);
                    let allowed = (first..=last).any(|n| locked_by(n) == got);
                    if !allowed {
                        files.over.store(true, Ordering::Release);
                        panic!("{} served a call between file {first} and file {last}", KERNELS[got]);
                    }
                    calls.fetch_add(1, Ordering::Relaxed);
                    during.fetch_add(u64::from(first != last), Ordering::Relaxed);
                    std::thread::yield_now();
                }
            });
        }
        let (mut taken, mut refused) = (0, 0);
        for n in 1..=reloads() {
            if files.over.load(Ordering::Acquire) {
                break;
            }
            if n % 2 == 0 {
                let valid = n / 2;
                put_valid(&path, valid);
                files.perhaps.store(valid, Ordering::SeqCst);
                engine.reload().unwrap();
                files.certainly.store(valid, Ordering::SeqCst);
                taken += 1;
            } else {
                put_invalid(&path, n);
                engine.reload().unwrap_err();
                refused += 1;
            }
        }
        files.over.store(true, Ordering::Release);
        let counted = engine.health().reloads;
        assert_eq!((counted.succeeded, counted.refused), (taken, refused));
    });
    assert_eq!(engine.health().reloads.refused, reloads() / 2);
    // Enough calls met a change for this to mean something.
    let (calls, during) = (calls.into_inner(), during.into_inner());
    assert!(calls > reloads() && during > 100, "{calls} calls, {during} of them during a reload");
    // The last good one is kept through one more that is not.
    put_invalid(&path, 7);
    engine.reload().unwrap_err();
    let x = Tensor::from_f64(DType::F32, &[1, 4], &[1.0; 4]);
    assert_eq!(dispatched(&engine, &x), locked_by(reloads() / 2));
}

/// Runs the operation. The kernel that says it served is the one whose numbers came out.
fn dispatched(engine: &Engine, x: &Tensor) -> usize {
    let done = engine.dispatch("rms_norm", Arguments::new().input("x", x.view())).expect("no call fails");
    assert!(done.failures.is_empty(), "{:?}", done.failures);
    let which = KERNELS.iter().position(|id| *id == done.kernel_id).expect("one of the two");
    assert!(done.output().unwrap().to_f64().iter().all(|&value| value == which as f64));
    which
}

/// Asks for the plan. A lock leaves one kernel.
fn selected(engine: &Engine, x: &Tensor) -> usize {
    let meta = TensorMeta::new(DType::F32, x.shape());
    let plan = engine.select("rms_norm", &NamedCall::new().input("input", meta)).expect("no call fails");
    let [only] = plan.as_slice() else { panic!("{plan:?}") };
    KERNELS.iter().position(|id| id == only).expect("one of the two")
}
