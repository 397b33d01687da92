//! Tasks that threads take until none is left, each thread with scratch memory of its own.

use std::sync::atomic::{AtomicUsize, Ordering};

use lz_abi::Threads;

/// Scratch memory of all threads.
struct Slots {
    start: *mut f32,
    apart: usize,
}

// SAFETY: every thread uses a slot of its own.
unsafe impl Sync for Slots {}

/// Calls `work` with each task, and memory of `slot` numbers that no other thread has, on `workers` threads.
pub fn each(
    threads: Threads<'_>,
    workers: usize,
    (memory, slot): (&mut [f32], usize),
    tasks: usize,
    work: impl Fn(usize, &mut [f32]) + Sync,
) {
    assert!(memory.len() >= slot * workers);
    let slots = Slots { start: memory.as_mut_ptr(), apart: slot };
    let next = AtomicUsize::new(0);
    threads.each(workers, |worker| {
        let slots = &slots;
        // SAFETY: a slot for every worker, and each number of a worker is given out once.
        let slot = unsafe { std::slice::from_raw_parts_mut(slots.start.add(worker * slots.apart), slots.apart) };
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            work(task, slot);
        }
    });
}
