//! Loops over the elements of several strided tensors at once.
//!
//! Each tensor has strides for the axes of the result, 0 where it is broadcast. Axes that every tensor walks as one are merged, so
//! that most calls have one axis. The coordinates of the others are an odometer: the last one is counted up, and carries over.

use std::ops::Range;

use lz_abi::{KernelError, Threads};

use super::wrong;

/// Axes that a loop has at most after merging, and tensors before it.
pub const RANK: usize = 16;

/// Axes with a stride for each of `N` tensors, the outermost first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loop<const N: usize> {
    rank: usize,
    sizes: [usize; RANK],
    strides: [[isize; N]; RANK],
}

/// Sizes and strides of a tensor.
pub(super) type Layout<'a> = (&'a [i64], &'a [i64]);

impl<const N: usize> Loop<N> {
    /// The loop over `shape`, to which the tensors are broadcast: axes are aligned at the last one.
    pub fn new(shape: &[i64], tensors: [Layout<'_>; N]) -> Result<Loop<N>, KernelError> {
        let mut all = Loop { rank: 0, sizes: [1; RANK], strides: [[0; N]; RANK] };
        if shape.len() > RANK {
            return wrong(format!("a tensor has {} axes, more than {RANK}", shape.len()));
        }
        for (sizes, _) in &tensors {
            let fits = sizes.len() <= shape.len()
                && sizes.iter().rev().zip(shape.iter().rev()).all(|(&size, &of)| size == of || size == 1);
            if !fits {
                return wrong(format!("the shape {sizes:?} does not broadcast to {shape:?}"));
            }
        }
        for (axis, &size) in shape.iter().enumerate() {
            let mut strides = [0; N];
            for (stride, (sizes, of)) in strides.iter_mut().zip(&tensors) {
                if let Some(at) = (axis + sizes.len()).checked_sub(shape.len())
                    && sizes[at] != 1
                {
                    *stride = of[at] as isize;
                }
            }
            all.push(size as usize, strides);
        }
        Ok(all)
    }

    /// The loop without axes: one element.
    pub fn one() -> Loop<N> {
        Loop { rank: 0, sizes: [1; RANK], strides: [[0; N]; RANK] }
    }

    /// Adds an axis inside the others, merged with the last one where every tensor walks both as one.
    pub fn push(&mut self, size: usize, strides: [isize; N]) {
        if size == 1 {
            return;
        }
        if let Some(last) = self.rank.checked_sub(1)
            && self.strides[last].iter().zip(&strides).all(|(&outer, &inner)| outer == inner * size as isize)
        {
            self.sizes[last] *= size;
            self.strides[last] = strides;
            return;
        }
        self.sizes[self.rank] = size;
        self.strides[self.rank] = strides;
        self.rank += 1;
    }

    /// The axes in another order, merged again.
    pub fn sorted_by_key<K: Ord>(&self, key: impl Fn(&[isize; N]) -> K) -> Loop<N> {
        let mut order: [usize; RANK] = std::array::from_fn(|axis| axis);
        // An insertion sort: stable, and without memory of its own.
        for end in 1..self.rank {
            let mut at = end;
            while at > 0 && key(&self.strides[order[at - 1]]) > key(&self.strides[order[at]]) {
                order.swap(at - 1, at);
                at -= 1;
            }
        }
        let mut sorted = Loop::one();
        order[..self.rank].iter().for_each(|&axis| sorted.push(self.sizes[axis], self.strides[axis]));
        sorted
    }

    /// Elements of the result.
    pub fn len(&self) -> usize {
        self.sizes[..self.rank].iter().product()
    }

    /// Its axes: sizes and strides, the outermost first.
    pub fn axes(&self) -> impl DoubleEndedIterator<Item = (usize, [isize; N])> + ExactSizeIterator {
        (0..self.rank).map(|axis| (self.sizes[axis], self.strides[axis]))
    }

    /// The innermost axis; one element where there is none.
    pub fn inner(&self) -> (usize, [isize; N]) {
        match self.rank.checked_sub(1) {
            Some(last) => (self.sizes[last], self.strides[last]),
            None => (1, [0; N]),
        }
    }

    /// The same without its innermost axis.
    pub fn outer(&self) -> Loop<N> {
        Loop { rank: self.rank.saturating_sub(1), ..*self }
    }

    /// Calls `f` for pieces of the innermost axis that make up a range of elements: how many, and where they begin in each tensor,
    /// in elements from its first.
    #[inline(always)]
    pub fn pieces(&self, range: Range<usize>, mut f: impl FnMut(usize, [isize; N])) {
        if range.is_empty() {
            return;
        }
        let (inner, steps) = self.inner();
        let mut left = range.len();
        let (mut rest, mut at) = (range.start / inner, range.start % inner);
        let mut place: [isize; N] = std::array::from_fn(|i| at as isize * steps[i]);
        let mut coordinates = [0usize; RANK];
        let outer = self.rank.saturating_sub(1);
        for axis in (0..outer).rev() {
            coordinates[axis] = rest % self.sizes[axis];
            rest /= self.sizes[axis];
            (0..N).for_each(|i| place[i] += coordinates[axis] as isize * self.strides[axis][i]);
        }
        loop {
            let count = left.min(inner - at);
            f(count, place);
            left -= count;
            if left == 0 {
                return;
            }
            (0..N).for_each(|i| place[i] -= at as isize * steps[i]);
            at = 0;
            for axis in (0..outer).rev() {
                coordinates[axis] += 1;
                (0..N).for_each(|i| place[i] += self.strides[axis][i]);
                if coordinates[axis] < self.sizes[axis] {
                    break;
                }
                coordinates[axis] = 0;
                (0..N).for_each(|i| place[i] -= self.sizes[axis] as isize * self.strides[axis][i]);
            }
        }
    }
}

/// Parts that `total` elements are cut into: one where all of them take less time (`weight` times a byte copied) than a second
/// thread takes to start, otherwise a few for each thread, so that one that is late costs little.
pub(super) fn parts(total: usize, weight: usize, threads: Threads<'_>) -> usize {
    /// Bytes copied in about 5 µs of one core.
    const ONE_THREAD: usize = 64 << 10;
    if threads.count() == 1 { 1 } else { (total.saturating_mul(weight) / ONE_THREAD).clamp(1, threads.count() * 4) }
}

/// A part of `total`, by its number. Cut where cache lines of small elements are.
pub(super) fn part(total: usize, part: usize, parts: usize) -> Range<usize> {
    let cut =
        |at: usize| if at == parts { total } else { ((total as u128 * at as u128 / parts as u128) as usize) & !63 };
    cut(part)..cut(part + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn axes_that_are_walked_as_one_are_merged() {
        let all = Loop::<2>::new(&[2, 3, 4], [(&[2, 3, 4], &[12, 4, 1]), (&[3, 1], &[1, 1])]).unwrap();
        assert_eq!(all.axes().collect::<Vec<_>>(), [(2, [12, 0]), (3, [4, 1]), (4, [1, 0])]);
        let all = Loop::<2>::new(&[2, 1, 3, 4], [(&[2, 1, 3, 4], &[12, 7, 4, 1]), (&[4], &[1])]).unwrap();
        assert_eq!(all.axes().collect::<Vec<_>>(), [(6, [4, 0]), (4, [1, 1])]);
        assert!(Loop::<1>::new(&[2], [(&[3], &[1])]).is_err());
        assert!(Loop::<1>::new(&[2], [(&[2, 2], &[2, 1])]).is_err());
    }

    proptest! {
        #[test]
        fn pieces_are_the_elements_in_their_order(
            sizes in proptest::collection::vec(1usize..5, 0..5),
            strides in proptest::collection::vec((-9isize..9, -9isize..9), 5),
            (from, to) in (0.0f64..1.0, 0.0f64..1.0),
        ) {
            let mut all = Loop::<2>::one();
            sizes.iter().zip(&strides).for_each(|(&size, &(a, b))| all.push(size, [a, b]));
            let total: usize = sizes.iter().product();
            prop_assert_eq!(all.len(), total);
            let place = |mut at: usize| {
                let mut place = [0isize; 2];
                for (&size, &(a, b)) in sizes.iter().zip(&strides).rev() {
                    let index = (at % size) as isize;
                    at /= size;
                    place = [place[0] + index * a, place[1] + index * b];
                }
                place
            };
            let (from, to) = ((from * total as f64) as usize, (to * total as f64) as usize);
            let mut found = Vec::new();
            let steps = all.inner().1;
            all.pieces(from.min(to)..from.max(to), |count, at| {
                found.extend((0..count as isize).map(|i| [at[0] + i * steps[0], at[1] + i * steps[1]]));
            });
            prop_assert_eq!(found, (from.min(to)..from.max(to)).map(place).collect::<Vec<_>>());
        }

        #[test]
        fn parts_cover_all_once(total in 0usize..100_000, parts in 1usize..9) {
            let all: Vec<_> = (0..parts).map(|i| part(total, i, parts)).collect();
            prop_assert_eq!((all[0].start, all[parts - 1].end), (0, total));
            prop_assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start && pair[0].start <= pair[0].end));
        }
    }
}
