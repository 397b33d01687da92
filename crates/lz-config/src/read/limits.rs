//! How much of anything one file may say. Far above what anybody writes, and low enough that a
//! hostile file takes no time.

/// The most problems that are reported; looking further would only take time.
pub(crate) const MAX_PROBLEMS: usize = 32;
/// The most rules, dispatch rules or rules of all policies.
pub(crate) const MAX_RULES: usize = 1024;
/// The most rules they may turn into, for every operation and kernel they name.
pub(crate) const MAX_EXPANDED: usize = 4096;
/// The most names in one list.
pub(crate) const MAX_NAMES: usize = 256;
/// The most values a field is matched against.
pub(crate) const MAX_VALUES: usize = 64;
/// The most locks.
pub(crate) const MAX_LOCKS: usize = 256;
/// The most rollouts.
pub(crate) const MAX_ROLLOUTS: usize = 64;
/// The most implementations in a kernels document.
pub(crate) const MAX_IMPLEMENTATIONS: usize = 1024;
