//! What is known of a value before it exists: its element type and its sizes.

use std::fmt;

use lz_abi::DType;
use smallvec::SmallVec;

use super::{Dim, DimError, Symbols};

/// Sizes, which may be symbols.
pub type Shape = SmallVec<[Dim; 4]>;

/// Element type and sizes of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Shape,
}

impl Meta {
    /// Of so many dimensions.
    pub fn new(dtype: DType, shape: impl IntoIterator<Item = Dim>) -> Meta {
        Meta { dtype, shape: shape.into_iter().collect() }
    }

    /// With sizes that are all known.
    pub fn known(dtype: DType, shape: &[i64]) -> Meta {
        Meta::new(dtype, shape.iter().map(|&n| Dim::from(n)))
    }

    /// How many dimensions there are.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// How many elements there are.
    pub fn len(&self) -> Dim {
        self.shape.iter().fold(Dim::from(1), |product, size| product * size.clone())
    }

    /// The sizes, if all are known.
    pub fn sizes(&self) -> Option<SmallVec<[i64; 4]>> {
        self.shape.iter().map(Dim::known).collect()
    }

    /// The same with a number for each symbol.
    pub fn at(&self, symbols: &Symbols) -> Result<Meta, DimError> {
        let shape = self.shape.iter().map(|size| size.at(symbols).map(Dim::from)).collect::<Result<_, _>>()?;
        Ok(Meta { dtype: self.dtype, shape })
    }

    /// An axis counted from the front; negative ones count from the back.
    pub fn axis(&self, axis: i64) -> Result<usize, ShapeError> {
        let rank = self.rank() as i64;
        let found = if axis < 0 { axis + rank } else { axis };
        if (0..rank).contains(&found) { Ok(found as usize) } else { Err(ShapeError::NoSuchAxis { axis, rank }) }
    }
}

impl fmt::Display for Meta {
    /// As in `float32[1, s0, 768]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, size) in self.shape.iter().enumerate() {
            write!(f, "{}{size}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str("]")
    }
}

/// The inputs of a node, as its operation sees them.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a>(pub &'a [Option<&'a Meta>]);

impl<'a> Inputs<'a> {
    /// How many there may be.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One that must be there.
    pub fn need(&self, at: usize) -> Result<&'a Meta, ShapeError> {
        self.get(at).ok_or(ShapeError::Missing { at })
    }

    /// One that may be there.
    pub fn get(&self, at: usize) -> Option<&'a Meta> {
        self.0.get(at).copied().flatten()
    }

    /// Checks how many there may be.
    pub fn at_most(&self, most: usize) -> Result<(), ShapeError> {
        if self.len() > most { Err(ShapeError::TooMany { found: self.len(), most }) } else { Ok(()) }
    }
}

/// Why an operation cannot take its inputs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// An input that must be there is not.
    #[error("input {at} is missing")]
    Missing {
        /// Which.
        at: usize,
    },
    /// More inputs than the operation has.
    #[error("{found} inputs are given, the operation has {most}")]
    TooMany {
        /// How many are given.
        found: usize,
        /// How many it has.
        most: usize,
    },
    /// An axis outside of the input.
    #[error("axis {axis} does not exist in {rank} dimensions")]
    NoSuchAxis {
        /// Which.
        axis: i64,
        /// How many dimensions there are.
        rank: i64,
    },
    /// Two sizes that must be equal, or 1, are not.
    #[error("sizes {left} and {right} do not fit together")]
    Sizes {
        /// One of them.
        left: String,
        /// The other.
        right: String,
    },
    /// An input has another number of dimensions than the operation takes.
    #[error("input {at} has {rank} dimensions, the operation takes {expected}")]
    Rank {
        /// Which input.
        at: usize,
        /// How many it has.
        rank: usize,
        /// What it takes.
        expected: &'static str,
    },
    /// An input has another element type than the operation takes.
    #[error("input {at} is {dtype}, the operation takes {expected}")]
    Type {
        /// Which input.
        at: usize,
        /// What it is.
        dtype: DType,
        /// What it takes.
        expected: String,
    },
    /// An attribute has a value that makes no sense here.
    #[error("'{name}' is {value}, {expected}")]
    Attribute {
        /// Which attribute.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: String,
    },
    /// A size that must be a number is a symbol, or the other way round.
    #[error(transparent)]
    Dim(#[from] DimError),
}

impl ShapeError {
    /// Two sizes that do not fit together.
    pub fn sizes(left: &Dim, right: &Dim) -> ShapeError {
        ShapeError::Sizes { left: left.to_string(), right: right.to_string() }
    }
}
