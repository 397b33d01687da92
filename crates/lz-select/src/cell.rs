//! Cells: the sets of shapes that share a decision.
//!
//! Along a bucketed dimension, a cell is an interval between neighbouring cuts together with the
//! divisibility by every modulus. The cuts are the performance buckets and *every* threshold any
//! registered constraint or rule puts on that dimension, so no constraint on a single dimension
//! changes its mind within a cell. Constraints that combine dimensions are judged for the whole
//! cell by interval arithmetic when a decision is made; where one is not constant, the decision
//! holds for the exact shape only.

use lz_expr::{Bounds, Env, Expr, Known, Value};
use lz_model::schema::DimKey;
use lz_model::{DimRule, Facts, MAX_DIMS, Op, Query};

/// The most moduli one dimension can have and still be bucketed.
const MAX_MODULI: usize = 16;

/// Numbers of bits a size can have, none included.
const BIT_LENGTHS: usize = 64;

/// How one dimension is cut.
#[derive(Clone, Debug)]
struct Axis {
    /// `None`: by exact value.
    cuts: Option<Vec<i64>>,
    moduli: Vec<i64>,
    /// By number of bits: how many cuts are at most the least size with so many. The search for a size begins there; it is
    /// on the path of every call that no thread has seen before.
    below: [u32; BIT_LENGTHS],
}

impl Default for Axis {
    fn default() -> Axis {
        Axis { cuts: None, moduli: Vec::new(), below: [0; BIT_LENGTHS] }
    }
}

impl Axis {
    /// Sorts the cuts and the moduli. With too many moduli for a key, sizes are their own keys.
    fn finish(&mut self) {
        self.moduli.sort_unstable();
        self.moduli.dedup();
        self.cuts = self.cuts.take().filter(|_| self.moduli.len() <= MAX_MODULI);
        let Some(cuts) = &mut self.cuts else { return };
        cuts.sort_unstable();
        cuts.dedup();
        for (bits, below) in self.below.iter_mut().enumerate().skip(1) {
            *below = cuts.partition_point(|&at| at <= 1 << (bits - 1)) as u32;
        }
    }

    /// How many cuts are at most `size`.
    fn interval(&self, size: i64) -> usize {
        let Some(cuts) = &self.cuts else { return 0 };
        let bits = i64::BITS - size.max(0).leading_zeros();
        let from = self.below[bits as usize] as usize;
        from + cuts[from..].iter().take_while(|&&at| at <= size).count()
    }

    /// The key of the cell `size` lies in.
    fn code(&self, size: i64) -> i64 {
        if self.cuts.is_none() {
            return size;
        }
        let divisible = self.moduli.iter().enumerate().fold(0, |bits, (i, &m)| bits | i64::from(divides(m, size)) << i);
        (self.interval(size) as i64) << MAX_MODULI | divisible
    }

    /// Least and largest size of the interval `size` lies in.
    fn bounds(&self, size: i64) -> (i64, i64) {
        let Some(cuts) = &self.cuts else {
            return (size, size);
        };
        let i = self.interval(size);
        let low = if i == 0 { 0 } else { cuts[i - 1] };
        (low.min(size), cuts.get(i).map_or(i64::MAX, |&at| at - 1))
    }
}

/// Whether `size` is a multiple of `m`; without a division where `m` is a power of two, as most are.
fn divides(m: i64, size: i64) -> bool {
    if m.count_ones() == 1 { size & (m - 1) == 0 } else { size % m == 0 }
}

/// How one operation's shapes are cut into cells.
#[derive(Clone, Debug)]
pub(crate) struct Cells {
    axes: [Axis; MAX_DIMS],
}

impl Cells {
    pub fn new(op: &Op) -> Cells {
        let mut axes: [Axis; MAX_DIMS] = Default::default();
        for (axis, dim) in axes.iter_mut().zip(op.schema().dims) {
            if let DimKey::Bucketed(ends) = dim.key {
                axis.cuts = Some(ends.iter().map(|end| end + 1).collect());
            }
        }
        Cells { axes }
    }

    /// A size from which on things may be different.
    pub fn cut(&mut self, dim: usize, at: i64) {
        self.axes[dim].cuts.iter_mut().for_each(|cuts| cuts.push(at));
    }

    fn modulus(&mut self, dim: usize, m: i64) {
        if m > 1 {
            self.axes[dim].moduli.push(m);
        }
    }

    /// Every threshold of a dimension rule.
    pub fn add_rule(&mut self, dim: usize, rule: &DimRule) {
        let after = |x: i64| x.saturating_add(1);
        let ends = rule.min.into_iter().chain(rule.max.map(after));
        let listed = rule.one_of.iter().flatten().flat_map(|&v| [v, after(v)]);
        ends.chain(listed).for_each(|at| self.cut(dim, at));
        rule.multiple_of.into_iter().for_each(|m| self.modulus(dim, m));
    }

    /// Every threshold an expression puts on a single dimension.
    pub fn add_expr(&mut self, op: &Op, expr: &Expr) {
        for cut in expr.cuts() {
            if let Some(dim) = op.dim_of_slot(cut.slot) {
                self.cut(dim, cut.at);
            }
        }
        for modulus in expr.moduli() {
            if let Some(dim) = op.dim_of_slot(modulus.slot) {
                self.modulus(dim, modulus.modulus);
            }
        }
    }

    pub fn finish(&mut self) {
        self.axes.iter_mut().for_each(Axis::finish);
    }

    /// The key of the cell a query lies in.
    pub fn key(&self, query: &Query) -> Query {
        let mut dims = *query.dims();
        for (size, axis) in dims.iter_mut().zip(&self.axes) {
            *size = axis.code(*size);
        }
        query.with_dims(dims)
    }

    /// The shape at which a cell's speed is judged: the largest of each interval, or the least
    /// where it has no end. The same for every shape of a cell.
    pub fn representative(&self, query: &Query) -> Query {
        let mut dims = *query.dims();
        for (size, axis) in dims.iter_mut().zip(&self.axes) {
            let (low, high) = axis.bounds(*size);
            *size = if high == i64::MAX { low } else { high };
        }
        query.with_dims(dims)
    }

    /// What is known of a whole cell.
    pub fn bounds<'a>(&'a self, facts: &'a Facts<'a>) -> CellBounds<'a> {
        CellBounds { cells: self, facts }
    }
}

/// The range of every field over the cell a query lies in.
pub(crate) struct CellBounds<'a> {
    cells: &'a Cells,
    facts: &'a Facts<'a>,
}

impl Bounds for CellBounds<'_> {
    fn bounds(&self, slot: u16) -> Known<'_> {
        match self.facts.op.dim_of_slot(slot) {
            Some(dim) => match self.cells.axes[dim].bounds(self.facts.query.dim(dim)) {
                (low, high) if low == high => Known::Exactly(Value::Int(low)),
                (low, high) => Known::Between(low, high),
            },
            None => Known::Exactly(self.facts.get(slot)),
        }
    }

    fn divisible(&self, slot: u16, m: i64) -> Option<bool> {
        let dim = self.facts.op.dim_of_slot(slot)?;
        let (axis, size) = (&self.cells.axes[dim], self.facts.query.dim(dim));
        (axis.cuts.is_none() || axis.moduli.contains(&m)).then_some(size % m == 0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use lz_model::{BindRules, CallSpec, Catalog, Context, DType, DeviceIx};

    use super::*;

    /// What is not there is judged as not there, also where no kernel asks for it: old measurements know nothing of it.
    #[test]
    fn none_of_a_size_is_a_cell_of_its_own() {
        let call = CallSpec::new("attention.gqa.decode.paged")
            .tensor("query", DType::Bf16, &[1, 8, 64])
            .tensor("key_cache", DType::Bf16, &[9, 16, 2, 64])
            .tensor("value_cache", DType::Bf16, &[9, 16, 2, 64])
            .tensor("block_tables", DType::I32, &[1, 4])
            .tensor("context_lens", DType::I32, &[1]);
        let named = call.named(DeviceIx(0), Context::default());
        let (_, bound) = Catalog::get().resolve(&call.op, &named, &BindRules::default(), |_| None).unwrap();
        let op = Catalog::get().op(bound.query.op());
        let (shared, batch) = (op.dim_index("shared_prefix").unwrap(), op.dim_index("batch").unwrap());
        let mut cells = Cells::new(op);
        cells.finish();
        let at = |size: i64| {
            let mut dims = *bound.query.dims();
            (dims[shared], dims[batch]) = (size, size);
            bound.query.with_dims(dims)
        };
        let judged = |size: i64, dim: usize| cells.representative(&at(size)).dim(dim);
        assert_eq!([0, 1, 3, 4].map(|size| judged(size, shared)), [0, 1, 4, 4]);
        assert_eq!([0, 1, 3, 4].map(|size| judged(size, batch)), [1, 1, 4, 4]);
        assert_ne!(cells.key(&at(0)).dim(shared), cells.key(&at(1)).dim(shared));
    }

    proptest! {
        /// Found by bits or by looking at every cut: the same interval, and the same divisors.
        #[test]
        fn a_size_lies_between_the_cuts_around_it(
            cuts in prop::collection::vec(prop_oneof![-3i64..80, (0u32..63).prop_map(|b| 1i64 << b), any::<i64>()], 0..40),
            moduli in prop::collection::vec(2i64..70, 0..MAX_MODULI),
            size in prop_oneof![-3i64..80, (0u32..63).prop_map(|b| 1i64 << b), any::<i64>()],
        ) {
            let mut axis = Axis { cuts: Some(cuts.clone()), moduli, ..Axis::default() };
            axis.finish();
            let distinct: std::collections::BTreeSet<i64> = cuts.into_iter().collect();
            prop_assert_eq!(axis.interval(size), distinct.iter().filter(|&&at| at <= size).count());
            for (bit, m) in axis.moduli.iter().enumerate() {
                prop_assert_eq!(axis.code(size) >> bit & 1 == 1, size % m == 0, "{} by {}", size, m);
            }
        }
    }
}
