//! Which bytes tensors lie in, and whether two of them share some.

use crate::DType;

/// A range of addresses: the first, and one past the last. Empty when both are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    /// The first address.
    pub start: usize,
    /// One past the last.
    pub end: usize,
}

impl Bytes {
    /// The addresses the elements of a tensor lie in: from the lowest to one past the highest byte.
    pub fn of(dtype: DType, shape: &[i64], strides: &[i64], start: usize) -> Bytes {
        if shape.contains(&0) {
            return Bytes { start, end: start };
        }
        let (mut low, mut high) = (0i64, 0i64);
        for (&n, &stride) in shape.iter().zip(strides) {
            let span = (n - 1) * stride;
            if span < 0 { low += span } else { high += span }
        }
        // `high` is not negative, `low` is not positive: bytes are rounded away from the first element.
        let bits = i64::from(dtype.bits());
        let (below, above) = ((-low * bits + 7) / 8, ((high + 1) * bits + 7) / 8);
        Bytes { start: start.wrapping_sub(below as usize), end: start.wrapping_add(above as usize) }
    }

    /// Whether some byte is in both.
    pub fn overlaps(self, other: Bytes) -> bool {
        self.start < self.end && other.start < other.end && self.start < other.end && other.start < self.end
    }
}

/// Two ranges that share a byte, by their places, if there are two. Call it before any `&mut` to the memory exists.
pub fn overlap(ranges: &[Bytes]) -> Option<(usize, usize)> {
    let pairs = (0..ranges.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
    pairs.into_iter().find(|&(a, b)| ranges[a].overlaps(ranges[b]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_reach_from_the_lowest_to_the_highest_element() {
        let start = 1000;
        assert_eq!(Bytes::of(DType::F32, &[2, 3], &[3, 1], start), Bytes { start: 1000, end: 1024 });
        assert_eq!(Bytes::of(DType::F32, &[3], &[-1], start), Bytes { start: 992, end: 1004 });
        assert_eq!(Bytes::of(DType::I4, &[3], &[1], start), Bytes { start: 1000, end: 1002 });
        assert_eq!(Bytes::of(DType::F32, &[0, 3], &[3, 1], start), Bytes { start: 1000, end: 1000 });
    }

    proptest! {
        #[test]
        fn an_overlap_is_a_byte_in_both(ranges in proptest::collection::vec((0usize..40, 0usize..12), 0..5)) {
            let ranges: Vec<Bytes> = ranges.iter().map(|&(start, n)| Bytes { start, end: start + n }).collect();
            let shared = |a: usize, b: usize| (0..64).any(|at| [a, b].iter().all(|&i| (ranges[i].start..ranges[i].end).contains(&at)));
            match overlap(&ranges) {
                Some((a, b)) => prop_assert!(a < b && shared(a, b)),
                None => prop_assert!((0..ranges.len()).all(|b| (0..b).all(|a| !shared(a, b)))),
            }
        }
    }
}
