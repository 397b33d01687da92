//! A graph for exact sizes, as a flat list of kernel calls.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lz_abi::program::{
    Arenas, Call, External, ExternalError, Layout, LayoutError, Operand, Program, Root, Running, Slot,
};
use lz_abi::{KernelError, Storage, Tensor, TensorViewMut, Threads};

use super::binding::{
    Arg, AsDeclared, At, Bound, Candidate, Needs, Packs, Precision, Ranking, Site, Terms, candidates, copied,
};
use super::choosing::{Chooser, Declared};
use super::kernel::{Host, Kernel, NoHost};
use crate::ir::{Graph, NodeId, Symbols, ValueId};
use crate::ops::{Cost, Op};
use crate::plan::{self, Instance, InstanceError, MemoryPlan};

/// How graphs are compiled, and what their programs share.
#[derive(Clone)]
pub struct Options {
    /// The threads kernels may use.
    pub threads: usize,
    /// How exactly products are computed.
    pub precision: Precision,
    /// Decides which kernel runs a node.
    pub chooser: Arc<dyn Chooser>,
    /// Ranks the kernels of the catalog's operations.
    pub ranking: Arc<dyn Ranking>,
    /// Packed weights, shared by programs of the same weights.
    pub packs: Arc<Packs>,
    /// Arenas, shared by programs that need not run at the same time.
    pub arenas: Arc<Arenas>,
}

impl Options {
    /// What holds for every node.
    fn terms(&self) -> Terms<'_> {
        let Options { threads, precision, packs, ranking, .. } = self;
        Terms { threads: *threads, precision: *precision, packs, ranking: &**ranking }
    }
}

impl Default for Options {
    fn default() -> Options {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Options {
            threads,
            precision: Precision::default(),
            chooser: Arc::new(Declared),
            ranking: Arc::new(AsDeclared),
            packs: Arc::default(),
            arenas: Arc::default(),
        }
    }
}

/// Why a graph was not compiled, or did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecError {
    /// The graph has no instance for these sizes.
    #[error(transparent)]
    Instance(#[from] InstanceError),
    /// The inputs are not what the graph takes.
    #[error(transparent)]
    Inputs(#[from] super::interpreted::RunError),
    /// The plan puts a tensor where it may not be. A mistake of the planner or of a kernel's needs.
    #[error("the memory plan is wrong: {0}")]
    Layout(#[from] LayoutError),
    /// The plan has no place for a value that is read. A mistake of the planner.
    #[error("the memory plan has no place for '{0}'")]
    NoPlace(String),
    /// The caller's tensors do not fit.
    #[error(transparent)]
    External(#[from] ExternalError),
    /// A node failed with every kernel.
    #[error("{op} ('{output}'{}): {why}", if origin.is_empty() { String::new() } else { format!(", of {origin}") })]
    Kernel {
        /// The operation.
        op: &'static str,
        /// The value it makes.
        output: String,
        /// Where it stands in the model.
        origin: String,
        /// Why.
        why: Box<KernelError>,
    },
}

/// A kernel that failed, and was replaced by the next candidate of its node from then on.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// The value its node makes.
    pub output: String,
    /// The kernel.
    pub kernel: String,
    /// Why.
    pub why: KernelError,
}

/// One way to run a step.
struct Way {
    name: String,
    calls: Range<usize>,
}

/// A node that runs, with its ways in the order they are tried.
struct Step {
    op: &'static str,
    output: String,
    origin: String,
    cost: Cost,
    ways: Box<[Way]>,
    /// The way that is taken: those before it have failed.
    current: AtomicUsize,
}

/// A step as people see it.
#[derive(Clone, Debug, PartialEq)]
pub struct StepInfo {
    /// The operation.
    pub op: &'static str,
    /// The value it makes.
    pub output: String,
    /// Where it stands in the model.
    pub origin: String,
    /// The kernel that runs it now.
    pub kernel: String,
    /// All kernels that could, in the order they are tried.
    pub candidates: Vec<String>,
    /// What it computes, reads and writes.
    pub cost: Cost,
}

/// A graph for exact sizes: kernels, addresses and sizes are resolved. Any number of threads may run it at the same time.
pub struct Compiled {
    program: Program,
    kernels: Box<[Kernel]>,
    steps: Box<[Step]>,
    threads: usize,
    inputs: usize,
    failures: Mutex<Vec<Failure>>,
    /// Failures that were seen; more than are kept.
    failed: AtomicUsize,
}

/// Failures that are kept.
const MOST_FAILURES: usize = 64;

/// What is put together for a program.
struct Builder<'a> {
    instance: &'a Instance<'a>,
    plan: &'a MemoryPlan,
    packs: &'a Packs,
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
            Some(constant) => Ok(Arg::constant_of(op, at, constant, self.packs)),
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
                if of == value {
                    return Ok(Arg::constant(self.packs.laid(constant.storage())));
                }
                At::Constant(self.packs.laid(constant.storage()), offset)
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

    fn ways(&mut self, candidates: &[Candidate], scratch: &Range<usize>) -> Box<[Way]> {
        let mut ways = Vec::new();
        for candidate in candidates {
            let first = self.kernels.len();
            candidate.calls.iter().for_each(|bound| self.call(bound, scratch));
            ways.push(Way { name: candidate.name.clone(), calls: first..self.kernels.len() });
        }
        ways.into()
    }

    /// Adds a node.
    fn node(&mut self, id: NodeId, options: &Options) -> Result<(), ExecError> {
        let node = self.instance.node(id);
        let op = self.instance.op(id);
        let inputs = node.inputs.iter().enumerate();
        let inputs: Vec<Option<Arg>> = inputs
            .map(|(at, value)| value.map(|value| self.input(op, at, value)).transpose())
            .collect::<Result<_, _>>()?;
        let output = self.made(node.output)?;
        let is_output = |arg: &Arg| matches!((&arg.at, &output.at), (At::Memory(a), At::Memory(b)) if a == b);
        let in_place =
            inputs.iter().position(|arg| arg.as_ref().is_some_and(is_output)).filter(|_| !output.shape.contains(&0));
        let site = Site { op, inputs: &inputs, output: &output, in_place, terms: options.terms() };
        let scratch = self.plan.scratch.get(id.index()).copied().flatten();
        let scratch = scratch.map_or(0..0, |part| part.offset_bytes..part.offset_bytes + part.bytes);
        let mut found = candidates(&site);
        found.retain(|candidate| candidate.scratch() <= scratch.len());
        // What a kernel that failed has left of the old contents, another one would read.
        if in_place.is_some() {
            found.truncate(1);
        }
        let ways = self.ways(&found, &scratch);
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
        let found = copied(from, to);
        let ways = self.ways(&found, &(0..0));
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

impl Compiled {
    /// Compiles a graph for exact sizes.
    pub fn new(graph: &Graph, symbols: &Symbols, options: &Options) -> Result<Compiled, ExecError> {
        let instance = Instance::of(graph, symbols)?;
        let needs = Needs::of(&instance, options.terms());
        let plan = plan::plan(&instance, &needs);
        Compiled::of(&instance, &plan, options)
    }

    /// Compiles an instance by a plan.
    pub fn of(instance: &Instance<'_>, plan: &MemoryPlan, options: &Options) -> Result<Compiled, ExecError> {
        let graph = instance.graph();
        let slot = |value: ValueId, written| {
            let (name, meta) = (&graph.value(value).name, instance.meta(value));
            Slot { written, ..Slot::read(name, meta.dtype, &meta.sizes().expect("an instance has sizes")) }
        };
        let is_updated = |input| graph.updates.iter().any(|(old, _)| *old == input);
        let inputs = graph.inputs.iter().map(|&input| slot(input, is_updated(input)));
        let slots = inputs.chain(graph.outputs.iter().map(|&output| slot(output, true))).collect();
        let layout = Layout { arena: plan.arena, slots, ..Layout::default() };
        let packs = &*options.packs;
        let mut builder =
            Builder { packs, instance, plan, layout, kernels: Vec::new(), steps: Vec::new(), sites: Vec::new() };
        for &id in plan.order.iter().filter(|id| !plan.is_view(**id)) {
            builder.node(id, options)?;
        }
        for transfer in &plan.transfers {
            builder.transfer(transfer)?;
        }
        let Builder { layout, kernels, mut steps, sites, .. } = builder;
        let program = Program::new(layout, options.arenas.clone())?;
        let kernels: Box<[Kernel]> = kernels.into();
        choose(instance, &program, &kernels, &mut steps, &sites, options);
        Ok(Compiled {
            program,
            kernels,
            steps: steps.into(),
            threads: options.threads,
            inputs: graph.inputs.len(),
            failures: Mutex::default(),
            failed: AtomicUsize::new(0),
        })
    }

    /// Runs it. `externals` are the inputs of the graph, to be written where the graph updates them, then memory for its outputs.
    pub fn run(&self, externals: &mut [External<'_>]) -> Result<(), ExecError> {
        self.run_with(externals, &NoHost)
    }

    /// Runs it, with somebody who makes the calls that have no kernel here.
    pub fn run_with(&self, externals: &mut [External<'_>], host: &dyn Host) -> Result<(), ExecError> {
        let mut running = self.program.enter(externals)?;
        let threads = lz_cpu::threads(self.threads);
        for step in &self.steps {
            self.step(step, &mut running, threads, host)?;
        }
        Ok(())
    }

    /// Runs it, and says how long each step took.
    pub fn run_timed(
        &self,
        externals: &mut [External<'_>],
        host: &dyn Host,
        times: &mut [Duration],
    ) -> Result<(), ExecError> {
        let mut running = self.program.enter(externals)?;
        let threads = lz_cpu::threads(self.threads);
        let mut before = Instant::now();
        for (step, time) in self.steps.iter().zip(times) {
            self.step(step, &mut running, threads, host)?;
            let now = Instant::now();
            *time = now - before;
            before = now;
        }
        Ok(())
    }

    #[inline]
    fn step(
        &self,
        step: &Step,
        running: &mut Running<'_>,
        threads: Threads<'_>,
        host: &dyn Host,
    ) -> Result<(), ExecError> {
        let way = step.current.load(Ordering::Relaxed);
        match go(&self.kernels, &step.ways[way], running, threads, host) {
            Ok(()) => Ok(()),
            Err(why) => self.fall_back(step, way, why, running, threads, host),
        }
    }

    /// Tries the other ways of a step, and takes the first that works from now on.
    #[cold]
    fn fall_back(
        &self,
        step: &Step,
        first: usize,
        why: KernelError,
        running: &mut Running<'_>,
        threads: Threads<'_>,
        host: &dyn Host,
    ) -> Result<(), ExecError> {
        let mut failed = why;
        for (at, way) in step.ways.iter().enumerate().skip(first) {
            if at > first {
                match go(&self.kernels, way, running, threads, host) {
                    Ok(()) => {
                        step.current.store(at, Ordering::Relaxed);
                        return Ok(());
                    }
                    Err(why) => failed = why,
                }
            }
            if failed.is_callers_fault() {
                break;
            }
            self.failed.fetch_add(1, Ordering::Relaxed);
            let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
            if failures.len() < MOST_FAILURES {
                failures.push(Failure { output: step.output.clone(), kernel: way.name.clone(), why: failed.clone() });
            }
        }
        Err(ExecError::Kernel {
            op: step.op,
            output: step.output.clone(),
            origin: step.origin.clone(),
            why: Box::new(failed),
        })
    }

    /// What the caller gives: inputs, then outputs.
    pub fn slots(&self) -> &[Slot] {
        self.program.slots()
    }

    /// How many of the slots are inputs of the graph.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Bytes of the arena of a run.
    pub fn arena(&self) -> usize {
        self.program.arena()
    }

    /// The steps, in the order they run.
    pub fn steps(&self) -> impl ExactSizeIterator<Item = StepInfo> + '_ {
        self.steps.iter().map(|step| StepInfo {
            op: step.op,
            output: step.output.clone(),
            origin: step.origin.clone(),
            kernel: step.ways[step.current.load(Ordering::Relaxed)].name.clone(),
            candidates: step.ways.iter().map(|way| way.name.clone()).collect(),
            cost: step.cost,
        })
    }

    /// The kernels that failed so far, the first 64 of them.
    pub fn failures(&self) -> Vec<Failure> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How often a kernel failed so far.
    pub fn failed(&self) -> usize {
        self.failed.load(Ordering::Relaxed)
    }
}

/// Makes the calls of one way.
#[inline]
fn go(
    kernels: &[Kernel],
    way: &Way,
    running: &mut Running<'_>,
    threads: Threads<'_>,
    host: &dyn Host,
) -> Result<(), KernelError> {
    for at in way.calls.clone() {
        kernels[at].run(running.call(at, threads), host)?;
    }
    Ok(())
}

/// Puts the ways of every step into the order the chooser wants.
fn choose(
    instance: &Instance<'_>,
    program: &Program,
    kernels: &[Kernel],
    steps: &mut [Step],
    sites: &[(NodeId, Vec<Candidate>)],
    options: &Options,
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
        let site = Site {
            op: instance.op(*id),
            inputs: &inputs,
            output: &found[0].calls[0].outputs[0],
            in_place: None,
            terms: options.terms(),
        };
        let order = options.chooser.choose(&site, found, &mut time);
        let mut ways: Vec<Option<Way>> = std::mem::take(&mut step.ways).into_vec().into_iter().map(Some).collect();
        let mut chosen: Vec<Way> = order.into_iter().filter_map(|at| ways.get_mut(at)?.take()).collect();
        if chosen.is_empty() {
            chosen = ways.into_iter().flatten().collect();
        }
        step.ways = chosen.into();
    }
}
