//! Properties of selection, on random worlds.

mod world;

use lz_model::{Catalog, DType, DeviceIx, Layout, Platform, Query};
use lz_select::{CacheConfig, Chain, Decision, MemoryState, SelectionCache, Snapshot};
use proptest::prelude::*;
use world::{RandomCall, RandomKernel, World, call, variant, world};

fn cached(cache: &SelectionCache, snapshot: &Snapshot, query: &Query) -> Option<lz_select::Chain> {
    cache.chain(snapshot, query, || {
        let decision = snapshot.select(query);
        (snapshot.chain(&decision), decision.uniform)
    })
}

/// The checker of property (b): plain code over the raw descriptor and the raw call. It shares
/// nothing with the compiled constraints.
fn legal(world: &World, k: &RandomKernel, c: &RandomCall) -> bool {
    let (d, s) = (&k.descriptor, &c.sizes);
    let target = Catalog::get().find(&d.operation).unwrap();
    let serves_op = target.ops.iter().any(|&ix| Catalog::get().op(ix).id() == c.op_id());
    let size = |name: &str| match name {
        "batch" => s.batch,
        "seq_q" => s.seq_q,
        "seq_k" => s.seq_k,
        "heads" => s.heads,
        "head_dim" => s.head_dim,
        other => panic!("{other}"),
    };
    let dims_ok = d.dims.iter().all(|(name, rule)| {
        let n = size(name);
        !(rule.min.is_some_and(|m| n < m)
            || rule.max.is_some_and(|m| n > m)
            || rule.multiple_of.is_some_and(|m| n % m != 0)
            || rule.one_of.as_ref().is_some_and(|list| !list.contains(&n)))
    });
    let causal_ok = match d.operation.as_str() {
        "attention.causal" => c.causal,
        "attention.full" => !c.causal,
        _ => c.causal || d.params.contains_key("causal"),
    };
    let softcap_ok = c.softcap == 0.0 || d.params.contains_key("softcap") && c.softcap <= 50.0;
    let mask_ok = match c.mask {
        None => true,
        Some(dtype) => d.inputs.contains_key("attn_mask") && dtype == DType::Bool,
    };
    let any_layout = d.layouts.contains(&Layout::Strided);
    let layout_ok = any_layout || d.layouts.contains(&c.layout);
    let layout_fixable = !world.strict; // BSHD and BHSD turn into each other
    // The made-up tensors are contiguous exactly when the last stride is one.
    let memory_ok = c.last_stride == 1 || !d.requires_last_dim_stride1 && !d.requires_contiguous;
    let contiguous_as_given = c.last_stride == 1;
    let strides_ok = memory_ok && (!d.requires_contiguous || contiguous_as_given) || !world.strict;
    let workspace_ok = match (k.workspace_per_position, world.free) {
        (Some(bytes), Some(free)) => s.batch * s.seq_q * bytes <= free,
        _ => true,
    };
    let grid_ok = k.tile.is_none_or(|tile| (s.seq_q + tile - 1) / tile <= i64::from(world.max_grid_y));
    serves_op
        && d.platforms.contains(&Platform::Cuda)
        && d.min_sm.is_none_or(|min| min <= 86)
        && d.dtypes.contains(c.dtype)
        && dims_ok
        && causal_ok
        && softcap_ok
        && mask_ok
        && (layout_ok || layout_fixable)
        && strides_ok
        && (d.shares_kv_heads || s.heads == s.kv_heads)
        && (!c.deterministic || d.deterministic)
        && (!c.capturing || d.graph_safe)
        && k.conditions.iter().all(|cond| cond.holds(s))
        && workspace_ok
        && grid_ok
}

fn names(snapshot: &Snapshot, decision: &Decision) -> Vec<(String, Vec<String>, String)> {
    decision
        .candidates
        .iter()
        .map(|c| {
            let kernel = snapshot.kernel(c.kernel);
            let reasons = c.reasons.iter().map(|r| format!("{} {r}", r.code())).collect();
            (format!("{}@{}", kernel.id, kernel.version), reasons, format!("{:?} {:?}", c.terms, c.transforms))
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    /// (a) What the cache says is what selection says, always, in whatever order calls come. Most
    /// calls differ from one base call in one size only, so that many of them fall into one cell.
    #[test]
    fn a_cached_decision_equals_the_uncached_one(world in world(), base in call(), others in prop::collection::vec(variant(), 1..60)) {
        let calls: Vec<RandomCall> = others.into_iter().map(|v| v.of(&base)).collect();
        let snapshot = world.spec().build(1).unwrap();
        let cache = SelectionCache::new(CacheConfig { max_entries: 64, ..CacheConfig::default() });
        for _ in 0..2 {
            for c in &calls {
                let query = c.query();
                let expected = snapshot.chain(&snapshot.select(&query));
                prop_assert_eq!(cached(&cache, &snapshot, &query), expected, "{:?}", query);
            }
        }
    }

    /// Free memory changes under a snapshot, and nothing is built anew: what is remembered is used only while every
    /// workspace that fitted still fits, and what did not fit still does not.
    #[test]
    fn a_cached_decision_follows_free_memory(
        world in world(),
        base in call(),
        others in prop::collection::vec(variant(), 1..20),
        amounts in prop::collection::vec(prop::option::weighted(0.9, 0i64..2_000_000), 1..8),
    ) {
        let calls: Vec<RandomCall> = others.into_iter().map(|v| v.of(&base)).collect();
        let snapshot = world.spec().build(1).unwrap();
        let cache = SelectionCache::new(CacheConfig { max_entries: 64, ..CacheConfig::default() });
        for free in amounts {
            let state = free.map(|free| MemoryState { free, largest_block: free });
            snapshot.spec().memory.set(DeviceIx(0), state);
            let fresh = World { free, ..world.clone() }.spec().build(1).unwrap();
            for c in &calls {
                let query = c.query();
                let kernels = |chain: Option<Chain>| chain.map(|c| c.steps().collect::<Vec<_>>());
                let expected = kernels(fresh.chain(&fresh.select(&query)));
                prop_assert_eq!(kernels(cached(&cache, &snapshot, &query)), expected, "{:?} with {:?}", query, free);
            }
        }
    }

    /// The cells themselves: neighbours of a call that share its key share its chain, unless the
    /// decision says that they may not.
    #[test]
    fn neighbours_in_a_cell_share_the_decision(world in world(), c in call(), others in prop::collection::vec(variant(), 1..60)) {
        let snapshot = world.spec().build(1).unwrap();
        let query = c.query();
        let decision = snapshot.select(&query);
        for other in others {
            let neighbour = other.of(&c).query();
            if decision.uniform && snapshot.cell_key(&neighbour) == snapshot.cell_key(&query) {
                let theirs = snapshot.select(&neighbour);
                prop_assert_eq!(snapshot.chain(&theirs), snapshot.chain(&decision), "{:?} and {:?}", query, neighbour);
            }
        }
    }

    /// (b) A kernel is accepted exactly when an independent brute-force check finds nothing against
    /// it, policy aside; so a chosen kernel never violates its own constraints.
    #[test]
    fn legality_agrees_with_brute_force(mut world in world(), c in call()) {
        world.rules.clear();
        let snapshot = world.spec().build(1).unwrap();
        let decision = snapshot.select(&c.query());
        for k in &world.kernels {
            let found = decision.candidates.iter().find(|x| {
                let d = snapshot.kernel(x.kernel);
                d.id == k.descriptor.id && d.version == k.descriptor.version
            });
            let accepted = found.is_some_and(|x| x.accepted());
            prop_assert_eq!(accepted, legal(&world, k, &c), "{:#?}\n{:?}", k.descriptor, found.map(|f| &f.reasons));
        }
    }

    /// (c) The order of registration never changes a decision.
    #[test]
    fn registration_order_does_not_matter(world in world(), calls in prop::collection::vec(call(), 1..10), rotate in 0usize..10) {
        let snapshot = world.spec().build(1).unwrap();
        let mut spec = world.spec();
        spec.kernels.reverse();
        let n = spec.kernels.len();
        spec.kernels.rotate_left(rotate % n);
        let shuffled = spec.build(1).unwrap();
        for c in &calls {
            let (a, b) = (snapshot.select(&c.query()), shuffled.select(&c.query()));
            prop_assert_eq!(names(&snapshot, &a), names(&shuffled, &b));
            prop_assert_eq!(a.ranking, b.ranking);
            prop_assert_eq!(a.basis, b.basis);
        }
    }

    /// A deny wins over everything; a lock on a valid kernel wins over everything else, and on an
    /// invalid one gives its reason and no other kernel.
    #[test]
    fn locks_and_denials_are_obeyed(world in world(), c in call()) {
        let snapshot = world.spec().build(1).unwrap();
        let decision = snapshot.select(&c.query());
        let applied = |kind: u8| world.rules.iter().filter(move |(cond, k, _)| *k == kind && cond.holds(&c.sizes)).map(|(_, _, target)| format!("k{target:02}"));
        if let Some(chosen) = decision.chosen() {
            let id = &snapshot.kernel(chosen.kernel).id;
            prop_assert!(applied(3).all(|denied| *id != denied), "{id} was denied");
            if let Some(locked) = applied(4).next() {
                prop_assert_eq!(id, &locked);
            }
        }
    }
}

/// `LZ_TEST_SCALE=full` runs a hundred times as many cases.
fn cases() -> u32 {
    match std::env::var("LZ_TEST_SCALE").as_deref() {
        Ok("full" | "soak") => 25_600,
        _ => 256,
    }
}
