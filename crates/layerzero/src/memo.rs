//! A memo for language bindings: what was decided for a call, found again by the call's own words.
//!
//! Binding arguments costs more than looking a chain up, so a binding describes a call by a few words (shapes,
//! strides, dtypes, flags: all that can influence the decision) and keeps what it decided under them.
//! Equality of all words decides; a hash only finds the place. An entry holds as long as the engine's
//! [`version`](crate::Core::version) it was made under stands.

/// Entries one place may hold; the older goes first.
const WAYS: usize = 2;

struct Entry<V> {
    version: u64,
    words: Box<[u64]>,
    value: V,
}

/// A bounded table from words to values.
pub struct Memo<V> {
    sets: Box<[[Option<Entry<V>>; WAYS]]>,
}

impl<V> Memo<V> {
    /// A memo of at most `2 * places` entries; `places` is rounded up to a power of two.
    pub fn new(places: usize) -> Memo<V> {
        let places = places.max(1).next_power_of_two();
        Memo { sets: (0..places).map(|_| [const { None }; WAYS]).collect() }
    }

    /// How many places there are.
    pub fn places(&self) -> usize {
        self.sets.len()
    }

    fn place(&self, words: &[u64]) -> usize {
        // Four independent lanes: the multiplications of one step overlap.
        const K: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut lanes = [K, K ^ 1, K ^ 2, K ^ 3];
        for chunk in words.chunks(4) {
            for (lane, word) in lanes.iter_mut().zip(chunk) {
                *lane = (*lane ^ word).wrapping_mul(K).rotate_left(29);
            }
        }
        let hash = (lanes[0] ^ lanes[1].rotate_left(16)).wrapping_mul(K) ^ (lanes[2] ^ lanes[3].rotate_left(32));
        (hash ^ hash >> 32) as usize & (self.sets.len() - 1)
    }

    /// What was kept under these words and this version.
    #[inline]
    pub fn find(&self, version: u64, words: &[u64]) -> Option<&V> {
        let set = &self.sets[self.place(words)];
        let fits = |entry: &&Entry<V>| entry.version == version && *entry.words == *words;
        set.iter().flatten().find(fits).map(|entry| &entry.value)
    }

    /// Keeps a value. What it displaces is given back, for the caller to drop when it is safe.
    pub fn keep(&mut self, version: u64, words: &[u64], value: V) -> Option<V> {
        let place = self.place(words);
        let set = &mut self.sets[place];
        let entry = Some(Entry { version, words: words.into(), value });
        // The same call's, else a free place, else one of another version, else the oldest.
        let position =
            |fits: fn(&Option<Entry<V>>, u64, &[u64]) -> bool| set.iter().position(|e| fits(e, version, words));
        let same = position(|e, _, words| e.as_ref().is_some_and(|e| *e.words == *words));
        let other = || position(|e, version, _| e.as_ref().is_none_or(|e| e.version != version));
        let at = same.or_else(other).unwrap_or(WAYS - 1);
        let old = std::mem::replace(&mut set[at], entry);
        set[..=at].rotate_right(1);
        old.map(|entry| entry.value)
    }

    /// Entries held.
    pub fn len(&self) -> usize {
        self.sets.iter().flatten().flatten().count()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a map that never forgets: an answer is the last value kept under just these words and
        /// this version, or none.
        #[test]
        fn it_never_gives_another_calls_value(
            steps in proptest::collection::vec(
                (0u64..3, proptest::collection::vec(0u64..4, 0..5), any::<bool>()), 1..200,
            )
        ) {
            let mut memo = Memo::new(4);
            let mut model: HashMap<(u64, Vec<u64>), usize> = HashMap::new();
            for (i, (version, words, write)) in steps.into_iter().enumerate() {
                if write {
                    memo.keep(version, &words, i);
                    model.insert((version, words.clone()), i);
                    prop_assert_eq!(memo.find(version, &words), Some(&i));
                }
                if let Some(found) = memo.find(version, &words) {
                    prop_assert_eq!(Some(found), model.get(&(version, words)));
                }
                prop_assert!(memo.len() <= 8);
            }
        }
    }

    #[test]
    fn two_calls_share_a_place() {
        let mut memo = Memo::new(1);
        memo.keep(1, &[1], 'a');
        memo.keep(1, &[2], 'b');
        assert_eq!((memo.find(1, &[1]), memo.find(1, &[2])), (Some(&'a'), Some(&'b')));
        assert_eq!(memo.keep(1, &[3], 'c'), Some('a'));
        assert_eq!(memo.find(2, &[3]), None);
    }
}
