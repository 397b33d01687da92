//! The one way to write a call down.

use lz_model::{Bound, CallSpec, Context};

/// The one way to write a call that was bound.
pub(crate) fn canonical(call: &CallSpec, bound: &Bound) -> CallSpec {
    CallSpec::canonical(&call.named(bound.query.device(), Context::default()), bound)
}
