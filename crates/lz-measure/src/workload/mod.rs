//! Which calls are worth measuring: a grid of sizes, or shapes.
//!
//! | | |
//! |---|---|
//! | [`Grid`] | every combination of sizes of an operation |
//! | [`from_shapes`] | an operation at given shapes |
//! | [`features`] | where a call stands among others |
//!
//! Every call they give binds: it is one the catalog takes. The calls of a model are traced where the model is: in Python.
//!
//! ```
//! use lz_measure::workload::Grid;
//! use lz_model::DType;
//!
//! let calls = Grid::new("rms_norm", DType::Bf16).dim("rows", [1, 512]).dim("hidden", [4096]).calls().unwrap();
//! assert_eq!(calls[1].tensors["input"].shape, [512, 4096]);
//! ```

mod error;
mod features;
mod grid;
mod point;
mod shapes;
mod usual;

pub use error::WorkloadError;
pub use features::{Features, features};
pub use grid::Grid;
pub use shapes::{FORMS, from_shapes};
