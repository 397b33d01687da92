//! Kernels of float64, for models that compute with it.
//!
//! | | |
//! |---|---|
//! | [`tile`] | products that fit into registers |

pub(super) mod tile;
