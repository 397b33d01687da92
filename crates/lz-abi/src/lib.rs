//! What a kernel is called with, and the only code that turns addresses into tensors.
//!
//! | | |
//! |---|---|
//! | [`TensorRef`], [`TensorMut`] | a tensor in somebody else's memory; laid out like DLPack's `DLTensor` |
//! | [`TensorView`], [`TensorViewMut`] | the same with sizes and strides of their own, so that axes can be permuted |
//! | [`Tensor`] | a row-major tensor that owns its memory, aligned to 64 bytes |
//! | [`Args`] | all of one call: tensors, parameters, sizes, scratch memory, threads, stream |
//! | [`Workspace`], [`Arena`] | scratch memory the caller owns and lends |
//! | [`program`] | the memory of many calls: one arena, checked once |
//! | [`Storage`] | memory that stays where it is: constants |
//! | [`Threads`] | how many threads a kernel may use, and whose |
//! | [`DType`], [`numeric`] | element types, and their bits as numbers |
//!
//! Structs marked `repr(C)` are also what a plugin compiled elsewhere sees. A test holds their sizes and offsets.
//!
//! ```
//! use lz_abi::{DType, Tensor};
//!
//! let mut x = Tensor::from_f64(DType::F32, &[2, 3], &[0., 1., 2., 3., 4., 5.]);
//! // A contiguous tensor is a slice, if you name the right type.
//! assert_eq!(x.view().as_ref().as_slice::<f32>(), Ok(&[0., 1., 2., 3., 4., 5.][..]));
//! assert!(x.view().as_ref().as_slice::<f64>().is_err());
//! // Any tensor can be read element by element.
//! assert_eq!(x.view().permuted(&[1, 0]).get(&[2, 1]), 5.0);
//! x.view_mut().set(&[0, 0], 7.0);
//! assert_eq!(x.to_f64()[0], 7.0);
//! ```

mod arena;
mod args;
mod copy;
mod dtype;
mod element;
mod nearest;
pub mod numeric;
mod overlap;
mod owned;
pub mod program;
mod raw;
mod storage;
mod tensor;
mod threads;
mod view;

pub use arena::{Arena, OutOfScratch, Workspace};
pub use args::{Args, KernelError, Param, Span, SpanMut, Stream};
pub use dtype::{DType, DTypeSet, UnknownDType};
pub use element::{Device, Element, Scalar, as_unsigned};
pub use nearest::{did_you_mean, nearest};
pub use overlap::{Bytes, overlap};
pub use owned::Tensor;
pub use raw::RawTensor;
pub use storage::{Storage, permuted};
pub use tensor::{Line, NotASlice, Rows, TensorMut, TensorRef};
pub use threads::{ParallelFor, Threads};
pub use view::{Extents, TensorError, TensorView, TensorViewMut, indices, row_major};
