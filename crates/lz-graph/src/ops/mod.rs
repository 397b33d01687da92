//! The operations of a graph. Each is one file: a struct with its attributes that implements [`OpDef`], and one line in
//! the list at the end of this file.

use std::fmt::Debug;

use lz_abi::{KernelError, Tensor, TensorView};
use serde::Serialize;
use serde::de::DeserializeOwned;
use smallvec::SmallVec;

use crate::ir::{DimError, Inputs, Meta, ShapeError, Symbols};

pub mod add_layer_norm;
pub mod argreduce;
pub mod attention;
mod attribute;
pub mod binary;
pub mod cached_attention;
pub mod cast;
#[cfg(test)]
mod checks;
pub mod concat;
pub mod conv;
pub mod cumsum;
pub mod elements;
pub mod embedding;
pub mod expand;
pub mod full;
pub mod gated;
pub mod gather;
pub mod group_norm;
pub mod host;
pub mod index_copy;
pub mod index_put;
pub mod index_select;
pub mod iota;
pub mod layer_norm;
pub mod linear;
pub mod matmul;
pub mod pad;
pub mod permute;
pub mod pool;
pub mod reduce;
pub mod reshape;
pub mod rms_norm;
pub mod rope;
pub mod select;
pub mod slice;
pub mod softmax;
pub mod triangle;
pub mod unary;

/// What an operation needs: multiplications and additions, and bytes that are read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes read and written.
    pub bytes: f64,
}

/// Where a result lies that is no memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alias {
    /// The input whose memory it is.
    pub input: usize,
    /// Elements from the input's first to the result's first.
    pub offset: i64,
}

/// Where the elements of a result lie that is a view of an input, whatever the strides of that input are.
///
/// With input strides `s`, the result starts `Σ start[i]·s[i]` elements after the input, and its axis `a` has the
/// stride `axes[a].1 · s[axes[a].0]`, or 0 if it walks along no axis of the input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The input whose memory it is.
    pub input: usize,
    /// The index in the input of the result's first element, for each axis of the input.
    pub start: SmallVec<[i64; 4]>,
    /// For each axis of the result: the axis of the input it walks along, and by how many elements.
    pub axes: SmallVec<[(Option<usize>, i64); 4]>,
}

/// The definition of an operation. Its fields are its attributes, which serde writes and reads.
pub trait OpDef: Clone + Debug + PartialEq + Serialize + DeserializeOwned {
    /// What it is called in texts and documents.
    const NAME: &'static str;

    /// Element type and sizes of the result. Checks all that can be wrong with the inputs.
    fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError>;

    /// The right result, slowly: computed in float64 (integers exactly) and rounded once. `output` has the sizes of
    /// [`OpDef::infer`], which are all known here.
    fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError>;

    /// The same with a number for each symbol in its attributes.
    fn at(&self, _symbols: &Symbols) -> Result<Self, DimError> {
        Ok(self.clone())
    }

    /// Whether it is computed once, while the graph is made, if all its inputs are constants.
    fn folds(&self) -> bool {
        true
    }

    /// Whether the result is a view of an input's memory. All sizes are known here, and the input lies row-major.
    fn alias(&self, _inputs: Inputs<'_>, _output: &Meta) -> Option<Alias> {
        None
    }

    /// Whether the result is a view of an input with any strides: for kernels that read with strides. All sizes are
    /// known here.
    fn view(&self, _inputs: Inputs<'_>, _output: &Meta) -> Option<View> {
        None
    }

    /// The inputs over which the result may be written, if nothing else reads them: element `i` of the result needs no
    /// other element of that input than `i`.
    fn in_place(&self, _inputs: Inputs<'_>) -> &'static [usize] {
        &[]
    }

    /// What it needs, for sizes that are all known.
    fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
        let bytes = |meta: &Meta| meta.dtype.bytes_for(meta.len().known().unwrap_or(0) as usize) as f64;
        let read: f64 = inputs.0.iter().flatten().map(|meta| bytes(meta)).sum();
        Cost { flops: output.len().known().unwrap_or(0) as f64, bytes: read + bytes(output) }
    }

    /// The operation of the catalog it is a call of, if it is one: selection then chooses its kernel.
    fn operation(&self) -> Option<&'static str> {
        None
    }
}

/// A name that is no operation, or attributes an operation does not have.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnknownOp {
    /// No such operation.
    #[error("there is no operation '{name}'{}", lz_abi::did_you_mean(nearest))]
    Name {
        /// The name.
        name: String,
        /// One that is like it.
        nearest: Option<String>,
    },
    /// Wrong attributes.
    #[error("{op}: {why}")]
    Attributes {
        /// The operation.
        op: &'static str,
        /// What is wrong.
        why: String,
    },
}

/// Makes the enum and its dispatch out of the lines `Name = type;`.
macro_rules! ops {
    ($($name:ident = $def:ty;)+) => {
        /// An operation with its attributes.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)] // each is documented where it is defined
        pub enum Op { $($name($def)),+ }

        $(impl From<$def> for Op {
            fn from(def: $def) -> Op {
                Op::$name(def)
            }
        })+

        impl Op {
            /// The names of all operations, in the order of the list.
            pub const NAMES: &'static [&'static str] = &[$(<$def>::NAME),+];

            /// An operation by its name and its attributes as JSON (`null` for none).
            pub fn named(name: &str, attributes: serde_json::Value) -> Result<Op, UnknownOp> {
                let attributes = match attributes {
                    serde_json::Value::Null => serde_json::Value::Object(Default::default()),
                    some => some,
                };
                match name {
                    $(<$def>::NAME => serde_json::from_value::<$def>(attributes)
                        .map(Op::$name)
                        .map_err(|why| UnknownOp::Attributes { op: <$def>::NAME, why: why.to_string() }),)+
                    _ => Err(UnknownOp::Name {
                        name: name.to_owned(),
                        nearest: lz_abi::nearest(name, Op::NAMES.iter().copied()).map(str::to_owned),
                    }),
                }
            }

            /// What it is called.
            pub fn name(&self) -> &'static str {
                match self { $(Op::$name(_) => <$def>::NAME),+ }
            }

            /// Its attributes as JSON.
            pub fn attributes(&self) -> serde_json::Value {
                match self { $(Op::$name(def) => serde_json::to_value(def).expect("attributes are plain values")),+ }
            }

            /// As [`OpDef::infer`].
            pub fn infer(&self, inputs: Inputs<'_>) -> Result<Meta, ShapeError> {
                match self { $(Op::$name(def) => def.infer(inputs)),+ }
            }

            /// As [`OpDef::evaluate`].
            pub fn evaluate(&self, inputs: &[Option<TensorView<'_>>], output: &mut Tensor) -> Result<(), KernelError> {
                match self { $(Op::$name(def) => def.evaluate(inputs, output)),+ }
            }

            /// As [`OpDef::at`].
            pub fn at(&self, symbols: &Symbols) -> Result<Op, DimError> {
                match self { $(Op::$name(def) => def.at(symbols).map(Op::$name)),+ }
            }

            /// As [`OpDef::folds`].
            pub fn folds(&self) -> bool {
                match self { $(Op::$name(def) => def.folds()),+ }
            }

            /// As [`OpDef::alias`].
            pub fn alias(&self, inputs: Inputs<'_>, output: &Meta) -> Option<Alias> {
                match self { $(Op::$name(def) => def.alias(inputs, output)),+ }
            }

            /// As [`OpDef::view`].
            pub fn view(&self, inputs: Inputs<'_>, output: &Meta) -> Option<View> {
                match self { $(Op::$name(def) => def.view(inputs, output)),+ }
            }

            /// As [`OpDef::in_place`].
            pub fn in_place(&self, inputs: Inputs<'_>) -> &'static [usize] {
                match self { $(Op::$name(def) => def.in_place(inputs)),+ }
            }

            /// As [`OpDef::cost`].
            pub fn cost(&self, inputs: Inputs<'_>, output: &Meta) -> Cost {
                match self { $(Op::$name(def) => def.cost(inputs, output)),+ }
            }

            /// As [`OpDef::operation`].
            pub fn operation(&self) -> Option<&'static str> {
                match self { $(Op::$name(def) => def.operation()),+ }
            }
        }
    };
}

ops! {
    Unary = unary::Unary;
    Binary = binary::Binary;
    MatMul = matmul::MatMul;
    Reshape = reshape::Reshape;
    Permute = permute::Permute;
    Softmax = softmax::Softmax;
    Linear = linear::Linear;
    RmsNorm = rms_norm::RmsNorm;
    AddRmsNorm = rms_norm::AddRmsNorm;
    AddLayerNorm = add_layer_norm::AddLayerNorm;
    Gated = gated::Gated;
    Rope = rope::Rope;
    Cast = cast::Cast;
    Where = select::Where;
    Expand = expand::Expand;
    Slice = slice::Slice;
    Concat = concat::Concat;
    Pad = pad::Pad;
    Reduce = reduce::Reduce;
    ArgReduce = argreduce::ArgReduce;
    CumSum = cumsum::CumSum;
    Iota = iota::Iota;
    Full = full::Full;
    Triangle = triangle::Triangle;
    Embedding = embedding::Embedding;
    Gather = gather::Gather;
    IndexSelect = index_select::IndexSelect;
    IndexCopy = index_copy::IndexCopy;
    IndexPut = index_put::IndexPut;
    LayerNorm = layer_norm::LayerNorm;
    GroupNorm = group_norm::GroupNorm;
    Attention = attention::Attention;
    CachedAttention = cached_attention::CachedAttention;
    Conv = conv::Conv;
    Pool = pool::Pool;
    Host = host::Host;
}
