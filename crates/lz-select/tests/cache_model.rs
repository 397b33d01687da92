//! The cache against a model: never stale, never over its bound, one computation per miss.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use lz_model::{BackendDescriptor, BindRules, Catalog, DType, NamedCall, OpIx, Platform, Query, TensorMeta};
use lz_select::*;

/// Quick in CI, larger on request.
fn scale(quick: usize, full: usize) -> usize {
    match std::env::var("LZ_TEST_SCALE").as_deref() {
        Ok("full" | "soak") => full,
        _ => quick,
    }
}

fn snapshot(epoch: u64) -> Snapshot {
    let mut spec =
        SnapshotSpec { devices: vec![lz_model::DeviceSpec::new(Platform::Cpu, "here")], ..SnapshotSpec::default() };
    spec.backend(BackendDescriptor::native("x", "1", vec![Platform::Cpu]));
    spec.build(epoch).unwrap()
}

/// A query of its own cell for every number: `hidden` is an exact dimension.
fn query(op: &str, n: usize) -> Query {
    let shape = [1, n as i64 + 1];
    let call = NamedCall::new().input("input", TensorMeta::new(DType::F32, &shape));
    Catalog::get().resolve(op, &call, &BindRules::default(), |_| None).unwrap().1.query
}

fn chain(kernel: u32) -> Chain {
    Chain::new(&[(KernelIx(kernel), Transforms::NONE)], None).unwrap()
}

fn always(kernel: u32) -> impl Fn() -> (Option<Chain>, bool) {
    move || (Some(chain(kernel)), true)
}

fn cache(max_entries: usize) -> SelectionCache {
    SelectionCache::new(CacheConfig { max_entries, ..CacheConfig::default() })
}

/// Readers note the least version that may be served, then read; a version below it is stale.
#[test]
fn nothing_stale_is_served_after_invalidate_returns_and_the_bound_holds() {
    let threads = scale(8, 64);
    let operations = scale(40_000, 1_600_000);
    let (snapshot, cache) = (snapshot(1), cache(256));
    let queries: Vec<Query> = (0..600).map(|n| query("norm.rms", n)).collect();
    // What a computation sees, and what readers may at least expect.
    let (world, floor) = (AtomicU32::new(0), AtomicU32::new(0));
    let stale = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (snapshot, cache, queries, world, floor, stale) = (&snapshot, &cache, &queries, &world, &floor, &stale);
            scope.spawn(move || {
                let mut random = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(thread as u64 + 1);
                for _ in 0..operations {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let roll = (random >> 33) % 1000;
                    if roll < 10 {
                        let next = world.fetch_add(1, Ordering::AcqRel) + 1;
                        cache.invalidate(&Invalidate::All);
                        floor.fetch_max(next, Ordering::AcqRel);
                    } else {
                        // 9 in 10 of the rest hit a few hot keys, the others miss.
                        let n = if roll < 900 { roll as usize % 8 } else { (random >> 40) as usize % queries.len() };
                        let least = floor.load(Ordering::Acquire);
                        let got =
                            cache.chain(snapshot, &queries[n], || (Some(chain(world.load(Ordering::Acquire))), true));
                        if got.unwrap().chosen().0 < least {
                            stale.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    assert_eq!(stale.load(Ordering::Relaxed), 0);
    assert!(cache.stats().entries <= cache.bound() && cache.bound() <= 256);
}

#[test]
fn one_miss_one_computation_however_many_threads() {
    let (threads, rounds) = (scale(16, 1000), scale(100, 10_000));
    let (snapshot, cache) = (snapshot(1), cache(100_000));
    for round in 0..rounds {
        let (query, computed, start) = (query("norm.layer", round), AtomicU32::new(0), Barrier::new(threads));
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    start.wait();
                    let got = cache.chain(&snapshot, &query, || {
                        computed.fetch_add(1, Ordering::Relaxed);
                        (Some(chain(7)), true)
                    });
                    assert_eq!(got, Some(chain(7)));
                });
            }
        });
        assert_eq!(computed.load(Ordering::Relaxed), 1, "round {round}");
    }
}

#[test]
fn a_leader_that_panics_or_finds_nothing_releases_the_others() {
    let (snapshot, cache) = (snapshot(1), cache(1000));
    for round in 0..20 {
        let query = query("norm.rms", 10_000 + round);
        let (first, start) = (AtomicBool::new(true), Barrier::new(8));
        let served = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    start.wait();
                    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        cache.chain(&snapshot, &query, || {
                            if first.swap(false, Ordering::AcqRel) {
                                if round % 2 == 0 {
                                    std::panic::resume_unwind(Box::new("the leader panics"));
                                }
                                return (None, true);
                            }
                            (Some(chain(3)), true)
                        })
                    }));
                    if let Ok(Some(got)) = outcome {
                        assert_eq!(got, chain(3));
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        // All but the leader get an answer.
        assert_eq!(served.load(Ordering::Relaxed), 7, "round {round}");
    }
}

#[test]
fn a_leader_that_is_stuck_does_not_keep_the_others() {
    let (snapshot, cache) = (Arc::new(snapshot(1)), Arc::new(cache(1000)));
    let query = query("norm.rms", 1);
    let (release, stuck) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let leader = {
        let (snapshot, cache, release, stuck) = (snapshot.clone(), cache.clone(), release.clone(), stuck.clone());
        std::thread::spawn(move || {
            cache.chain(&snapshot, &query, || {
                stuck.wait();
                release.wait();
                (Some(chain(1)), true)
            })
        })
    };
    stuck.wait();
    // The leader cannot finish before we let it: only impatience can answer this.
    assert_eq!(cache.chain(&snapshot, &query, always(2)), Some(chain(2)));
    release.wait();
    assert_eq!(leader.join().unwrap(), Some(chain(1)));
}

#[test]
fn entries_expire_by_the_clock() {
    let now = Arc::new(AtomicU64::new(1_000));
    let config = CacheConfig { ttl_ms: 60_000, clock: Clock::Manual(now.clone()), ..CacheConfig::default() };
    let (snapshot, cache, query) = (snapshot(1), SelectionCache::new(config), query("norm.rms", 5));
    assert_eq!(cache.chain(&snapshot, &query, always(1)), Some(chain(1)));
    now.store(60_999, Ordering::Release);
    assert_eq!(cache.chain(&snapshot, &query, always(2)), Some(chain(1)));
    now.store(61_000, Ordering::Release);
    assert_eq!(cache.chain(&snapshot, &query, always(2)), Some(chain(2)));
}

#[test]
fn the_least_recently_used_make_room() {
    // One shard of two: every key competes.
    let config = CacheConfig { shards: 1, max_entries: 2, ..CacheConfig::default() };
    let (snapshot, cache) = (snapshot(1), SelectionCache::new(config));
    let [a, b, c] = [0, 1, 2].map(|n| query("norm.rms", n));
    let on_another_thread = |query: &Query, kernel: u32| {
        // A fresh thread has an empty front, so the shared table itself is asked.
        std::thread::scope(|s| s.spawn(|| cache.chain(&snapshot, query, always(kernel))).join().unwrap())
    };
    on_another_thread(&a, 1);
    on_another_thread(&b, 1);
    on_another_thread(&a, 9); // a is used again
    on_another_thread(&c, 1); // b goes
    assert_eq!(on_another_thread(&a, 9), Some(chain(1)));
    assert_eq!(on_another_thread(&c, 9), Some(chain(1)));
    assert_eq!(on_another_thread(&b, 9), Some(chain(9)));
    assert_eq!(cache.stats().entries, 2);
}

#[test]
fn invalidation_forgets_what_it_names_and_nothing_else() {
    let (snapshot, cache) = (snapshot(1), cache(1000));
    let op = |name: &str| -> OpIx { Catalog::get().find(name).unwrap().ops[0] };
    let (rms, layer) = (query("norm.rms", 1), query("norm.layer", 1));
    let two = || (Chain::new(&[(KernelIx(1), Transforms::NONE), (KernelIx(2), Transforms::NONE)], None), true);
    let fill = || {
        cache.chain(&snapshot, &rms, two);
        cache.chain(&snapshot, &layer, always(3));
    };
    let kept = |query: &Query| cache.chain(&snapshot, query, always(99)).unwrap().chosen() != KernelIx(99);

    fill();
    cache.invalidate(&Invalidate::Op(op("norm.rms")));
    assert_eq!((kept(&rms), kept(&layer)), (false, true));

    cache.invalidate(&Invalidate::All);
    assert_eq!(cache.stats().entries, 0);
    fill();
    // Kernel 2 is only a fallback of the first chain; its chain goes all the same.
    cache.invalidate(&Invalidate::Kernels(vec![KernelIx(2)]));
    assert_eq!((kept(&rms), kept(&layer)), (false, true));
}

#[test]
fn another_snapshot_or_another_cache_shares_nothing() {
    let (one, two) = (snapshot(1), snapshot(2));
    let (cache_a, cache_b, query) = (cache(100), cache(100), query("norm.rms", 3));
    assert_eq!(cache_a.chain(&one, &query, always(1)), Some(chain(1)));
    assert_eq!(cache_a.chain(&two, &query, always(2)), Some(chain(2)));
    assert_eq!(cache_b.chain(&one, &query, always(3)), Some(chain(3)));
}

#[test]
fn a_mixed_cell_is_answered_by_the_exact_shape() {
    let (snapshot, cache) = (snapshot(1), cache(100));
    let shape_of = |rows: i64| {
        let shape = [rows, 64];
        let call = NamedCall::new().input("input", TensorMeta::new(DType::F32, &shape));
        Catalog::get().resolve("norm.rms", &call, &BindRules::default(), |_| None).unwrap().1.query
    };
    let (a, b) = (shape_of(100), shape_of(101));
    assert_eq!(snapshot.cell_key(&a), snapshot.cell_key(&b));
    let mixed = |kernel: u32| move || (Some(chain(kernel)), false);
    for _ in 0..2 {
        assert_eq!(cache.chain(&snapshot, &a, mixed(1)), Some(chain(1)));
        assert_eq!(cache.chain(&snapshot, &b, mixed(2)), Some(chain(2)));
    }
    assert_eq!(cache.stats().misses, 2);
}

#[test]
fn an_entry_is_small() {
    let (overhead, chain) = (ENTRY_OVERHEAD, size_of::<Chain>());
    assert!(overhead <= 100, "{overhead} bytes beyond the key");
    assert!(chain <= 40, "{chain} bytes");
}
