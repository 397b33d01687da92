//! What is odd about a policy: names nobody has, rules that never match, rules that do nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use lz_model::{Catalog, DeviceSpec, OpIx, did_you_mean};
use serde::Serialize;

use super::compile::{self, Rule};
use super::kernels::{FilterName, filter_names};
use super::locks;
use super::reach::Reach;
use super::{Action, Pattern, PolicySpec, RuleSpec};
use crate::decision::KernelIx;
use crate::snapshot::Snapshot;

/// The most pairs of conditions that are compared.
const MAX_COMPARISONS: usize = 20_000;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Good to know.
    Note,
    /// Probably a mistake, or about a library that is not installed.
    Warning,
    /// Certainly a mistake, or calls fail because of it.
    Error,
}

/// What is odd about a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FindingKind {
    /// It cannot be read.
    Unreadable {
        /// Why.
        error: String,
    },
    /// It names a kernel that nobody knows.
    UnknownKernel {
        /// The name.
        name: String,
        /// The closest known one.
        nearest: Option<String>,
    },
    /// It names a library that nobody knows.
    UnknownSource {
        /// The name.
        name: String,
        /// The closest known one.
        nearest: Option<String>,
    },
    /// It names something known that cannot run here.
    NotHere {
        /// The name.
        name: String,
        /// Why not.
        why: String,
    },
    /// It locks an operation to kernels that do not serve it.
    ServesAnother {
        /// The name.
        name: String,
        /// The operation.
        operation: String,
    },
    /// It locks an operation to kernels that are all denied.
    NoKernelLeft {
        /// The operation.
        operation: String,
        /// The first rule that denies.
        by: String,
    },
    /// Its condition contradicts itself.
    NeverMatches {
        /// The condition.
        condition: String,
    },
    /// Its condition holds on no device of this machine.
    NoDeviceHere {
        /// The condition.
        condition: String,
    },
    /// Another rule decides whenever it would.
    Shadowed {
        /// That rule.
        by: String,
    },
}

/// One odd thing about a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The rule's place in the policy.
    pub index: usize,
    /// What the rule is called.
    pub rule: String,
    /// How bad it is.
    pub severity: Severity,
    /// What it is.
    #[serde(flatten)]
    pub kind: FindingKind,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.kind)
    }
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FindingKind::Unreadable { error } => write!(f, "{error}"),
            FindingKind::UnknownKernel { name, nearest } => {
                write!(f, "no kernel is called '{name}'{}", did_you_mean(nearest))
            }
            FindingKind::UnknownSource { name, nearest } => {
                write!(f, "no library is called '{name}'{}", did_you_mean(nearest))
            }
            FindingKind::NotHere { name, why } => write!(f, "'{name}' cannot run here: {why}"),
            FindingKind::ServesAnother { name, operation } => write!(f, "'{name}' does not serve {operation}"),
            FindingKind::NoKernelLeft { operation, by } => {
                write!(f, "leaves no kernel for {operation}: all it names are denied by '{by}'")
            }
            FindingKind::NeverMatches { condition } => write!(f, "can never match: {condition}"),
            FindingKind::NoDeviceHere { condition } => write!(f, "matches no device of this machine: {condition}"),
            FindingKind::Shadowed { by } => write!(f, "has no effect: '{by}' decides whenever it would"),
        }
    }
}

/// Everything odd about a policy, on a machine with the kernels and devices of `snapshot`. In the
/// order of the rules. What would take long to decide (conditions with very many cases, very many
/// rules) is not reported.
pub fn analyse(spec: &PolicySpec, snapshot: &Snapshot) -> Vec<Finding> {
    let (mut findings, compiled) = read(spec, snapshot);
    for (index, (rule, by_op)) in spec.rules.iter().zip(&compiled).enumerate() {
        let mut report = |severity, kind| findings.push(Finding { index, rule: rule.name.clone(), severity, kind });
        // A constraint of a document is a denial where it does not hold; that it holds on every
        // device here is as it should be.
        let constraint = matches!(&rule.action, Action::Deny(Pattern::Name(_)));
        let unreachable = unreachable(by_op, snapshot);
        if unreachable.is_none()
            && let Some((severity, kind)) = not_here(rule, snapshot)
        {
            report(severity, kind);
        }
        match unreachable {
            Some((Severity::Note, _)) if constraint => {}
            Some((severity, kind)) => report(severity, kind),
            None => {}
        }
    }
    let mut comparisons = MAX_COMPARISONS;
    findings.extend(dead_locks(spec, snapshot, &compiled, &mut comparisons));
    for (index, rule) in compiled.iter().enumerate() {
        let dead = |f: &Finding| f.index == index && f.severity != Severity::Note;
        if findings.iter().any(dead) {
            continue;
        }
        let others = compiled.iter().enumerate().filter(|(other, _)| *other != index);
        let by =
            others.map(|(_, other)| other).find(|other| shadows(other, rule, &compiled, snapshot, &mut comparisons));
        if let Some(by) = by.and_then(|other| other.values().next()) {
            let (severity, kind) = (Severity::Warning, FindingKind::Shadowed { by: by.name.clone() });
            findings.push(Finding { index, rule: spec.rules[index].name.clone(), severity, kind });
        }
    }
    findings.sort_by_key(|finding| finding.index);
    // A document speaks of a kernel many times; that it is not here is said once.
    let mut said = BTreeSet::new();
    findings.retain(|finding| match (&finding.kind, spec.rules[finding.index].action.pattern()) {
        (FindingKind::UnknownKernel { name, .. }, Some(Pattern::Name(_))) => said.insert(name.clone()),
        _ => true,
    });
    findings
}

/// What about a policy is wrong on every machine, and would make calls fail or rules do nothing: names nobody knows, and
/// locks that leave no kernel. A configuration with any of these is not taken.
pub fn refusals(spec: &PolicySpec, snapshot: &Snapshot) -> Vec<Finding> {
    let (mut findings, compiled) = read(spec, snapshot);
    findings.extend(dead_locks(spec, snapshot, &compiled, &mut { MAX_COMPARISONS }));
    let of_names = |kind: &FindingKind| !matches!(kind, FindingKind::Unreadable { .. });
    findings.retain(|finding| finding.severity == Severity::Error && of_names(&finding.kind));
    findings.sort_by_key(|finding| finding.index);
    findings
}

/// Every rule compiled, with what cannot be read and which names nobody knows.
fn read(spec: &PolicySpec, snapshot: &Snapshot) -> (Vec<Finding>, Vec<BTreeMap<OpIx, Rule>>) {
    let kernels: Vec<_> = snapshot.kernels().map(|(_, kernel)| kernel.clone()).collect();
    let mut findings = Vec::new();
    let mut compiled = Vec::new();
    for (index, rule) in spec.rules.iter().enumerate() {
        let mut report = |severity, kind| findings.push(Finding { index, rule: rule.name.clone(), severity, kind });
        let by_op = match compile::compile(index, rule, &kernels, &|kernel| snapshot.spec.runs_here(kernel)) {
            Ok(rules) => rules.into_iter().collect(),
            Err(error) => {
                report(Severity::Error, FindingKind::Unreadable { error: error.to_string() });
                BTreeMap::new()
            }
        };
        for (severity, kind) in unknown_name(rule, snapshot).into_iter().chain(unknown_in_filter(rule, snapshot)) {
            report(severity, kind);
        }
        compiled.push(by_op);
    }
    (findings, compiled)
}

fn unknown_name(rule: &RuleSpec, snapshot: &Snapshot) -> Option<(Severity, FindingKind)> {
    let pattern = rule.action.pattern().filter(|pattern| !snapshot.knows(pattern))?;
    let (name, nearest) = (pattern.as_str().to_owned(), snapshot.nearest_name(pattern));
    let severity = match (&rule.action, pattern) {
        _ if rule.optional => Severity::Note,
        // A document describes kernels that may be nowhere.
        (_, Pattern::Name(_)) => Severity::Warning,
        // What is not there is avoided already. A name that is nearly another one is a typing error all the same.
        (Action::Avoid(_), _) if nearest.is_none() => Severity::Warning,
        _ => Severity::Error,
    };
    let kind = match pattern {
        Pattern::Source(_) => FindingKind::UnknownSource { name, nearest },
        Pattern::Kernel(_) | Pattern::Name(_) => FindingKind::UnknownKernel { name, nearest },
    };
    Some((severity, kind))
}

/// The names in a filter that nobody knows.
fn unknown_in_filter(rule: &RuleSpec, snapshot: &Snapshot) -> Vec<(Severity, FindingKind)> {
    let Action::Filter(text) = &rule.action else { return Vec::new() };
    let unknown = |wanted: FilterName| {
        let nearest = snapshot.check_filter_name(&wanted).err()?;
        let severity = match nearest {
            _ if rule.optional => Severity::Note,
            // What is not there is kept out already.
            None if wanted.negated => Severity::Warning,
            _ => Severity::Error,
        };
        let name = wanted.name;
        let kind = match wanted.field {
            "id" => FindingKind::UnknownKernel { name, nearest },
            _ => FindingKind::UnknownSource { name, nearest },
        };
        Some((severity, kind))
    };
    filter_names(text).into_iter().filter_map(unknown).collect()
}

/// A name that is known, of something that cannot run here: every call of a lock fails, other rules do nothing.
fn not_here(rule: &RuleSpec, snapshot: &Snapshot) -> Option<(Severity, FindingKind)> {
    let pattern = rule.action.pattern().filter(|pattern| snapshot.knows(pattern))?;
    let why = snapshot.absent(&rule.action)?;
    let severity = match (&rule.action, pattern) {
        _ if rule.optional => Severity::Note,
        (Action::Lock(_), Pattern::Kernel(_) | Pattern::Source(_)) => Severity::Error,
        (action, Pattern::Kernel(_) | Pattern::Source(_)) if action.is_in_favour() => Severity::Warning,
        _ => Severity::Note,
    };
    Some((severity, FindingKind::NotHere { name: pattern.as_str().to_owned(), why }))
}

/// The rules in favour of kernels, and the locks, whose kernels are known and none of them installed; with the name.
/// Rules whose condition holds on no device here are left out.
pub fn not_installed<'a>(spec: &'a PolicySpec, snapshot: &Snapshot) -> Vec<(&'a RuleSpec, String)> {
    let kernels: Vec<_> = snapshot.kernels().map(|(_, kernel)| kernel.clone()).collect();
    let absent = |(index, rule): (usize, &'a RuleSpec)| {
        let pattern = rule.action.pattern()?;
        let says = !rule.optional && !matches!(pattern, Pattern::Name(_)) && rule.action.is_in_favour();
        if !says || !snapshot.knows(pattern) || snapshot.is_installed(pattern) {
            return None;
        }
        let by_op = compile::compile(index, rule, &kernels, &|_| true).ok()?.into_iter().collect();
        unreachable(&by_op, snapshot).is_none().then(|| (rule, pattern.as_str().to_owned()))
    };
    spec.rules.iter().enumerate().filter_map(absent).collect()
}

/// Locks that leave no kernel.
fn dead_locks(
    spec: &PolicySpec,
    snapshot: &Snapshot,
    compiled: &[BTreeMap<OpIx, Rule>],
    comparisons: &mut usize,
) -> Vec<Finding> {
    let locks = spec.rules.iter().enumerate().filter(|(_, rule)| matches!(rule.action, Action::Lock(_)));
    let dead = |(index, rule): (usize, &RuleSpec)| {
        let kind = locks::leaves_nothing(rule, &compiled[index], compiled, snapshot, comparisons)?;
        let severity = if rule.optional { Severity::Note } else { Severity::Error };
        Some(Finding { index, rule: rule.name.clone(), severity, kind })
    };
    locks.filter_map(dead).collect()
}

/// Whether a rule's condition holds nowhere, or nowhere here.
fn unreachable(by_op: &BTreeMap<OpIx, Rule>, snapshot: &Snapshot) -> Option<(Severity, FindingKind)> {
    let never = |device: Option<&DeviceSpec>| {
        by_op.iter().all(|(op, rule)| {
            let conditions: Vec<_> = rule.when.iter().collect();
            Reach::new(Catalog::get().op(*op), &conditions, device).is_some_and(|reach| reach.never(&rule.when))
        })
    };
    let rule = by_op.values().next()?;
    let condition = rule.when.iter().map(lz_expr::Expr::source).collect::<Vec<_>>().join(" and ");
    if never(None) {
        return Some((Severity::Error, FindingKind::NeverMatches { condition }));
    }
    let devices = &snapshot.spec.devices;
    let nowhere = !devices.is_empty() && devices.iter().all(|device| never(Some(device)));
    nowhere.then_some((Severity::Note, FindingKind::NoDeviceHere { condition }))
}

/// Whether rule `b` does nothing because of rule `a`, wherever it is about any kernel.
fn shadows(
    a: &BTreeMap<OpIx, Rule>,
    b: &BTreeMap<OpIx, Rule>,
    all: &[BTreeMap<OpIx, Rule>],
    snapshot: &Snapshot,
    comparisons: &mut usize,
) -> bool {
    let mut any = false;
    let covered = b.iter().all(|(op, rule)| {
        let kernels: Vec<KernelIx> = snapshot.kernels_for(*op).collect();
        if !kernels.iter().any(|&kernel| rule.concerns(kernel)) {
            return true;
        }
        any = true;
        let first_lock = || all.iter().filter_map(|r| r.get(op)).find(|r| matches!(r.action, Action::Lock(_)));
        a.get(op).is_some_and(|other| {
            let lock_in_force = first_lock().is_some_and(|lock| lock.index == other.index);
            makes_idle(other, rule, &kernels, lock_in_force) && implied(*op, rule, other, comparisons)
        })
    });
    any && covered
}

/// Whether `a`, where both apply, leaves `b` without effect on an operation's kernels.
fn makes_idle(a: &Rule, b: &Rule, kernels: &[KernelIx], lock_in_force: bool) -> bool {
    let earlier = a.index < b.index;
    let covers = || kernels.iter().all(|&k| a.concerns(k) || !b.concerns(k));
    let same = || kernels.iter().all(|&k| a.concerns(k) == b.concerns(k));
    let forbids = |rule: &Rule| matches!(rule.action, Action::Deny(_) | Action::Filter(_));
    match (&a.action, &b.action) {
        (Action::Lock(_), Action::Lock(_)) => earlier,
        // The kernels of `b` are out, whatever it says about them.
        (Action::Lock(_), _) => lock_in_force && kernels.iter().all(|&k| !(a.concerns(k) && b.concerns(k))),
        (_, Action::Lock(_)) => false,
        _ if forbids(a) && forbids(b) => earlier && covers(),
        _ if forbids(a) => covers(),
        (Action::Priority(..), Action::Priority(..)) => earlier && covers(),
        (Action::Override(_), Action::Override(_)) | (Action::Fallback(_), Action::Fallback(_)) => earlier && same(),
        _ => false,
    }
}

/// Whether `a` certainly applies wherever `b` does.
pub(super) fn implied(op: OpIx, b: &Rule, a: &Rule, comparisons: &mut usize) -> bool {
    if a.when.is_empty() {
        return true;
    }
    *comparisons = comparisons.saturating_sub(1);
    if *comparisons == 0 {
        return false;
    }
    let conditions: Vec<_> = a.when.iter().chain(&b.when).collect();
    Reach::new(Catalog::get().op(op), &conditions, None).is_some_and(|reach| reach.implies(&b.when, &a.when))
}
