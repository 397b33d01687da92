//! What a native kernel is called with: the arguments of [`lz_abi`], and the bound call that names them.

use std::ops::{Deref, DerefMut};

use lz_abi::{Arena, Args, KernelError, Param, TensorMut, TensorRef, TensorView, TensorViewMut, Threads};

use crate::catalog::{Catalog, Op};
use crate::param::ParamValue;
use crate::query::Query;

/// The arguments of one kernel call, with the operation's names for them. A kernel that knows the places of its arguments
/// uses [`Args`] directly.
pub struct KernelArgs<'a, 't> {
    /// The bound call: sizes of every dimension, dtypes, layouts.
    pub query: &'a Query,
    /// The arguments, by place.
    pub args: Args<'a, 't>,
}

impl<'a, 't> Deref for KernelArgs<'a, 't> {
    type Target = Args<'a, 't>;
    fn deref(&self) -> &Args<'a, 't> {
        &self.args
    }
}

impl<'a, 't> DerefMut for KernelArgs<'a, 't> {
    fn deref_mut(&mut self) -> &mut Args<'a, 't> {
        &mut self.args
    }
}

impl<'t> KernelArgs<'_, 't> {
    /// The operation.
    pub fn op(&self) -> &'static Op {
        Catalog::get().op(self.query.op())
    }

    /// A tensor that is read, by name; `None` when it was not given. Panics on a name the schema
    /// does not have: that is a mistake in the kernel.
    pub fn input(&self, name: &str) -> Option<TensorRef<'t>> {
        let index = self.op().input_index(name).unwrap_or_else(|| panic!("{} has no input '{name}'", self.op().id()));
        self.args.input(index)
    }

    /// The layout of an input.
    pub fn layout(&self, name: &str) -> crate::Layout {
        self.op().input_index(name).map_or(crate::Layout::Strided, |i| self.query.tensor(i).layout())
    }

    /// The size of a dimension, by name.
    pub fn dim(&self, name: &str) -> i64 {
        let index = self.op().dim_index(name).unwrap_or_else(|| panic!("{} has no dimension '{name}'", self.op().id()));
        self.args.dim(index)
    }

    /// A parameter, by name.
    pub fn param(&self, name: &str) -> Param {
        let index =
            self.op().param_index(name).unwrap_or_else(|| panic!("{} has no parameter '{name}'", self.op().id()));
        self.args.param(index)
    }

    /// Whether the operation has a parameter of that name.
    pub fn has_param(&self, name: &str) -> bool {
        self.op().param_index(name).is_some()
    }
}

/// A call on tensors in host memory, to be handed to a kernel.
pub struct HostCall<'v, 'i, 'o> {
    /// The bound call.
    pub query: &'v Query,
    /// The tensors that are read; `None` for those not given and for those that are updated.
    pub inputs: &'v [Option<TensorView<'i>>],
    /// Every parameter of the schema, defaults filled in.
    pub params: &'v [ParamValue],
    /// The tensors that are written, in the order of the schema's outputs. An updated input stands here.
    pub outputs: &'v mut [TensorViewMut<'o>],
}

impl HostCall<'_, '_, '_> {
    /// Makes the call: `scratch` bytes of scratch memory out of an arena, which grows if it has to.
    pub fn run(
        self,
        (arena, scratch): (&mut Arena, usize),
        threads: Threads<'_>,
        kernel: impl FnOnce(&mut KernelArgs<'_, '_>) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        arena
            .reserve(scratch)
            .map_err(|e| KernelError::OutOfMemory(format!("{} bytes of scratch memory", e.wanted)))?;
        let inputs: Vec<TensorRef<'_>> =
            self.inputs.iter().map(|v| v.as_ref().map_or(TensorRef::ABSENT, TensorView::as_ref)).collect();
        let mut outputs: Vec<TensorMut<'_>> = self.outputs.iter_mut().map(TensorViewMut::as_mut).collect();
        let params: Vec<Param> = self.params.iter().map(|&value| value.into()).collect();
        let mut workspace = arena.lend();
        let args = Args::new(&inputs, &mut outputs, &params, self.query.dims(), &mut workspace).with_threads(threads);
        kernel(&mut KernelArgs { query: self.query, args })
    }
}

impl From<ParamValue> for Param {
    fn from(value: ParamValue) -> Param {
        match value {
            ParamValue::None => Param::None,
            ParamValue::Bool(b) => Param::Bool(b),
            ParamValue::Int(i) => Param::Int(i),
            ParamValue::Float(x) => Param::Float(x),
            ParamValue::Str(symbol) => Param::text(symbol.as_str()),
        }
    }
}
