//! Candidates of several calls, which hand tensors on in the node's scratch memory.

use lz_abi::{DType, Param, row_major};
use lz_cpu::primitives::Primitive;

use super::primitives::bound;
use super::{Arg, At, Bound, Candidate, Terms};

/// Bytes scratch memory of a tensor is a multiple of.
const PART: usize = 64;

/// Calls before and after the one that is chosen.
pub(super) struct Sequence<'a> {
    before: Vec<Bound>,
    after: Vec<Bound>,
    reserved: usize,
    terms: Terms<'a>,
}

impl<'a> Sequence<'a> {
    /// No call yet.
    pub fn new(terms: Terms<'a>) -> Sequence<'a> {
        Sequence { before: Vec::new(), after: Vec::new(), reserved: 0, terms }
    }

    /// Whether there is no call before and after the one that is chosen.
    pub fn is_empty(&self) -> bool {
        self.before.is_empty() && self.after.is_empty()
    }

    /// A row-major tensor in scratch memory.
    pub fn scratch(&mut self, dtype: DType, shape: &[i64]) -> Arg {
        let at = At::Scratch(self.reserved);
        self.reserved += dtype.bytes_for(shape.iter().product::<i64>() as usize).next_multiple_of(PART);
        Arg { dtype, shape: shape.into(), strides: row_major(shape), at }
    }

    /// Adds a primitive before the call that is chosen.
    pub fn before(&mut self, primitive: Primitive, inputs: Vec<Option<Arg>>, output: &Arg, params: Vec<Param>) {
        self.before.push(bound(primitive, inputs, output.clone(), params, self.terms));
    }

    /// Adds a primitive after it.
    pub fn after(&mut self, primitive: Primitive, inputs: Vec<Option<Arg>>, output: &Arg, params: Vec<Param>) {
        self.after.push(bound(primitive, inputs, output.clone(), params, self.terms));
    }

    /// A tensor as another element type: itself, or a copy in scratch memory that is made before the call.
    pub fn cast(&mut self, arg: &Arg, dtype: DType) -> Arg {
        if arg.dtype == dtype {
            return arg.clone();
        }
        let wide = self.scratch(dtype, &arg.shape);
        self.before(Primitive::Cast, vec![Some(arg.clone())], &wide, Vec::new());
        wide
    }

    /// The candidates of the call, each between the others.
    pub fn around(self, found: Vec<Candidate>, name: &str) -> Vec<Candidate> {
        let candidates = found.into_iter().map(|one| {
            let mut calls = [&self.before[..], &one.calls, &self.after].concat();
            calls.iter_mut().for_each(|call| call.reserved = self.reserved);
            Candidate { name: format!("{name}+{}", one.name), calls, in_place: &[] }
        });
        candidates.collect()
    }
}
