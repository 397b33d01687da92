//! A policy compiled: which rules every operation has, and which kernels each is about.

use std::sync::Arc;

use lz_expr::{Env, Expr, ExprError, MatchValue, Scope, Type, glob_matches};
use lz_model::ops::{ALIASES, FUNCTIONS};
use lz_model::{Catalog, KernelDescriptor, Op, OpIx, nearest};

use super::kernels::{self, KernelFields};
use super::{Action, Condition, FieldPattern, Pattern, PolicyError, PolicySpec, RuleSpec};
use crate::decision::KernelIx;

/// A rule compiled for one operation.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    /// Its place in the policy.
    pub index: usize,
    pub name: String,
    /// All must hold.
    pub when: Vec<Expr>,
    pub action: Action,
    /// By kernel of the snapshot, whether it is about it. A filter is about those it rules out.
    concerns: Arc<[bool]>,
}

impl Rule {
    /// Whether it applies to a call. A condition that cannot be evaluated (overflow, division by
    /// zero) does not hold.
    pub fn applies<E: Env>(&self, facts: &E) -> bool {
        self.when.iter().all(|when| when.test(facts).unwrap_or(false))
    }

    /// Whether it is about a kernel.
    pub fn concerns(&self, kernel: KernelIx) -> bool {
        self.concerns[kernel.0 as usize]
    }

    /// Whether it forbids a kernel.
    pub fn forbids(&self, kernel: KernelIx) -> bool {
        matches!(self.action, Action::Deny(_) | Action::Filter(_)) && self.concerns(kernel)
    }

    /// What to call it where it forbids something.
    pub fn reason(&self) -> String {
        match &self.action {
            Action::Filter(filter) => format!("{}: only kernels with {filter}", self.name),
            _ => self.name.clone(),
        }
    }
}

/// A policy compiled for every operation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Policy {
    by_op: Vec<Vec<Rule>>,
}

impl Policy {
    /// Compiles a policy for the kernels of a snapshot, in its order.
    ///
    /// A condition is compiled against each operation it could apply to; one that names a field
    /// an operation does not have never applies to it, and one whose fields *no* operation has is
    /// an error.
    pub fn compile(
        spec: &PolicySpec,
        kernels: &[Arc<KernelDescriptor>],
        runs_here: &dyn Fn(&KernelDescriptor) -> bool,
    ) -> Result<Policy, Vec<PolicyError>> {
        let mut by_op: Vec<Vec<Rule>> = Catalog::get().ops().iter().map(|_| Vec::new()).collect();
        let mut problems = Vec::new();
        for (index, rule) in spec.rules.iter().enumerate() {
            match compile(index, rule, kernels, runs_here) {
                Ok(compiled) => compiled.into_iter().for_each(|(op, rule)| by_op[op.0 as usize].push(rule)),
                Err(error) => problems.push(error),
            }
        }
        if problems.is_empty() { Ok(Policy { by_op }) } else { Err(problems) }
    }

    pub fn rules(&self, op: OpIx) -> &[Rule] {
        self.by_op.get(op.0 as usize).map_or(&[], Vec::as_slice)
    }
}

/// Whether a rule can be compiled, whatever the kernels: for one operation it is about at least.
pub(super) fn check(rule: &RuleSpec) -> Result<(), PolicyError> {
    if let Action::Filter(text) = &rule.action {
        kernels::filter(text).map_err(|error| bad_condition(rule, error))?;
    }
    let mut errors = Vec::new();
    for (op, fixed) in targets(rule)? {
        match conditions(&rule.condition, &fixed, Catalog::get().op(op)) {
            Ok(_) => return Ok(()),
            Err(error) => errors.push(error),
        }
    }
    most_telling(errors).map_or(Ok(()), |error| Err(bad_condition(rule, error)))
}

/// Of what several operations have against a condition, that of the one which understood most of
/// it, and can say what was meant.
fn most_telling(errors: Vec<ExprError>) -> Option<ExprError> {
    let understood = |error: &ExprError| (error.column, error.kind.hint().is_some());
    errors.into_iter().reduce(|best, error| if understood(&error) > understood(&best) { error } else { best })
}

fn bad_condition(rule: &RuleSpec, error: ExprError) -> PolicyError {
    PolicyError::BadCondition { rule: rule.name.clone(), error: Box::new(error) }
}

/// The operations a rule is about.
fn targets(rule: &RuleSpec) -> Result<Vec<(OpIx, Fixed)>, PolicyError> {
    match &rule.operation {
        None => Ok(Catalog::get().ops().iter().map(|op| (op.ix(), Vec::new())).collect()),
        Some(name) => operations(name).ok_or_else(|| unknown_operation(rule, name)),
    }
}

pub(super) fn compile(
    index: usize,
    rule: &RuleSpec,
    kernels: &[Arc<KernelDescriptor>],
    runs_here: &dyn Fn(&KernelDescriptor) -> bool,
) -> Result<Vec<(OpIx, Rule)>, PolicyError> {
    let concerns: Arc<[bool]> = match &rule.action {
        Action::Filter(text) => {
            let filter = kernels::filter(text).map_err(|error| bad_condition(rule, error))?;
            kernels.iter().map(|k| !filter.test(&KernelFields(k)).unwrap_or(false)).collect()
        }
        action => kernels.iter().map(|k| action.pattern().is_some_and(|p| p.matches(k))).collect(),
    };
    let only_where_served = match &rule.action {
        // Without an operation, it must not lock those its kernels know nothing of; and a name
        // that nobody here has locks nothing, as the library may not be installed.
        Action::Lock(pattern) => rule.operation.is_none() || rule.optional || matches!(pattern, Pattern::Name(_)),
        _ => false,
    };
    let served = |op: OpIx| {
        let serves = |k: &KernelDescriptor| Catalog::get().find(&k.operation).is_ok_and(|t| t.ops.contains(&op));
        let counts = |k: &KernelDescriptor| serves(k) && (!rule.optional || runs_here(k));
        kernels.iter().zip(concerns.iter()).any(|(kernel, concerned)| *concerned && counts(kernel))
    };
    let mut compiled = Vec::new();
    let mut errors = Vec::new();
    let mut readable = false;
    for (ix, fixed) in targets(rule)? {
        let op = Catalog::get().op(ix);
        match conditions(&rule.condition, &fixed, op) {
            Ok(when) => {
                readable = true;
                if only_where_served && !served(ix) {
                    continue;
                }
                let (name, action) = (rule.name.clone(), rule.action.clone());
                compiled.push((ix, Rule { index, name, when, action, concerns: concerns.clone() }));
            }
            Err(error) => errors.push(error),
        }
    }
    match most_telling(errors) {
        Some(error) if !readable => Err(bad_condition(rule, error)),
        _ => Ok(compiled),
    }
}

/// Values that parameters have where a name stands for an operation.
type Fixed = Vec<&'static [(&'static str, bool)]>;

/// The operations a name, or a glob over names, stands for, each with the parameter values under
/// which it does (any of them; none for always). `None` when it stands for nothing.
fn operations(name: &str) -> Option<Vec<(OpIx, Fixed)>> {
    let catalog = Catalog::get();
    let names: Vec<&str> = if name.contains(['*', '?']) {
        operation_names().filter(|known| glob_matches(name, known)).collect()
    } else {
        vec![name]
    };
    let mut found: Vec<(OpIx, Option<Fixed>)> = Vec::new();
    for name in names {
        let function = || FUNCTIONS.iter().find(|f| f.name == name).and_then(|f| catalog.find(f.target).ok());
        let Some(target) = catalog.find(name).ok().or_else(function) else { continue };
        for &op in &target.ops {
            let at = found.iter().position(|(known, _)| *known == op).unwrap_or_else(|| {
                found.push((op, Some(Vec::new())));
                found.len() - 1
            });
            match (&mut found[at].1, target.fixes) {
                (fixed, []) => *fixed = None,
                (Some(fixed), fixes) => fixed.push(fixes),
                (None, _) => {}
            }
        }
    }
    let found = found.into_iter().map(|(op, fixed)| (op, fixed.unwrap_or_default()));
    Some(found.collect::<Vec<_>>()).filter(|found| !found.is_empty())
}

/// The operations a name or glob stands for, each with what must hold of a call for it to. Empty when it stands for
/// nothing.
pub(crate) fn scope(name: &str) -> Vec<(OpIx, Vec<Expr>)> {
    let scoped = |(op, fixed): (OpIx, Fixed)| {
        let when = conditions(&Condition::Always, &fixed, Catalog::get().op(op)).ok()?;
        Some((op, when))
    };
    operations(name).unwrap_or_default().into_iter().filter_map(scoped).collect()
}

/// Every name an operation, alias or function has.
pub(super) fn operation_names() -> impl Iterator<Item = &'static str> {
    let ops = Catalog::get().ops().iter().flat_map(|op| [op.id()].into_iter().chain(op.schema().also.iter().copied()));
    ops.chain(ALIASES.iter().map(|alias| alias.name)).chain(FUNCTIONS.iter().map(|f| f.name))
}

fn unknown_operation(rule: &RuleSpec, name: &str) -> PolicyError {
    let nearest = nearest(name, operation_names()).map(str::to_owned);
    PolicyError::UnknownOperation { rule: rule.name.clone(), name: name.to_owned(), nearest }
}

fn conditions(condition: &Condition, fixed: &Fixed, op: &Op) -> Result<Vec<Expr>, ExprError> {
    let mut when = Vec::new();
    if !fixed.is_empty() {
        let all = |fixes: &&[(&str, bool)]| {
            let parts: Vec<String> = fixes.iter().map(|(param, value)| format!("{param} == {value}")).collect();
            parts.join(" and ")
        };
        let any: Vec<String> = fixed.iter().map(all).collect();
        when.push(Expr::compile_as(&any.join(" or "), op.scope(), Type::Bool)?);
    }
    read(condition, op.scope(), &mut when)?;
    Ok(when)
}

fn read(condition: &Condition, scope: &Scope, when: &mut Vec<Expr>) -> Result<(), ExprError> {
    match condition {
        Condition::Always => {}
        Condition::When(text) => when.push(Expr::compile_as(text, scope, Type::Bool)?),
        Condition::Match(fields) => {
            let entries = fields.iter().map(|(field, pattern)| {
                let value = match pattern {
                    FieldPattern::One(text) => MatchValue::Str(text),
                    FieldPattern::Any(list) => MatchValue::List(list.iter().map(|t| MatchValue::Str(t)).collect()),
                };
                (field.as_str(), value)
            });
            when.push(Expr::from_match(entries, scope)?);
        }
        Condition::All(parts) => parts.iter().try_for_each(|part| read(part, scope, when))?,
    }
    Ok(())
}
