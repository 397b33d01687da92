//! Plans for many sizes: a decision tree over the symbols of a graph, with plans for exact sizes in its leaves.
//!
//! Each level of the tree looks at one symbol and goes to the interval its number lies in. A leaf is a bucket: sizes
//! for which the same kernels are chosen. Within a bucket each exact size has a plan of its own, since no size is
//! padded; plans are made when they are needed first, and the least recently used one goes when there are too many. All
//! share one arena, as large as the largest of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use smallvec::SmallVec;

use super::MemoryPlan;
use crate::ir::{Symbol, Symbols};

/// A number for each symbol, in the order of the levels.
type Key = SmallVec<[i64; 4]>;

/// One level of the tree: the intervals of one symbol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Level {
    symbol: Symbol,
    /// The first number of each interval. The first interval starts at the least number the symbol may have.
    starts: Vec<i64>,
}

impl Level {
    /// Intervals that start at some numbers; those outside the range of the symbol are left out.
    pub fn new(symbol: Symbol, starts: &[i64]) -> Level {
        let inside = |start: &i64| *start > symbol.min && symbol.max.is_none_or(|max| *start <= max);
        let mut starts: Vec<i64> = starts.iter().copied().filter(inside).chain([symbol.min]).collect();
        starts.sort_unstable();
        starts.dedup();
        Level { symbol, starts }
    }

    /// The intervals 1, 2–16, 17–64, 65–256, and so on by factors of 4: what is fastest changes with the number of rows
    /// of a matrix product, by its order of magnitude.
    pub fn by_magnitude(symbol: Symbol) -> Level {
        let most = symbol.max.unwrap_or(1 << 40);
        let growing = std::iter::successors(Some(16i64), |end| end.checked_mul(4)).take_while(|end| *end < most);
        let starts: Vec<i64> = [2].into_iter().chain(growing.map(|end| end + 1)).collect();
        Level::new(symbol, &starts)
    }

    /// The symbol.
    pub fn symbol(&self) -> &Symbol {
        &self.symbol
    }

    /// The least and the greatest number of each interval.
    pub fn intervals(&self) -> impl Iterator<Item = (i64, Option<i64>)> {
        let ends = self.starts[1..].iter().map(|start| Some(start - 1)).chain([self.symbol.max]);
        self.starts.iter().copied().zip(ends)
    }

    fn interval(&self, size: i64) -> Option<usize> {
        let inside = size >= self.symbol.min && self.symbol.max.is_none_or(|max| size <= max);
        inside.then(|| self.starts.partition_point(|start| *start <= size) - 1)
    }
}

/// A leaf of the tree: which interval of each level.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bucket(pub SmallVec<[usize; 4]>);

/// Why there is no bucket for some sizes. The caller decides what happens then: run without a plan, or fail.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoBucket {
    /// A symbol has a number outside its range.
    #[error(
        "{symbol} is {size}, plans are made for {min} to {}",
        max.map_or("any size".to_owned(), |max| max.to_string())
    )]
    OutOfRange {
        /// Which.
        symbol: String,
        /// Its number.
        size: i64,
        /// The least it may be.
        min: i64,
        /// The greatest it may be.
        max: Option<i64>,
    },
    /// A symbol has no number.
    #[error("the size '{0}' is not known")]
    Unknown(String),
}

/// What has an arena.
pub trait HasArena {
    /// Its bytes.
    fn arena(&self) -> usize;
}

impl HasArena for MemoryPlan {
    fn arena(&self) -> usize {
        self.arena
    }
}

struct Entry<P> {
    key: Key,
    plan: Arc<P>,
    used: u64,
}

/// Plans for many sizes.
pub struct Buckets<P> {
    levels: Vec<Level>,
    leaves: BTreeMap<Bucket, Vec<Entry<P>>>,
    most: usize,
    count: usize,
    clock: u64,
    arena: usize,
}

impl<P: HasArena> Buckets<P> {
    /// No plans yet. `most`: how many are kept, at least one.
    pub fn new(levels: Vec<Level>, most: usize) -> Buckets<P> {
        Buckets { levels, leaves: BTreeMap::new(), most: most.max(1), count: 0, clock: 0, arena: 0 }
    }

    /// The levels of the tree.
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// How many plans are kept.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes of an arena in which every plan made so far runs.
    pub fn arena(&self) -> usize {
        self.arena
    }

    /// The bucket of some sizes.
    pub fn bucket(&self, symbols: &Symbols) -> Result<Bucket, NoBucket> {
        Ok(self.find(symbols)?.0)
    }

    fn find(&self, symbols: &Symbols) -> Result<(Bucket, Key), NoBucket> {
        let mut found = (Bucket(SmallVec::new()), Key::new());
        for level in &self.levels {
            let Symbol { name, min, max } = &level.symbol;
            let size = symbols.get(name).ok_or_else(|| NoBucket::Unknown(name.clone()))?;
            let interval = level.interval(size).ok_or_else(|| {
                let symbol = name.clone();
                NoBucket::OutOfRange { symbol, size, min: *min, max: *max }
            })?;
            found.0.0.push(interval);
            found.1.push(size);
        }
        Ok(found)
    }

    /// The plan for some sizes. `make` makes it if it is not kept; it is told the bucket.
    pub fn get<E: From<NoBucket>>(
        &mut self,
        symbols: &Symbols,
        make: impl FnOnce(&Bucket) -> Result<P, E>,
    ) -> Result<Arc<P>, E> {
        let (bucket, key) = self.find(symbols)?;
        self.clock += 1;
        let used = self.clock;
        let leaf = self.leaves.get_mut(&bucket);
        if let Some(entry) = leaf.and_then(|leaf| leaf.iter_mut().find(|entry| entry.key == key)) {
            entry.used = used;
            return Ok(entry.plan.clone());
        }
        let plan = Arc::new(make(&bucket)?);
        self.arena = self.arena.max(plan.arena());
        if self.count == self.most {
            self.forget();
        }
        self.leaves.entry(bucket).or_default().push(Entry { key, plan: plan.clone(), used });
        self.count += 1;
        Ok(plan)
    }

    /// Forgets the plan that was not used for the longest time. Runs that still use it keep it.
    fn forget(&mut self) {
        let oldest = |leaf: &Vec<Entry<P>>| (0..leaf.len()).min_by_key(|&at| leaf[at].used);
        let leaves = self.leaves.iter().filter_map(|(bucket, leaf)| Some((bucket, oldest(leaf)?, leaf)));
        let Some((bucket, at, _)) = leaves.min_by_key(|(_, at, leaf)| leaf[*at].used) else { return };
        let bucket = bucket.clone();
        if let Some(leaf) = self.leaves.get_mut(&bucket) {
            leaf.swap_remove(at);
            self.count -= 1;
            if leaf.is_empty() {
                self.leaves.remove(&bucket);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, PartialEq)]
    struct Made(i64, usize);

    impl HasArena for Made {
        fn arena(&self) -> usize {
            self.1
        }
    }

    fn symbol(name: &str, min: i64, max: Option<i64>) -> Symbol {
        Symbol { name: name.to_owned(), min, max }
    }

    #[test]
    fn intervals_grow_by_factors_of_four() {
        let intervals = |min, max| Level::by_magnitude(symbol("s", min, max)).intervals().collect::<Vec<_>>();
        let some = |a, b| (a, Some(b));
        assert_eq!(intervals(1, Some(1024)), [some(1, 1), some(2, 16), some(17, 64), some(65, 256), some(257, 1024)]);
        assert_eq!(intervals(10, Some(20)), [some(10, 16), some(17, 20)]);
        assert_eq!(intervals(5, Some(5)), [some(5, 5)]);
        let open = intervals(1, None);
        assert_eq!((open[2], open[open.len() - 1].1), (some(17, 64), None));
    }

    #[test]
    fn sizes_out_of_range_are_told() {
        let mut buckets = Buckets::<Made>::new(vec![Level::by_magnitude(symbol("s", 2, Some(9)))], 4);
        let at = |n| Symbols::from_iter([("s", n)]);
        for size in [i64::MIN, 1, 10, i64::MAX] {
            let error = buckets.get::<NoBucket>(&at(size), |_| unreachable!("nothing is made")).unwrap_err();
            assert_eq!(error, NoBucket::OutOfRange { symbol: "s".into(), size, min: 2, max: Some(9) });
        }
        assert_eq!(buckets.bucket(&Symbols::new()), Err(NoBucket::Unknown("s".into())));
        assert_eq!(buckets.bucket(&at(10)).unwrap_err().to_string(), "s is 10, plans are made for 2 to 9");
        // What cannot be made is not kept.
        let failed = buckets.get(&at(3), |bucket| Err(NoBucket::Unknown(format!("{bucket:?}"))));
        assert!(failed.is_err() && buckets.is_empty());
    }

    proptest! {
        #[test]
        fn the_plans_used_last_are_kept(
            asked in prop::collection::vec((1i64..40, 1i64..4), 1..60),
            most in 1usize..8,
        ) {
            let levels = vec![
                Level::by_magnitude(symbol("s", 1, Some(40))),
                Level::new(symbol("b", 1, None), &[2, 3]),
            ];
            let mut buckets = Buckets::new(levels, most);
            // The sizes used last, the latest at the end.
            let mut kept: Vec<(i64, i64)> = Vec::new();
            let mut largest = 0;
            for (s, b) in asked {
                let mut made = false;
                let plan = buckets
                    .get::<NoBucket>(&Symbols::from_iter([("s", s), ("b", b)]), |bucket| {
                        made = true;
                        let interval = if s == 1 { 0 } else if s <= 16 { 1 } else { 2 };
                        assert_eq!(bucket.0[..], [interval, b as usize - 1]);
                        Ok(Made(100 * s + b, (s * b) as usize))
                    })
                    .unwrap();
                prop_assert_eq!(plan.0, 100 * s + b);
                prop_assert_eq!(made, !kept.contains(&(s, b)));
                kept.retain(|one| *one != (s, b));
                kept.push((s, b));
                if kept.len() > most {
                    kept.remove(0);
                }
                largest = largest.max((s * b) as usize);
                prop_assert_eq!((buckets.len(), buckets.arena()), (kept.len(), largest));
            }
        }
    }
}
