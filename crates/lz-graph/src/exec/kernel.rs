//! What a step of a compiled graph calls.

use lz_abi::{Args, KernelError, Tensor, TensorMut, TensorRef, TensorView};
use lz_cpu::Builtin;
use lz_cpu::primitives::{InstructionSet, Primitive};
use lz_model::{KernelArgs, Query};

use super::foreign::Foreign;
use crate::ops::Op;

/// Who runs the nodes that have no kernel here: operations of torch that the exporter does not know.
pub trait Host: Sync {
    /// Makes a call by its number, and writes one of its results.
    fn call(
        &self,
        call: u32,
        result: u32,
        inputs: &[TensorRef<'_>],
        output: &mut TensorMut<'_>,
    ) -> Result<(), KernelError>;
}

/// Nobody: a graph without such nodes.
pub struct NoHost;

impl Host for NoHost {
    fn call(&self, call: u32, _: u32, _: &[TensorRef<'_>], _: &mut TensorMut<'_>) -> Result<(), KernelError> {
        Err(KernelError::Failed(format!("call {call} of the program the graph came from needs that program")))
    }
}

/// A kernel, with what it needs besides the arguments in memory.
#[derive(Clone, Debug)]
pub enum Kernel {
    /// A kernel of the catalog, with the bound call.
    Builtin(Builtin, Box<Query>),
    /// A kernel that is no operation of the catalog, and the instructions it runs with.
    Primitive(Primitive, InstructionSet),
    /// The reference of an operation of graphs.
    Reference {
        /// The operation, with numbers in its attributes.
        op: Box<Op>,
        /// Which inputs are written over: the output holds their contents.
        over: Box<[bool]>,
    },
    /// A kernel of attention over the part of a cache that is written.
    Cached(Box<super::cached::Cached>),
    /// A kernel of another library.
    Foreign(Foreign),
    /// A call of the program the graph came from.
    Host {
        /// Which call.
        call: u32,
        /// Which of its results.
        result: u32,
    },
}

impl Kernel {
    /// Does the work.
    #[inline]
    pub fn run<'a>(&'a self, args: Args<'a, '_>, host: &dyn Host) -> Result<(), KernelError> {
        match self {
            Kernel::Builtin(kernel, query) => kernel.run(&mut KernelArgs { query, args }),
            Kernel::Primitive(kernel, set) => {
                let mut args = args;
                kernel.run_on(*set, &mut args)
            }
            Kernel::Reference { op, over } => reference(op, over, args),
            Kernel::Cached(cached) => cached.run(args),
            Kernel::Foreign(foreign) => (foreign.run)(args),
            Kernel::Host { call, result } => {
                let (inputs, mut args) = (args.inputs(), args);
                host.call(*call, *result, inputs, &mut args.outputs[0])
            }
        }
    }
}

/// Runs a reference, which makes a tensor of its own, and copies that.
fn reference(op: &Op, over: &[bool], mut args: Args<'_, '_>) -> Result<(), KernelError> {
    let old = over.contains(&true).then(|| args.outputs[0].as_ref().view().to_tensor());
    let views: Vec<Option<TensorView<'_>>> = over
        .iter()
        .enumerate()
        .map(|(at, over)| match (over, &old) {
            (true, Some(old)) => Some(old.view()),
            _ => args.input(at).map(|input| input.view()),
        })
        .collect();
    let (dtype, shape) = (args.outputs[0].dtype(), args.outputs[0].shape());
    let mut output = Tensor::try_zeros(dtype, shape)
        .ok_or_else(|| KernelError::OutOfMemory(format!("a {dtype} tensor of shape {shape:?}")))?;
    op.evaluate(&views, &mut output)?;
    args.outputs[0].view_mut().copy_bits_from(&output.view());
    Ok(())
}
