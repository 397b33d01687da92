//! Calls that a dispatch table in force says nothing about.

use lz_model::schema::DimKey;
use lz_model::{Catalog, Query, Reason};
use lz_select::{About, Pin};

use super::scope::Scope;

impl Scope<'_> {
    /// Why a dispatch table says nothing about a call although it does about others like it: the size that lies outside
    /// its buckets.
    pub fn outside_table(&self, query: &Query) -> Option<Reason> {
        let state = &self.state;
        let pins = &state.snapshot.spec().pins;
        if pins.is_empty() || pins.find(query).is_some() {
            return None;
        }
        let (class, dims) = (query.pinned_class(), Catalog::get().op(query.op()).schema().dims);
        let varies = |i: &usize| matches!(dims[*i].key, DimKey::Bucketed(_));
        let fits = |pin: &Pin, i: usize| (pin.low[i]..=pin.high[i]).contains(&query.dim(i));
        let of_table = pins.iter().filter(|pin| state.tables.contains(&pin.origin) && pin.about == About::Class(class));
        let like: Vec<&Pin> = of_table.filter(|pin| (0..dims.len()).all(|i| varies(&i) || fits(pin, i))).collect();
        let outside = |i: &usize| !like.iter().any(|pin| fits(pin, *i));
        let sizes = || (0..dims.len()).filter(varies);
        let dim = sizes().find(outside).or_else(|| sizes().next()).filter(|_| !like.is_empty())?;
        Some(Reason::PlanBucketMiss { dim: dims[dim].name.to_owned(), found: query.dim(dim) })
    }
}
