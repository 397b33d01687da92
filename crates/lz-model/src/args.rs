//! What a native kernel is called with, and how it fails.

use crate::catalog::{Catalog, Op};
use crate::param::ParamValue;
use crate::query::Query;
use crate::tensor::{TensorView, TensorViewMut};

/// The arguments of one kernel call, bound and checked, in schema order.
pub struct KernelArgs<'a, 't> {
    /// The bound call: sizes of every dimension, dtypes, layouts.
    pub query: &'a Query,
    /// The tensors that are read; `None` for those not given and for those that are updated.
    pub inputs: &'a [Option<TensorView<'t>>],
    /// Every parameter of the schema, defaults filled in.
    pub params: &'a [ParamValue],
    /// The tensors that are written, in the order of the schema's outputs. An updated input
    /// stands here with its old contents.
    pub outputs: &'a mut [TensorViewMut<'t>],
}

impl<'t> KernelArgs<'_, 't> {
    /// The operation.
    pub fn op(&self) -> &'static Op {
        Catalog::get().op(self.query.op())
    }

    /// A tensor that is read, by name; `None` when it was not given. Panics on a name the schema
    /// does not have: that is a mistake in the kernel.
    pub fn input(&self, name: &str) -> Option<&TensorView<'t>> {
        let index = self.op().input_index(name).unwrap_or_else(|| panic!("{} has no input '{name}'", self.op().id()));
        self.inputs.get(index).and_then(Option::as_ref)
    }

    /// The layout of an input.
    pub fn layout(&self, name: &str) -> crate::Layout {
        self.op().input_index(name).map_or(crate::Layout::Strided, |i| self.query.tensor(i).layout())
    }

    /// The size of a dimension, by name.
    pub fn dim(&self, name: &str) -> i64 {
        let index = self.op().dim_index(name).unwrap_or_else(|| panic!("{} has no dimension '{name}'", self.op().id()));
        self.query.dim(index)
    }

    /// A parameter, by name.
    pub fn param(&self, name: &str) -> ParamValue {
        let index =
            self.op().param_index(name).unwrap_or_else(|| panic!("{} has no parameter '{name}'", self.op().id()));
        self.params[index]
    }

    /// Whether the operation has a parameter of that name.
    pub fn has_param(&self, name: &str) -> bool {
        self.op().param_index(name).is_some()
    }
}

/// Why a kernel could not do its work.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum KernelError {
    /// The data itself is invalid (an index outside its table, …). No other kernel would fare better.
    #[error("{input}{at:?} is {value}, {expected}")]
    BadData {
        /// Which input.
        input: &'static str,
        /// Where in it.
        at: Vec<i64>,
        /// What stands there.
        value: i64,
        /// What should.
        expected: String,
    },
    /// The data itself is invalid: a number outside the range it must be in. No other kernel would fare better.
    #[error("{input}{at:?} is {value}, {expected}")]
    BadNumber {
        /// Which input.
        input: &'static str,
        /// Where in it.
        at: Vec<i64>,
        /// What stands there.
        value: f64,
        /// What should.
        expected: String,
    },
    /// The kernel failed; another may not.
    #[error("{0}")]
    Failed(String),
    /// Memory ran out.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
}

impl KernelError {
    /// Whether the call itself is at fault, so that trying another kernel is pointless.
    pub fn is_callers_fault(&self) -> bool {
        matches!(self, KernelError::BadData { .. } | KernelError::BadNumber { .. })
    }
}
