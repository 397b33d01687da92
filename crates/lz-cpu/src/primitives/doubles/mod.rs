//! Kernels of float64, for models that compute with it. Those of narrower floats are kernels of the catalog's operations.
//!
//! | | |
//! |---|---|
//! | [`rows`] | softmax and norms of rows |
//! | [`attention`] | attention |
//! | `tile` | products that fit into registers |

pub mod attention;
pub mod rows;
pub(super) mod tile;
