//! What follows from calls and does not keep them waiting; and locks that are taken in one order.

use super::*;

/// An engine for this machine, that believes the machine has a byte of free memory.
fn short_of_memory() -> (Arc<Engine>, Arc<AtomicU64>) {
    let clock = Arc::new(AtomicU64::new(1_000_000));
    let cache = CacheConfig { clock: Clock::Manual(clock.clone()), ..CacheConfig::default() };
    let engine = Arc::new(Engine::builder().cpu_only().cache(cache).build());
    let tight = MemoryState { free: 1, largest_block: 1 };
    engine.memory().set(DeviceIx(0), Some(tight));
    (engine, clock)
}

fn free(engine: &Engine) -> i64 {
    engine.memory().get(DeviceIx(0)).unwrap().free
}

#[test]
fn no_call_builds_a_snapshot_because_memory_moved() {
    let (engine, clock) = short_of_memory();
    rms(&engine).unwrap();
    let version = engine.version();
    for _ in 0..10 {
        clock.fetch_add(61_000, Ordering::AcqRel);
        rms(&engine).unwrap();
    }
    assert_eq!((engine.version(), free(&engine)), (version, 1));
}

#[test]
fn an_engine_that_is_attended_looks_at_memory_beside_its_calls() {
    let (engine, clock) = short_of_memory();
    engine.attend();
    rms(&engine).unwrap();
    clock.fetch_add(61_000, Ordering::AcqRel);
    rms(&engine).unwrap();
    // What was begun is done before the program ends.
    engine.end();
    assert!(free(&engine) > 1);
    // Nothing is begun after that.
    engine.memory().set(DeviceIx(0), Some(MemoryState { free: 1, largest_block: 1 }));
    clock.fetch_add(61_000, Ordering::AcqRel);
    rms(&engine).unwrap();
    engine.end();
    assert_eq!(free(&engine), 1);
}

#[test]
fn learning_inside_a_block_and_another_database_do_not_wait_for_each_other() {
    let w = World::with_kernels(&["a.rms"]);
    let path = |i: usize| w.folder.path().join(format!("{}.sqlite", i % 2)).display().to_string();
    w.set("perfdb.path", path(0).as_str());
    w.engine.learn();
    let rounds = 200;
    std::thread::scope(|scope| {
        let learner = scope.spawn(|| {
            for i in 0..rounds {
                // Each round asks inside of a block, whose state is built anew.
                let mut layer = CodeLayer::context();
                layer.set_all([("deterministic".to_owned(), Value::Bool(i % 2 == 0))]).unwrap();
                let overlay = w.engine.overlay(layer).unwrap();
                w.engine.update(|_| {}).unwrap();
                w.serves_in(&overlay);
                w.engine.learn();
            }
        });
        for i in 0..rounds {
            w.set("perfdb.path", path(i).as_str());
        }
        learner.join().unwrap();
    });
}

#[test]
fn a_kernel_registered_after_a_reload_runs_its_own_code() {
    let document = |operation: &str, kernel: &str| {
        format!(
            r#"{{"schema_version": "1.0", "backend": "lib", "backend_version": "1.0", "platform": "cpu", "ops": {{
                "{operation}": [{{"kernel_id": "{kernel}", "dtypes": ["float32"], "requires_layouts": ["strided"],
                "priority": 95}}]}}}}"#
        )
    };
    let w = World::new();
    w.engine.load_capabilities("lib", &document("norm.rms", "lib.rms")).unwrap();
    w.engine.attach("lib.rms", "1.0", fill(1.0)).unwrap();
    let value = |w: &World| rms(&w.engine).unwrap().outputs[0].1.to_f64()[0];
    assert_eq!((w.serves().as_str(), value(&w)), ("lib.rms", 1.0));
    // The library no longer brings it; the program does.
    w.engine.load_capabilities("lib", &document("activation.gelu", "lib.gelu")).unwrap();
    w.engine.register(descriptor("lib.rms", 95), fill(2.0)).unwrap();
    assert_eq!((w.serves().as_str(), value(&w)), ("lib.rms", 2.0));
}
