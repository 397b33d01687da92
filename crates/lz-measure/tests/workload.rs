//! Which calls are measured: sizes against the catalog.

#[path = "workload/errors.rs"]
mod errors;
#[path = "workload/sizes.rs"]
mod sizes;

use lz_model::{BindRules, CallSpec, Catalog, Context, DeviceIx, Op, Query};

/// Binds a call by the catalog itself, as strictly as it can be.
fn bound(call: &CallSpec) -> (&'static Op, Query) {
    let strict = BindRules { strict: true, ..BindRules::default() };
    let named = call.named(DeviceIx(0), Context::default());
    let resolved = Catalog::get().resolve(&call.op, &named, &strict, |_| None);
    let (_, bound) = resolved.unwrap_or_else(|error| panic!("{error}: {call}"));
    (Catalog::get().op(bound.query.op()), bound.query)
}

/// The size of a dimension of a call.
fn dim(call: &CallSpec, name: &str) -> i64 {
    let (op, query) = bound(call);
    query.dim(op.dim_index(name).unwrap_or_else(|| panic!("{} has no {name}", op.id())))
}
