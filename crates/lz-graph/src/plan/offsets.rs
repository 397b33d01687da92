//! Offsets in one arena for memory that is in use from one step to another.

use std::cmp::Reverse;

/// Memory that needs a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Bytes, a multiple of the alignment.
    pub bytes: usize,
    /// The first step it is in use.
    pub first: usize,
    /// The last step it is in use.
    pub last: usize,
}

impl Item {
    fn meets(&self, other: &Item) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// How offsets are found. Each takes one item after the other, and looks only at those placed before that are in use at
/// a step at which the item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fit {
    /// The largest first; the lowest offset that is free.
    BySize,
    /// As they are first used; the lowest offset that is free.
    ByStep,
    /// The largest first; the smallest gap that is large enough.
    BestBySize,
    /// As they are first used; the smallest gap that is large enough.
    BestByStep,
    /// As [`Fit::BySize`], and then [`TRIES`] times again with those that reach the end of the arena before the others.
    Repaired,
}

/// How often [`Fit::Repaired`] tries again.
pub const TRIES: usize = 16;

impl Fit {
    /// All of them, the best of most models first.
    pub const ALL: &'static [Fit] = &[Fit::BySize, Fit::BestBySize, Fit::ByStep, Fit::BestByStep, Fit::Repaired];

    fn best(self) -> bool {
        matches!(self, Fit::BestBySize | Fit::BestByStep)
    }

    fn sequence(self, items: &[Item]) -> Vec<usize> {
        let mut sequence: Vec<usize> = (0..items.len()).collect();
        match self {
            Fit::ByStep | Fit::BestByStep => sequence.sort_by_key(|&i| (items[i].first, Reverse(items[i].bytes))),
            Fit::BySize | Fit::BestBySize | Fit::Repaired => sequence.sort_by_key(|&i| {
                let Item { bytes, first, last } = items[i];
                (Reverse(bytes), Reverse(last - first), first)
            }),
        }
        sequence
    }
}

/// An offset for each item, and the bytes of the arena.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offsets {
    /// Bytes from the start of the arena, for each item.
    pub offsets: Vec<usize>,
    /// Bytes of the arena.
    pub arena: usize,
}

/// Gives each item an offset. `enough`: an arena of that size is as small as it can be, so nothing is tried after it.
pub fn assign(items: &[Item], fit: Fit, enough: usize) -> Offsets {
    let mut sequence = fit.sequence(items);
    let mut found = in_sequence(items, &sequence, fit.best());
    if fit != Fit::Repaired {
        return found;
    }
    for _ in 0..TRIES {
        if found.arena <= enough {
            break;
        }
        // Those that reach the end of the arena go first; the others keep their turns.
        let (mut high, rest): (Vec<usize>, Vec<usize>) =
            sequence.iter().partition(|&&i| items[i].bytes > 0 && found.offsets[i] + items[i].bytes == found.arena);
        high.extend(rest);
        let next = in_sequence(items, &high, false);
        sequence = high;
        if next.arena < found.arena {
            found = next;
        }
    }
    found
}

fn in_sequence(items: &[Item], sequence: &[usize], best: bool) -> Offsets {
    let mut offsets = vec![0; items.len()];
    let mut arena = 0;
    // Items that have a place, by their offsets.
    let mut placed: Vec<(usize, Item)> = Vec::with_capacity(items.len());
    for &i in sequence {
        let item = items[i];
        if item.bytes == 0 {
            continue;
        }
        let mut end = 0;
        let mut gap: Option<(usize, usize)> = None;
        for (offset, other) in placed.iter().filter(|(_, other)| other.meets(&item)) {
            let free = offset.saturating_sub(end);
            if free >= item.bytes && gap.is_none_or(|(smallest, _)| free < smallest) {
                gap = Some((free, end));
                if !best {
                    break;
                }
            }
            end = end.max(offset + other.bytes);
        }
        let offset = gap.map_or(end, |(_, offset)| offset);
        offsets[i] = offset;
        arena = arena.max(offset + item.bytes);
        placed.insert(placed.partition_point(|(other, _)| *other <= offset), (offset, item));
    }
    Offsets { offsets, arena }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::bounds::peak;
    use proptest::prelude::*;

    fn item(bytes: usize, first: usize, last: usize) -> Item {
        Item { bytes, first, last }
    }

    #[test]
    fn the_smallest_gap_leaves_the_larger_one() {
        // At step 3 there is a gap of 4 at 0, and one of 2 at 5.
        let items = [item(4, 0, 2), item(1, 1, 9), item(2, 2, 2), item(1, 2, 9), item(2, 3, 9), item(4, 4, 9)];
        let first = assign(&items, Fit::ByStep, 0);
        assert_eq!((first.offsets, first.arena), (vec![0, 4, 5, 7, 0, 8], 12));
        let best = assign(&items, Fit::BestByStep, 0);
        assert_eq!((best.offsets, best.arena), (vec![0, 4, 5, 7, 5, 0], 8));
    }

    /// The smallest arena over every sequence in which items can take the lowest free offset. One of them is the best
    /// there is.
    fn smallest(items: &[Item]) -> usize {
        fn go(items: &[Item], sequence: &mut Vec<usize>, best: &mut usize) {
            if sequence.len() == items.len() {
                *best = (*best).min(in_sequence(items, sequence, false).arena);
            }
            for i in 0..items.len() {
                if !sequence.contains(&i) {
                    sequence.push(i);
                    go(items, sequence, best);
                    sequence.pop();
                }
            }
        }
        let mut best = usize::MAX;
        go(items, &mut Vec::new(), &mut best);
        best
    }

    proptest! {
        #[test]
        fn items_in_use_together_do_not_overlap(
            given in prop::collection::vec((0usize..5, 0usize..6, 0usize..4), 1..7),
        ) {
            let items: Vec<Item> = given.iter().map(|&(bytes, first, more)| item(bytes, first, first + more)).collect();
            let (least, best) = (peak(&items), smallest(&items));
            prop_assert!(least <= best);
            // The peak, step by step.
            let lives = |step: usize| move |item: &&Item| (item.first..=item.last).contains(&step);
            let live = |step| items.iter().filter(lives(step)).map(|item| item.bytes).sum::<usize>();
            prop_assert_eq!(least, (0..10).map(live).max().unwrap());
            for &fit in Fit::ALL {
                let Offsets { offsets, arena } = assign(&items, fit, least);
                for (i, a) in items.iter().enumerate() {
                    prop_assert!(offsets[i] + a.bytes <= arena);
                    for (j, b) in items.iter().enumerate().skip(i + 1).filter(|(_, b)| a.meets(b)) {
                        let apart = offsets[i] + a.bytes <= offsets[j] || offsets[j] + b.bytes <= offsets[i];
                        prop_assert!(apart || a.bytes == 0 || b.bytes == 0);
                    }
                }
                prop_assert!(best <= arena);
            }
            prop_assert!(assign(&items, Fit::Repaired, least).arena <= assign(&items, Fit::BySize, least).arena);
        }
    }
}
