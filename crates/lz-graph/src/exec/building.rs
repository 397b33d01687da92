//! From a plan to a program: every node bound to its places, its ways in the order they are tried.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use lz_abi::program::{Call, External, Layout, LayoutError, Operand, Program, Root, Slot};
use lz_abi::{Storage, Tensor, TensorViewMut};

use super::binding::{Arg, At, Bound, Candidate, Site, Terms, candidates, copied};
use super::compiled::{Step, Way, go};
use super::errors::ExecError;
use super::kernel::{Kernel, NoHost};
use super::options::Options;
use crate::ir::{NodeId, ValueId};
use crate::ops::{Cost, Op};
use crate::plan::{self, Instance, MemoryPlan};

/// A program, what it calls, and the steps it is made of.
pub(super) struct Built {
    pub program: Program,
    pub kernels: Box<[Kernel]>,
    pub steps: Box<[Step]>,
}

/// Binds every node of an instance to its places, and lets the chooser order the ways of each.
pub(super) fn build(instance: &Instance<'_>, plan: &MemoryPlan, options: &Options) -> Result<Built, ExecError> {
    let graph = instance.graph();
    let slot = |value: ValueId, written| {
        let (name, meta) = (&graph.value(value).name, instance.meta(value));
        Slot { written, ..Slot::read(name, meta.dtype, &meta.sizes().expect("an instance has sizes")) }
    };
    let is_updated = |input| graph.updates.iter().any(|(old, _)| *old == input);
    let inputs = graph.inputs.iter().map(|&input| slot(input, is_updated(input)));
    let slots = inputs.chain(graph.outputs.iter().map(|&output| slot(output, true))).collect();
    let layout = Layout { arena: plan.arena, slots, ..Layout::default() };
    let terms = options.terms();
    let mut builder =
        Builder { terms, instance, plan, layout, kernels: Vec::new(), steps: Vec::new(), sites: Vec::new() };
    for &id in plan.order.iter().filter(|id| !plan.is_view(**id)) {
        builder.node(id)?;
    }
    for transfer in &plan.transfers {
        builder.transfer(transfer)?;
    }
    let Builder { layout, kernels, mut steps, sites, .. } = builder;
    let program = Program::new(layout, options.arenas.clone())?;
    let kernels: Box<[Kernel]> = kernels.into();
    choose(instance, &program, &kernels, &mut steps, &sites, (options, terms));
    Ok(Built { program, kernels, steps: steps.into() })
}

/// What is put together for a program.
struct Builder<'a> {
    instance: &'a Instance<'a>,
    plan: &'a MemoryPlan,
    terms: Terms<'a>,
    layout: Layout,
    kernels: Vec<Kernel>,
    steps: Vec<Step>,
    /// Candidates of steps, for those who measure.
    sites: Vec<(NodeId, Vec<Candidate>)>,
}

impl<'a> Builder<'a> {
    /// An input of a node, where the plan puts it.
    fn input(&self, op: &Op, at: usize, value: ValueId) -> Result<Arg, ExecError> {
        match self.instance.graph().constant(value) {
            Some(constant) => Ok(Arg::constant_of(op, at, constant, self.terms.packs)),
            None => self.made(value),
        }
    }

    /// A value that is no constant, where the plan puts it.
    fn made(&self, value: ValueId) -> Result<Arg, ExecError> {
        let no_place = || ExecError::NoPlace(self.instance.graph().value(value).name.to_string());
        self.at(value, self.plan.place(value).ok_or_else(no_place)?)
    }

    /// A value at a place.
    fn at(&self, value: ValueId, place: &plan::Place) -> Result<Arg, ExecError> {
        let graph = self.instance.graph();
        let offset = place.offset_bytes;
        let memory = |root| At::Memory(lz_abi::program::Place { root, offset });
        let at = match place.root {
            plan::Root::Arena => memory(Root::Arena),
            plan::Root::Input(at) => memory(Root::External(at)),
            plan::Root::Output(at) => memory(Root::External(graph.inputs.len() + at)),
            plan::Root::Constant(of) => {
                let constant =
                    graph.constant(of).ok_or_else(|| ExecError::NoPlace(graph.value(of).name.to_string()))?;
                let laid = self.terms.packs.laid(constant.storage());
                if of == value {
                    return Ok(Arg::constant(laid));
                }
                At::Constant(laid, offset)
            }
        };
        let mut arg = Arg::of(self.instance.meta(value), at);
        if let Some(strides) = &place.strides {
            arg.strides = strides.as_slice().into();
        }
        Ok(arg)
    }

    fn operand(&mut self, arg: &Arg, scratch: &Range<usize>) -> Operand {
        let place = match &arg.at {
            At::Unplanned => unreachable!("steps are bound to places"),
            At::Memory(place) => *place,
            At::Scratch(offset) => lz_abi::program::Place { root: Root::Arena, offset: scratch.start + offset },
            At::Constant(storage, offset) => {
                let at = self.constant(storage);
                lz_abi::program::Place { root: Root::Constant(at), offset: *offset }
            }
        };
        Operand { dtype: arg.dtype, shape: arg.shape.clone(), strides: arg.strides.clone(), place }
    }

    fn constant(&mut self, storage: &Arc<dyn Storage>) -> usize {
        let constants = &mut self.layout.constants;
        constants.iter().position(|one| Arc::ptr_eq(one, storage)).unwrap_or_else(|| {
            constants.push(storage.clone());
            constants.len() - 1
        })
    }

    fn call(&mut self, bound: &Bound, scratch: &Range<usize>) {
        let inputs = bound.inputs.iter().map(|arg| arg.as_ref().map(|arg| self.operand(arg, scratch))).collect();
        let outputs = bound.outputs.iter().map(|arg| self.operand(arg, scratch)).collect();
        let first = scratch.start + bound.reserved;
        let scratch = first..first + bound.scratch;
        let (params, dims) = (bound.params.clone(), bound.dims.clone());
        self.layout.calls.push(Call { inputs, outputs, params, dims, scratch });
        self.kernels.push(bound.kernel.clone());
    }

    /// The ways of a step: a candidate whose tensors may not lie where they are planned is left out, unless all are so.
    fn ways(&mut self, candidates: &mut Vec<Candidate>, scratch: &Range<usize>) -> Result<Box<[Way]>, LayoutError> {
        let (mut ways, mut wrong) = (Vec::new(), None);
        candidates.retain(|candidate| {
            let first = self.kernels.len();
            candidate.calls.iter().for_each(|bound| self.call(bound, scratch));
            let calls = first..self.kernels.len();
            if let Err(why) = calls.clone().try_for_each(|at| self.layout.check(at)) {
                wrong.get_or_insert(why);
                self.kernels.truncate(first);
                self.layout.calls.truncate(first);
                return false;
            }
            ways.push(Way { name: candidate.name.clone(), calls });
            true
        });
        match wrong {
            Some(why) if ways.is_empty() => Err(why),
            _ => Ok(ways.into()),
        }
    }

    /// Adds a node.
    fn node(&mut self, id: NodeId) -> Result<(), ExecError> {
        let node = self.instance.node(id);
        let op = self.instance.op(id);
        let inputs = node.inputs.iter().enumerate();
        let inputs: Vec<Option<Arg>> = inputs
            .map(|(at, value)| value.map(|value| self.input(op, at, value)).transpose())
            .collect::<Result<_, _>>()?;
        let output = self.made(node.output)?;
        let over = self.plan.written_over(id, &node.inputs);
        let site = Site { op, inputs: &inputs, output: &output, over: &over, terms: self.terms };
        let scratch = self.plan.scratch.get(id.index()).copied().flatten();
        let scratch = scratch.map_or(0..0, |part| part.offset_bytes..part.offset_bytes + part.bytes);
        let mut found = candidates(&site);
        found.retain(|candidate| candidate.scratch() <= scratch.len());
        // What a kernel that failed has left of the old contents, another one would read.
        if !over.is_empty() {
            found.truncate(1);
        }
        let ways = self.ways(&mut found, &scratch)?;
        let inputs = self.instance.inputs(id);
        self.steps.push(Step {
            op: op.name(),
            output: self.instance.graph().value(node.output).name.to_string(),
            origin: node.origin.to_string(),
            cost: op.cost(crate::ir::Inputs(&inputs), self.instance.meta(node.output)),
            ways,
            current: AtomicUsize::new(0),
        });
        self.sites.push((id, found));
        Ok(())
    }

    /// Adds a copy that follows the last node.
    fn transfer(&mut self, transfer: &plan::Transfer) -> Result<(), ExecError> {
        let (from, to) = (self.at(transfer.value, &transfer.from)?, self.at(transfer.value, &transfer.to)?);
        let ways = self.ways(&mut copied(from, to, self.terms), &(0..0))?;
        self.steps.push(Step {
            op: "copy",
            output: self.instance.graph().value(transfer.value).name.to_string(),
            origin: String::new(),
            cost: Cost { flops: 0.0, bytes: 2.0 * transfer.bytes as f64 },
            ways,
            current: AtomicUsize::new(0),
        });
        Ok(())
    }
}

/// Puts the ways of every step into the order the chooser wants.
fn choose(
    instance: &Instance<'_>,
    program: &Program,
    kernels: &[Kernel],
    steps: &mut [Step],
    sites: &[(NodeId, Vec<Candidate>)],
    (options, terms): (&Options, Terms<'_>),
) {
    let slots = program.slots();
    let mut tensors: Vec<Tensor> = Vec::new();
    if options.chooser.measures() {
        tensors.extend(slots.iter().filter_map(|slot| Tensor::try_zeros(slot.dtype, &slot.shape)));
    }
    let mut views: Vec<TensorViewMut<'_>> = tensors.iter_mut().map(Tensor::view_mut).collect();
    let mut externals: Vec<External<'_>> = views.iter_mut().map(|view| External::Write(view.as_mut())).collect();
    // Without memory for it nothing is measured, and the declared order holds.
    let mut running = if options.chooser.measures() && externals.len() == slots.len() {
        program.enter(&mut externals).ok()
    } else {
        None
    };
    let threads = lz_cpu::threads(options.threads);
    for (step, (id, found)) in steps.iter_mut().zip(sites) {
        let mut time = |at: usize| {
            let (running, way) = (running.as_mut()?, step.ways.get(at)?);
            let start = Instant::now();
            go(kernels, way, running, threads, &NoHost).ok()?;
            Some(start.elapsed())
        };
        let inputs: Vec<Option<Arg>> = found.last().map(|last| last.calls[0].inputs.clone()).unwrap_or_default();
        let site =
            Site { op: instance.op(*id), inputs: &inputs, output: &found[0].calls[0].outputs[0], over: &[], terms };
        let order = options.chooser.choose(&site, found, &mut time);
        let mut ways: Vec<Option<Way>> = std::mem::take(&mut step.ways).into_vec().into_iter().map(Some).collect();
        let mut chosen: Vec<Way> = order.into_iter().filter_map(|at| ways.get_mut(at)?.take()).collect();
        if chosen.is_empty() {
            chosen = ways.into_iter().flatten().collect();
        }
        step.ways = chosen.into();
    }
}
