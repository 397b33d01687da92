//! Checks of what each stage made, independent of the code that made it.
//!
//! A [`Validator`] runs in one or several [`Phase`]s, and says what it found with a [`Severity`]. The phase decides
//! what it gets: the graph, the plan, or the plan with the kernels bound to it. [`Level`] decides what is a failure.
//!
//! | phase | gets | |
//! |---|---|---|
//! | after export | graph | [`graph`] |
//! | after optimisation | graph | [`graph`] |
//! | after planning | instance, plan, demands | [`plan`] |
//! | before execution | the same with the demands of the bound kernels, and those | [`execution`] |

mod contents;
mod in_place;
mod kernels;
mod leftovers;
mod order;
mod placement;
mod structure;

use std::fmt;

use crate::ir::{Graph, NodeId};
use crate::plan::{Demands, Instance, MemoryPlan, Place, Root};

/// When a check runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The exporter made the graph.
    AfterExport,
    /// The passes are done.
    AfterOptimisation,
    /// There is a memory plan.
    AfterPlanning,
    /// Every node has its kernel.
    BeforeExecution,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Good to know.
    Info,
    /// Suspicious: something is done that need not be.
    Warning,
    /// A run would fail or give wrong results.
    Error,
}

/// What is a failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Level {
    /// Warnings and errors.
    Strict,
    /// Errors.
    #[default]
    Normal,
    /// Nothing: no check runs.
    Off,
}

impl Level {
    /// Whether a finding of this severity is a failure.
    pub fn fails(self, severity: Severity) -> bool {
        match self {
            Level::Strict => severity >= Severity::Warning,
            Level::Normal => severity >= Severity::Error,
            Level::Off => false,
        }
    }
}

impl std::str::FromStr for Level {
    type Err = UnknownLevel;

    fn from_str(text: &str) -> Result<Level, UnknownLevel> {
        match text {
            "strict" => Ok(Level::Strict),
            "normal" => Ok(Level::Normal),
            "none" => Ok(Level::Off),
            _ => Err(UnknownLevel(text.to_owned())),
        }
    }
}

/// A text that is no level.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no validation level '{0}': it is 'strict', 'normal' or 'none'")]
pub struct UnknownLevel(pub String);

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The graph does not hold together.
    #[error("{0}")]
    Graph(String),
    /// A pair of updates whose old value is no input, or is updated twice.
    #[error("'{input}' is updated, and {why}")]
    Update {
        /// The value that is updated.
        input: String,
        /// What is wrong with that.
        why: &'static str,
    },
    /// A graph that gives nothing and updates nothing.
    #[error("the graph has no results")]
    NoResults,
    /// A symbol of a size that the graph does not declare.
    #[error("'{value}' has a size with the symbol '{symbol}', which the graph does not declare")]
    Symbol {
        /// The value.
        value: String,
        /// The symbol.
        symbol: String,
    },
    /// A node that could have been computed once.
    #[error("{op} ('{value}') reads only constants, and was not folded")]
    NotFolded {
        /// The operation.
        op: &'static str,
        /// The value it makes.
        value: String,
    },
    /// A node whose result nothing needs.
    #[error("nothing reads the result of {op} ('{value}')")]
    Dead {
        /// The operation.
        op: &'static str,
        /// The value it makes.
        value: String,
    },
    /// A plan that is not of this graph.
    #[error("the plan is of another graph: {0}")]
    Foreign(&'static str),
    /// A node that is missing in the order, or there twice, or before what it reads.
    #[error("the node that makes '{value}' {why}")]
    Order {
        /// The value.
        value: String,
        /// What is wrong.
        why: &'static str,
    },
    /// A value without a place.
    #[error("'{0}' has no place")]
    NoPlace(String),
    /// A value that is no longer, or not yet, where it is read.
    #[error("{reader} reads '{value}' at {place}, where {found} is")]
    Contents {
        /// What reads it.
        reader: String,
        /// What it reads.
        value: String,
        /// From where.
        place: String,
        /// What is there.
        found: String,
    },
    /// Memory a kernel writes that it also reads, without being able to.
    #[error("{op} ('{value}') writes {place}, which it also reads or uses as scratch")]
    Clash {
        /// The operation.
        op: &'static str,
        /// The value it makes.
        value: String,
        /// Which memory.
        place: String,
    },
    /// A result written over an input by an operation or kernel that cannot do that.
    #[error("{op} ('{value}') is written over input {input}, {why}")]
    InPlace {
        /// The operation.
        op: &'static str,
        /// The value it makes.
        value: String,
        /// Which input.
        input: usize,
        /// Why that is wrong.
        why: &'static str,
    },
    /// A node that runs no kernel, although its result is not where its input is.
    #[error("{op} ('{value}') runs no kernel, and {place} is no view of its input")]
    NoView {
        /// The operation.
        op: &'static str,
        /// The value it makes.
        value: String,
        /// Where it is.
        place: String,
    },
    /// An offset that is not aligned.
    #[error("'{value}' is at {place}, which is no multiple of {alignment}")]
    Alignment {
        /// The value.
        value: String,
        /// Where it is.
        place: String,
        /// What it should be a multiple of.
        alignment: usize,
    },
    /// A value that ends after the memory it is in.
    #[error("'{value}' at {place} ends {end} bytes into memory of {size}")]
    Outside {
        /// The value.
        value: String,
        /// Where it is.
        place: String,
        /// Where it ends.
        end: usize,
        /// How large that memory is.
        size: usize,
    },
    /// A node writes memory that is only read.
    #[error("'{value}' is written to {place}, which nothing may write")]
    Protected {
        /// The value.
        value: String,
        /// Where.
        place: String,
    },
    /// A result of the graph that is not in memory of the caller when the run ends.
    #[error("result '{value}' is not in memory of its own after the run: {found} is there")]
    Result {
        /// The value.
        value: String,
        /// What is there.
        found: String,
    },
    /// An input whose memory does not hold what it should when the run ends.
    #[error("input '{input}' should hold '{value}' after the run, and holds {found}")]
    Updated {
        /// The input.
        input: String,
        /// What it should hold.
        value: String,
        /// What is there.
        found: String,
    },
    /// A kernel reads with strides that it does not take.
    #[error("{op} ('{value}') reads input {input} row-major, which lies at {place}")]
    Strides {
        /// The operation.
        op: &'static str,
        /// The value it makes.
        value: String,
        /// Which input.
        input: usize,
        /// Where it is.
        place: String,
    },
    /// A node without a kernel.
    #[error("{op} ('{value}') has no kernel")]
    NoKernel {
        /// The operation.
        op: &'static str,
        /// The value it makes.
        value: String,
    },
    /// A kernel that needs more scratch than planned.
    #[error("the kernel of {op} ('{value}') needs {needed} bytes of scratch, {planned} are planned")]
    Scratch {
        /// The operation.
        op: &'static str,
        /// The value it makes.
        value: String,
        /// What it needs.
        needed: usize,
        /// What it gets.
        planned: usize,
    },
}

/// What a check found, and how bad that is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// Which check.
    pub validator: &'static str,
    /// What.
    pub problem: Problem,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        write!(f, "{severity} ({}): {}", self.validator, self.problem)
    }
}

/// Findings that are failures.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(Finding::to_string).collect::<Vec<_>>().join("\n"))]
pub struct Invalid(pub Vec<Finding>);

/// What a check reports to.
#[derive(Debug, Default)]
pub struct Findings {
    validator: &'static str,
    found: Vec<Finding>,
}

impl Findings {
    fn add(&mut self, severity: Severity, problem: Problem) {
        self.found.push(Finding { severity, validator: self.validator, problem });
    }

    fn error(&mut self, problem: Problem) {
        self.add(Severity::Error, problem);
    }
}

/// A plan, and what it is a plan of.
#[derive(Clone, Copy)]
pub struct Planned<'a> {
    /// The graph with numbers for its symbols.
    pub instance: &'a Instance<'a>,
    /// The plan.
    pub plan: &'a MemoryPlan,
    /// What the kernels need.
    pub demands: &'a dyn Demands,
}

/// What the executor knows of the kernels of a graph.
pub trait Kernels {
    /// Whether a node has a kernel.
    fn has(&self, node: NodeId) -> bool;
}

/// What a check gets.
#[derive(Clone, Copy)]
pub enum Check {
    /// The graph.
    Graph(fn(&Graph, Phase, &mut Findings)),
    /// The plan.
    Plan(fn(Planned<'_>, &mut Findings)),
    /// The plan and the kernels.
    Execution(fn(Planned<'_>, &dyn Kernels, &mut Findings)),
}

/// A check.
pub struct Validator {
    /// What it is called.
    pub name: &'static str,
    /// When it runs.
    pub phases: &'static [Phase],
    /// What it does.
    pub check: Check,
}

use Phase::{AfterExport, AfterOptimisation, AfterPlanning, BeforeExecution};

/// All checks, in the order they run. Checks of a plan run only if those before them found no error: they rely on them.
pub const VALIDATORS: &[Validator] = &[
    Validator { name: "structure", phases: &[AfterExport, AfterOptimisation], check: Check::Graph(structure::check) },
    Validator { name: "folding", phases: &[AfterOptimisation], check: Check::Graph(leftovers::not_folded) },
    Validator { name: "dead-nodes", phases: &[AfterExport, AfterOptimisation], check: Check::Graph(leftovers::dead) },
    Validator { name: "order", phases: &[AfterPlanning], check: Check::Plan(order::check) },
    Validator { name: "inside", phases: &[AfterPlanning], check: Check::Plan(placement::inside) },
    Validator { name: "alignment", phases: &[AfterPlanning], check: Check::Plan(placement::alignment) },
    Validator { name: "protected", phases: &[AfterPlanning], check: Check::Plan(placement::protected) },
    Validator { name: "strides", phases: &[AfterPlanning, BeforeExecution], check: Check::Plan(kernels::strides) },
    Validator { name: "in-place", phases: &[AfterPlanning, BeforeExecution], check: Check::Plan(in_place::check) },
    Validator { name: "scratch", phases: &[AfterPlanning, BeforeExecution], check: Check::Plan(kernels::scratch) },
    Validator { name: "contents", phases: &[AfterPlanning], check: Check::Plan(contents::check) },
    Validator { name: "kernels", phases: &[BeforeExecution], check: Check::Execution(kernels::bound) },
];

fn run(phase: Phase, level: Level, each: impl Fn(Check, &mut Findings)) -> Result<Vec<Finding>, Invalid> {
    let mut findings = Findings::default();
    if level == Level::Off {
        return Ok(findings.found);
    }
    for validator in VALIDATORS.iter().filter(|validator| validator.phases.contains(&phase)) {
        findings.validator = validator.name;
        each(validator.check, &mut findings);
        let stop = matches!(phase, AfterPlanning | BeforeExecution)
            && findings.found.iter().any(|one| one.severity == Severity::Error);
        if stop {
            break;
        }
    }
    if findings.found.iter().any(|one| level.fails(one.severity)) {
        Err(Invalid(findings.found))
    } else {
        Ok(findings.found)
    }
}

/// Checks a graph after a phase. Returns what was found; all of it is an error if some of it is a failure.
pub fn graph(phase: Phase, graph: &Graph, level: Level) -> Result<Vec<Finding>, Invalid> {
    run(phase, level, |check, findings| {
        if let Check::Graph(check) = check {
            check(graph, phase, findings);
        }
    })
}

/// Checks a plan.
pub fn plan(planned: Planned<'_>, level: Level) -> Result<Vec<Finding>, Invalid> {
    run(AfterPlanning, level, |check, findings| {
        if let Check::Plan(check) = check {
            check(planned, findings);
        }
    })
}

/// Checks what is about to run.
pub fn execution(planned: Planned<'_>, kernels: &dyn Kernels, level: Level) -> Result<Vec<Finding>, Invalid> {
    run(BeforeExecution, level, |check, findings| match check {
        Check::Execution(check) => check(planned, kernels, findings),
        Check::Plan(check) => check(planned, findings),
        Check::Graph(_) => {}
    })
}

/// A place, for people.
fn told(planned: Planned<'_>, place: &Place) -> String {
    let graph = planned.instance.graph();
    let name = |id| graph.value(id).name.to_string();
    let memory = match place.root {
        Root::Arena => "the arena".to_owned(),
        Root::Input(i) => graph.inputs.get(i).map_or("an input".to_owned(), |&id| format!("input '{}'", name(id))),
        Root::Constant(id) => format!("constant '{}'", name(id)),
        Root::Output(i) => format!("output {i}"),
    };
    let strides = place.strides.as_ref().map_or(String::new(), |strides| format!(" with strides {strides:?}"));
    format!("byte {} of {memory}{strides}", place.offset_bytes)
}
