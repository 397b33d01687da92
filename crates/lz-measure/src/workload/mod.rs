//! Which calls are worth measuring: those a model makes, a grid of sizes, or shapes.
//!
//! | | |
//! |---|---|
//! | [`Geometry`], [`GEOMETRIES`] | models, by name or from a transformers `config.json` |
//! | [`calls`] | the calls of a model's forward pass |
//! | [`Grid`] | every combination of sizes of an operation |
//! | [`from_shapes`] | an operation at given shapes |
//! | [`features`] | where a call stands among others |
//!
//! Every call they give binds: it is one the catalog takes.
//!
//! ```
//! use lz_measure::workload::{Geometry, Phase, Sizes, calls};
//! use lz_model::DType;
//!
//! let llama = Geometry::named("llama-3-8b").unwrap();
//! let sizes = Sizes { batch: &[1], seq: &[512], context: &[2048] };
//! let work = calls(llama, &sizes, DType::Bf16, &[Phase::Prefill, Phase::Decode]).unwrap();
//! let attention = work.iter().find(|w| w.part == "attention" && w.phase == Phase::Decode).unwrap();
//! assert_eq!(attention.call.tensors["query"].shape, [1, 32, 1, 128]);
//! assert_eq!(attention.call.tensors["key"].shape, [1, 8, 2048, 128]);
//! assert_eq!(attention.times, 32);
//! ```

mod error;
mod features;
mod forward;
mod geometry;
mod grid;
mod hf;
mod models;
mod point;
mod shapes;
mod usual;

pub use error::WorkloadError;
pub use features::{Features, features};
pub use forward::{Phase, Sizes, Work, calls};
pub use geometry::{Activation, Biases, Experts, Geometry, Mla, Norm, Rope, Window};
pub use grid::Grid;
pub use models::GEOMETRIES;
pub use shapes::{FORMS, from_shapes};
