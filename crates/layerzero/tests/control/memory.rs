//! Free memory: what fits follows it, and nothing is built anew.

use super::*;

/// A world of two kernels: the faster one takes 1000 bytes of workspace.
fn world() -> World {
    let w = World::new();
    w.set("memory_headroom_mb", 0);
    let large = KernelDescriptor { workspace: Some("1000".into()), ..descriptor("large.rms", 95) };
    w.engine.register(large, fill(1.0)).unwrap();
    w.engine
        .register(KernelDescriptor { workspace: Some("0".into()), ..descriptor("small.rms", 90) }, fill(2.0))
        .unwrap();
    w
}

fn free(w: &World, free: i64, largest_block: i64) {
    w.engine.memory().set(DeviceIx(0), Some(MemoryState { free, largest_block }));
}

#[test]
fn a_kernel_whose_workspace_no_longer_fits_is_not_used_and_nothing_is_rebuilt() {
    let w = world();
    free(&w, 5_000, 5_000);
    let served = |rows| rms_of(&w.engine, rows).unwrap().kernel_id;
    assert_eq!((served(2), served(64)), ("large.rms".into(), "large.rms".into()));
    let (version, entries) = (w.engine.version(), w.engine.cache_stats().entries);
    let epoch = w.engine.with_snapshot(|s| s.epoch());
    // Enough is free, but not in one piece.
    free(&w, 5_000, 999);
    assert_eq!((served(2), served(64)), ("small.rms".into(), "small.rms".into()));
    // A figure that changes nothing decides nothing anew.
    let misses = w.engine.cache_stats().misses;
    free(&w, 900, 900);
    assert_eq!((served(2), w.engine.cache_stats().misses), ("small.rms".into(), misses));
    free(&w, 1_000, 1_000);
    assert_eq!(served(2), "large.rms");
    assert_eq!((w.engine.version(), w.engine.with_snapshot(|s| s.epoch())), (version, epoch));
    assert_eq!(w.engine.cache_stats().entries, entries);
}

#[test]
fn an_allocator_says_what_it_holds_unused() {
    let held = AllocatorMemory { driver_free: 100, unused: 900, largest_unused: 600 };
    assert_eq!(held.state(), MemoryState { free: 1_000, largest_block: 600 });
    let held = AllocatorMemory { largest_unused: 50, ..held };
    assert_eq!(held.state().largest_block, 100);
}

#[test]
fn every_device_is_asked_about_and_the_driver_where_the_allocator_holds_nothing() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let gpu = DeviceSpec::new(Platform::Cuda, "made-up");
    let engine = Engine::builder().devices(vec![DeviceSpec::new(Platform::Cpu, "host"), gpu]).build();
    let seen = asked.clone();
    engine.set_memory_source(Box::new(move |device| {
        seen.lock().unwrap().push(device);
        (device.0 == 1).then_some(AllocatorMemory { driver_free: 7, unused: 5, largest_unused: 5 })
    }));
    assert_eq!(engine.memory().get(DeviceIx(1)), None);
    engine.refresh_memory();
    assert_eq!(*asked.lock().unwrap(), [DeviceIx(0), DeviceIx(1)]);
    assert_eq!(engine.memory().get(DeviceIx(1)), Some(MemoryState { free: 12, largest_block: 7 }));
    assert!(engine.memory().get(DeviceIx(0)).unwrap().free > 12);
}

#[test]
fn explain_shows_the_workspace_and_what_is_available() {
    let w = world();
    free(&w, 5_000, 5_000);
    let report = w.engine.explain("rms_norm", &call(&[2, 4])).unwrap();
    assert_eq!(report.available_bytes, Some(5_000));
    let workspace = |id: &str| report.candidates.iter().find(|c| c.kernel_id == id).unwrap().workspace_bytes;
    assert_eq!((workspace("large.rms"), workspace("small.rms")), (Some(1_000), Some(0)));
    let text = report.to_string();
    assert!(text.contains("memory   5.00 kB available") && text.contains("workspace 1.00 kB"), "{text}");
}
