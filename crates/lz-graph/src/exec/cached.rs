//! A kernel of attention over the part of a cache that is written: it gets views of the keys and values that count.

use lz_abi::{Args, Extents, KernelError, Param, TensorMut, TensorRef, Threads, Workspace};
use lz_cpu::Builtin;
use lz_model::{Catalog, KernelArgs, Query};

use crate::ops::cached_attention::spans;

/// How a kernel for keys and values of a whole cache is run with a part of it.
#[derive(Clone, Debug)]
pub struct Cached {
    kernel: Builtin,
    query: Query,
    /// Keys before a query that count.
    window: Option<i64>,
    /// Which axis of its tensors are the tokens.
    tokens: usize,
    /// The places of the dimensions that are smaller in a part.
    batch: usize,
    seq_k: usize,
}

/// The inputs of its calls: those of the kernel's operation that it reads, then position and first keys.
const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const POSITION: usize = 3;
const FIRSTS: usize = 4;

impl Cached {
    /// A kernel, and the call it was bound to with a whole cache. `None` if its operation has other inputs.
    pub fn new(kernel: Builtin, query: Query, window: Option<i64>, tokens: usize) -> Option<Cached> {
        let op = Catalog::get().op(query.op());
        let inputs = ["query", "key", "value"].map(|name| op.input_index(name));
        let (batch, seq_k) = (op.dim_index("batch")?, op.dim_index("seq_k")?);
        let usual = inputs == [Some(QUERY), Some(KEY), Some(VALUE)];
        usual.then_some(Cached { kernel, query, window, tokens, batch, seq_k })
    }

    /// One call for all sequences where their keys begin at the same place, else one for each.
    pub fn run(&self, mut args: Args<'_, '_>) -> Result<(), KernelError> {
        let need = |at: usize| args.input(at).map(|input| input.view()).ok_or_else(|| missing(at));
        let (query, key, value, position) = (need(QUERY)?, need(KEY)?, need(VALUE)?, need(POSITION)?);
        let firsts = args.input(FIRSTS).map(|input| input.view());
        let (batch, queries, capacity) = (query.shape()[0], query.shape()[self.tokens], key.shape()[self.tokens]);
        let (first, end) = spans(&position, firsts.as_ref(), (batch, queries, capacity), self.window)?;
        let (params, dims, threads) = (args.params(), args.dims(), args.threads());
        let mut call = |(from, count): (i64, i64), begin: i64| {
            let len = end - begin;
            let (query, key, value) =
                (query.part(0, from, count), key.part(0, from, count), value.part(0, from, count));
            let (key, value) = (key.part(self.tokens, begin, len), value.part(self.tokens, begin, len));
            let mut dims: Extents = dims.into();
            (dims[self.batch], dims[self.seq_k]) = (count, len);
            let mut output = args.outputs[0].view_mut().into_part(0, from, count);
            self.call([query.as_ref(), key.as_ref(), value.as_ref()], output.as_mut(), params, &dims, threads)
        };
        if batch == 0 {
            return Ok(());
        }
        let begin = first(0);
        if (1..batch).all(|sequence| first(sequence) == begin) {
            return call((0, batch), begin);
        }
        (0..batch).try_for_each(|sequence| call((sequence, 1), first(sequence)))
    }

    fn call(
        &self,
        inputs: [TensorRef<'_>; 3],
        output: TensorMut<'_>,
        params: &[Param],
        dims: &[i64],
        threads: Threads<'_>,
    ) -> Result<(), KernelError> {
        let (mut outputs, mut workspace) = ([output], Workspace::none());
        let args = Args::new(&inputs, &mut outputs, params, dims, &mut workspace).with_threads(threads);
        self.kernel.run(&mut KernelArgs { query: &self.query, args })
    }
}

fn missing(at: usize) -> KernelError {
    KernelError::Failed(format!("input {at} of attention over a cache is not there"))
}
