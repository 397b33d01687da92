//! Degradation, on random worlds: no level leaves a call without a kernel that had one.

#[allow(dead_code)] // shared with soundness.rs, which uses all of it
mod world;

use std::collections::HashSet;
use std::sync::Arc;

use lz_model::{DeviceSpec, KernelDescriptor, Platform};
use lz_select::{CacheConfig, Candidate, Restriction, SelectionCache, Settled, Snapshot, SnapshotSpec};
use proptest::prelude::*;
use world::{RandomCall, World, call, variant, world};

/// What varies besides the world: whether it is a CPU's, which kernels are plain torch's or references, and what has
/// proved itself. Sets are bits by a kernel's place.
#[derive(Clone, Copy, Debug)]
struct Marks {
    cpu: bool,
    baseline: u16,
    reference: u16,
    proven: u16,
}

fn marks() -> impl Strategy<Value = Marks> {
    let few = || any::<u16>().prop_flat_map(|a| any::<u16>().prop_map(move |b| a & b));
    (any::<bool>(), few(), few(), few()).prop_map(|(cpu, baseline, reference, proven)| Marks {
        cpu,
        baseline,
        reference: reference & !baseline,
        proven,
    })
}

impl Marks {
    fn has(set: u16, place: usize) -> bool {
        set >> place & 1 == 1
    }

    fn spec(&self, world: &World) -> SnapshotSpec {
        let mut spec = world.spec();
        let mark = |(i, kernel): (usize, &Arc<KernelDescriptor>)| {
            let mut kernel = (**kernel).clone();
            kernel.baseline = Marks::has(self.baseline, i);
            kernel.reference = Marks::has(self.reference, i);
            if self.cpu {
                kernel.platforms = vec![Platform::Cpu];
                (kernel.min_sm, kernel.grid) = (None, None);
            }
            Arc::new(kernel)
        };
        spec.kernels = spec.kernels.iter().enumerate().map(mark).collect();
        if self.cpu {
            spec.devices = vec![DeviceSpec::new(Platform::Cpu, "made-up")];
        }
        spec
    }

    /// What each level restricts selection to. `decided`: the calls that were decided before.
    fn levels(&self, full: &Snapshot, world: &World, decided: &[RandomCall]) -> Vec<Restriction> {
        let named = |level| Restriction { level, ..Restriction::default() };
        let places = world.kernels.iter().enumerate().filter(|(i, _)| Marks::has(self.proven, *i));
        let proven: HashSet<String> = places.map(|(_, kernel)| kernel.descriptor.id.clone()).collect();
        let mut settled = Settled::default();
        for query in decided.iter().map(RandomCall::query) {
            if let Some(chosen) = full.select(&query).chosen() {
                settled.insert(full.cell_key(&query), full.kernel(chosen.kernel).id.clone());
            }
        }
        let proven = Some(Arc::new(proven));
        vec![
            Restriction { proven: proven.clone(), ..named("reduced") },
            Restriction { settled: Some(Arc::new(settled)), ..named("cached") },
            Restriction { declared_only: true, proven, ..named("rule_based") },
            Restriction { only_references: true, ..named("minimal") },
        ]
    }
}

fn ids(snapshot: &Snapshot, call: &RandomCall, wanted: impl Fn(&Candidate) -> bool) -> HashSet<String> {
    let decision = snapshot.select(&call.query());
    let found = decision.candidates.iter().filter(|c| c.accepted() && wanted(c));
    found.map(|c| format!("{}@{}", snapshot.kernel(c.kernel).id, snapshot.kernel(c.kernel).version)).collect()
}

fn cases() -> u32 {
    match std::env::var("LZ_TEST_SCALE").as_deref() {
        Ok("full" | "soak") => 25_600,
        _ => 256,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    /// A call that has a kernel has one at every level, and none that it did not have at full; where references can serve
    /// it, all of them still may; else, where plain torch can, that may.
    #[test]
    fn no_level_removes_the_last_kernel(
        world in world(), marks in marks(), calls in prop::collection::vec(call(), 1..12), decided in prop::collection::vec(call(), 0..6),
    ) {
        let full = marks.spec(&world).build(1).unwrap();
        for restriction in marks.levels(&full, &world, &decided) {
            let level = restriction.level;
            let mut spec = marks.spec(&world);
            spec.restriction = restriction;
            let degraded = spec.build(2).unwrap();
            for call in &calls {
                let (before, after) = (ids(&full, call, |_| true), ids(&degraded, call, |_| true));
                prop_assert_eq!(before.is_empty(), after.is_empty(), "{}: {:?}", level, call);
                prop_assert!(after.is_subset(&before), "{}: {:?} of {:?}", level, after, before);
                let references = ids(&full, call, |c| c.reference);
                prop_assert!(references.is_subset(&after), "{}: {:?} of {:?}", level, after, references);
                let plain = ids(&full, call, |c| c.baseline);
                if level == "minimal" && references.is_empty() && !plain.is_empty() {
                    prop_assert_eq!(&after, &plain, "{}: {:?}", level, call);
                }
                let chosen = degraded.chain(&degraded.select(&call.query()));
                prop_assert_eq!(chosen.is_some(), !before.is_empty());
            }
        }
    }

    /// What the cache says at a level is what selection says at it.
    #[test]
    fn a_cached_decision_of_a_level_equals_the_uncached_one(
        world in world(), marks in marks(), base in call(), others in prop::collection::vec(variant(), 1..30),
    ) {
        let full = marks.spec(&world).build(1).unwrap();
        let calls: Vec<RandomCall> = others.into_iter().map(|v| v.of(&base)).collect();
        for restriction in marks.levels(&full, &world, std::slice::from_ref(&base)) {
            let mut spec = marks.spec(&world);
            spec.restriction = restriction;
            let snapshot = spec.build(2).unwrap();
            let cache = SelectionCache::new(CacheConfig { max_entries: 64, ..CacheConfig::default() });
            for query in calls.iter().chain(&calls).map(RandomCall::query) {
                let expected = snapshot.chain(&snapshot.select(&query));
                let found = cache.chain(&snapshot, &query, || {
                    let decision = snapshot.select(&query);
                    (snapshot.chain(&decision), decision.uniform)
                });
                prop_assert_eq!(found, expected, "{:?}", query);
            }
        }
    }

    /// Switched off, references and plain torch are all that runs; a call that one of them can serve is served.
    #[test]
    fn switched_off_means_references_and_plain_torch(world in world(), marks in marks(), calls in prop::collection::vec(call(), 1..12)) {
        let mut world = world;
        world.rules.clear();
        // Too little memory rules plain torch out while others can serve, and not when it is the last one.
        world.free = None;
        let full = marks.spec(&world).build(1).unwrap();
        let mut spec = marks.spec(&world);
        spec.settings.enabled = false;
        let off = spec.build(2).unwrap();
        for call in &calls {
            let allowed = ids(&full, call, |c| c.reference || c.baseline);
            let found = ids(&off, call, |_| true);
            prop_assert!(found.is_subset(&allowed), "{:?} of {:?}", found, allowed);
            prop_assert_eq!(found.is_empty(), allowed.is_empty(), "{:?}", call);
        }
    }
}
