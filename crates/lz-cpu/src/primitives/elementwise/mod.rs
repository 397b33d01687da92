//! Functions of elements.
//!
//! A dtype is *computed as* float32 (float32, float16, bfloat16), float64, int64 or int32 (int32 and the smaller integers, whose
//! results wrap; bool, whose results are "not 0"). Long rows are computed where they are; others, and those of another
//! dtype than they are computed as, go through buffers of [`blocks::BLOCK`] elements.
//!
//! | | |
//! |---|---|
//! | [`binary`], [`unary`], [`select`], [`cast`] | the primitives |
//! | [`numbers`] | dtypes, and what they are computed as |
//! | [`lanes`] | loops the compiler makes vector instructions of |
//! | [`plain`] | small calls of tensors that lie alike |
//! | [`blocks`] | what brings the elements of strided tensors of any dtype there |
//! | [`functions`] | logarithm, sine and cosine as float32 |

pub mod binary;
pub(super) mod blocks;
pub mod cast;
pub(super) mod functions;
pub(super) mod lanes;
pub(super) mod numbers;
mod plain;
pub mod select;
pub mod unary;

pub use binary::BinaryOp;
pub use unary::UnaryOp;

#[cfg(test)]
mod tests;
