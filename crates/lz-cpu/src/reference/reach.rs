//! Which keys a query may attend to by position.

use lz_model::KernelArgs;

use super::arguments::Arguments;

/// The causal bound and the sliding window.
#[derive(Clone, Copy)]
pub struct Reach {
    /// No key after the query.
    pub causal: bool,
    /// How many keys before the query; negative for all.
    pub left: i64,
    /// How many keys after the query; negative for all.
    pub right: i64,
}

impl Reach {
    /// What the call says; an operation without these parameters has no bound.
    pub fn of(args: &KernelArgs<'_, '_>) -> Reach {
        Reach {
            causal: args.flag_or("causal", false),
            left: args.int_or("window_left", -1),
            right: args.int_or("window_right", -1),
        }
    }

    /// Whether a query at `position` may attend to the key at `key`.
    pub fn covers(self, position: i64, key: i64) -> bool {
        let ahead = key - position;
        !(self.causal && ahead > 0 || self.left >= 0 && -ahead > self.left || self.right >= 0 && ahead > self.right)
    }

    /// The first key that queries from `position` on may attend to.
    pub fn first_key(self, position: i64) -> i64 {
        if self.left < 0 { 0 } else { position.saturating_sub(self.left).max(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_combine() {
        let keys = |reach: Reach| (0..6).filter(|&key| reach.covers(3, key)).collect::<Vec<_>>();
        let all = Reach { causal: false, left: -1, right: -1 };
        assert_eq!(keys(all), [0, 1, 2, 3, 4, 5]);
        assert_eq!(keys(Reach { causal: true, ..all }), [0, 1, 2, 3]);
        assert_eq!(keys(Reach { causal: true, left: 1, right: 1 }), [2, 3]);
        assert_eq!(keys(Reach { left: 0, right: 0, ..all }), [3]);
        assert_eq!(keys(Reach { left: i64::MAX, right: i64::MAX, ..all }), [0, 1, 2, 3, 4, 5]);
        assert_eq!((Reach { left: 1, ..all }.first_key(3), all.first_key(3)), (2, 0));
        assert_eq!(Reach { left: i64::MAX, ..all }.first_key(-3), 0);
    }
}
