//! Tasks that threads take until none is left, each thread with scratch memory of its own.

use std::sync::atomic::{AtomicUsize, Ordering};

use lz_abi::Threads;

/// Calls `work` with each task, and memory of `slot` numbers (at least one) that no other thread has, on `workers` threads.
pub fn each<T: Send>(
    threads: Threads<'_>,
    workers: usize,
    (memory, slot): (&mut [T], usize),
    tasks: usize,
    work: impl Fn(usize, &mut [T]) + Sync,
) {
    assert!(slot > 0 || workers == 0, "a thread is known by its memory");
    let next = AtomicUsize::new(0);
    threads.each_chunk(&mut memory[..slot * workers], slot, |_, slot| {
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            work(task, slot);
        }
    });
}
