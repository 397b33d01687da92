//! Who forbids a kernel to serve a call.

use serde::{Serialize, Serializer};

/// What is behind `POLICY_DENIED`. Serialized as its sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denial {
    /// A rule of the operator's, by what it is called.
    #[error("{0}")]
    Rule(String),
    /// The operator turned selection off.
    #[error("LayerZero is disabled: only references run, and plain torch where none can")]
    Disabled,
    /// Selection is degraded.
    #[error("degraded to '{level}': {only}")]
    Degraded {
        /// To which level.
        level: &'static str,
        /// What alone may run there.
        only: &'static str,
    },
    /// The kernel is in a rollout, and this call is not one of those it is given.
    #[error("rollout '{name}' does not give it this call")]
    Rollout {
        /// The rollout.
        name: String,
    },
}

impl Serialize for Denial {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
