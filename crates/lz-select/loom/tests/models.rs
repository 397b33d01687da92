//! Models of the hand-written atomics, explored by loom. Run with `make loom`.
#![cfg(loom)]

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use lz_select_loom::flight::{Boarding, Flights};
use lz_select_loom::generation::Generation;

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(f);
}

/// A computation that began before an invalidation must not be stored after it.
#[test]
fn what_was_computed_before_an_invalidation_is_not_kept_after_it() {
    model(|| {
        let generation = Arc::new(Generation::default());
        let world = Arc::new(AtomicU64::new(0));
        let table = Arc::new(Mutex::new(None));
        let computing = {
            let (generation, world, table) = (generation.clone(), world.clone(), table.clone());
            thread::spawn(move || {
                let ticket = generation.ticket();
                let seen = world.load(Ordering::Acquire);
                let mut table = table.lock().unwrap();
                if generation.is_current(ticket) {
                    *table = Some(seen);
                }
            })
        };
        world.store(1, Ordering::Release);
        {
            let mut table = table.lock().unwrap();
            generation.advance();
            *table = None;
        }
        computing.join().unwrap();
        let kept = *table.lock().unwrap();
        assert_ne!(kept, Some(0), "a decision about the old world survived");
    });
}

/// A thread's front slot counts only while the shard's generation is the one it was filled in.
#[test]
fn a_front_slot_is_void_once_invalidate_returned() {
    model(|| {
        let generation = Arc::new(Generation::default());
        let invalidated = Arc::new(AtomicU64::new(0));
        let slot = generation.ticket();
        let other = {
            let (generation, invalidated) = (generation.clone(), invalidated.clone());
            thread::spawn(move || {
                generation.advance();
                invalidated.store(1, Ordering::Release);
            })
        };
        let returned = invalidated.load(Ordering::Acquire) == 1;
        let served = generation.is_current(slot);
        assert!(!(returned && served), "served after invalidate returned");
        other.join().unwrap();
        assert!(!generation.is_current(slot));
    });
}

/// A reader that finds an entry while it is being invalidated keeps nothing that counts afterwards.
#[test]
fn what_is_found_during_an_invalidation_does_not_count_after_it() {
    model(|| {
        let generation = Arc::new(Generation::default());
        let table = Arc::new(AtomicU64::new(1)); // 1: the entry, 0: it was dropped
        let reader = {
            let (generation, table) = (generation.clone(), table.clone());
            thread::spawn(move || {
                let ticket = generation.ticket();
                (table.load(Ordering::Acquire) == 1).then_some(ticket)
            })
        };
        table.store(0, Ordering::Release);
        generation.advance();
        let remembered = reader.join().unwrap();
        assert!(!remembered.is_some_and(|ticket| generation.is_current(ticket)), "a dropped entry is still served");
    });
}

/// Of two threads that miss one key, one leads at a time, both come through, and nothing stays behind.
#[test]
fn followers_are_released_and_leaders_exclude_each_other() {
    model(|| {
        let flights: Arc<Flights<u64>> = Arc::new(Flights::default());
        let leading = Arc::new(AtomicU64::new(0));
        let board = |flights: Arc<Flights<u64>>, leading: Arc<AtomicU64>| {
            move || {
                if let Boarding::Leader(guard) = flights.board(&7) {
                    assert_eq!(leading.fetch_add(1, Ordering::AcqRel), 0, "two leaders at once");
                    leading.fetch_sub(1, Ordering::AcqRel);
                    drop(guard);
                }
            }
        };
        let other = thread::spawn(board(flights.clone(), leading.clone()));
        board(flights.clone(), leading.clone())();
        other.join().unwrap();
        assert!(flights.is_empty());
    });
}
