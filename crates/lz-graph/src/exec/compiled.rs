//! A graph for exact sizes, as a flat list of kernel calls.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use lz_abi::program::{External, Program, Running, Slot};
use lz_abi::{KernelError, Threads};

use super::binding::Needs;
use super::building::{self, Built};
pub use super::errors::{ExecError, Failure};
use super::kernel::{Host, Kernel, NoHost};
pub use super::options::Options;
use crate::ir::{Graph, Symbols};
use crate::ops::Cost;
use crate::plan::{self, Instance, MemoryPlan};

/// One way to run a step.
pub(super) struct Way {
    pub name: String,
    pub calls: Range<usize>,
}

/// A node that runs, with its ways in the order they are tried.
pub(super) struct Step {
    pub op: &'static str,
    pub output: String,
    pub origin: String,
    pub cost: Cost,
    pub ways: Box<[Way]>,
    /// The way that is taken: those before it have failed.
    pub current: AtomicUsize,
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
        let Built { program, kernels, steps } = building::build(instance, plan, options)?;
        Ok(Compiled {
            program,
            kernels,
            steps,
            threads: options.threads,
            inputs: instance.graph().inputs.len(),
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

    /// What the ways of all steps call.
    #[cfg(test)]
    pub(super) fn kernels(&self) -> impl Iterator<Item = &Kernel> {
        self.kernels.iter()
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
pub(super) fn go(
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
