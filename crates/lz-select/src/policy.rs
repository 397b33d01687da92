//! The operator's will: locks, denials, preferences and rules, compiled per operation.

use lz_expr::{Expr, ExprError, MatchValue, Type};
use lz_model::{Catalog, Facts, KernelDescriptor, Op, OpIx, did_you_mean, nearest};

/// Names kernels: by id (a glob), by id and version (`id@1.2`), or by library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Kernels whose id matches a glob; `@version` narrows it to one version.
    Kernel(String),
    /// Every kernel of a library.
    Source(String),
}

impl Pattern {
    /// Whether a kernel is meant.
    pub fn matches(&self, kernel: &KernelDescriptor) -> bool {
        match self {
            Pattern::Source(source) => kernel.backend == *source,
            Pattern::Kernel(text) => match text.rsplit_once('@') {
                Some((id, version)) => kernel.version == version && lz_expr::glob_matches(id, &kernel.id),
                None => lz_expr::glob_matches(text, &kernel.id),
            },
        }
    }

    /// As written.
    pub fn as_str(&self) -> &str {
        match self {
            Pattern::Kernel(text) | Pattern::Source(text) => text,
        }
    }
}

/// What a rule does to the kernels it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Raises their score by 20.
    Prefer(Pattern),
    /// Lowers their score by 50.
    Avoid(Pattern),
    /// Raises their score by this much.
    Boost(Pattern, i32),
    /// Only they may run.
    Lock(Pattern),
    /// They may not run.
    Deny(Pattern),
}

/// When a rule applies.
#[derive(Clone, Debug, PartialEq)]
pub enum Condition {
    /// Always.
    Always,
    /// When an expression holds.
    When(String),
    /// When every field matches its pattern (`sm: ">=90"`).
    Match(Vec<(String, String)>),
}

/// A rule as written.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleSpec {
    /// What to call it in explanations.
    pub name: String,
    /// The operation or alias it is about; `None` for all.
    pub operation: Option<String>,
    /// When it applies.
    pub condition: Condition,
    /// What it does.
    pub action: Action,
}

/// A policy as written: an ordered list of rules.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicySpec {
    /// The rules.
    pub rules: Vec<RuleSpec>,
}

impl PolicySpec {
    /// Adds a rule.
    pub fn rule(mut self, name: &str, operation: Option<&str>, condition: Condition, action: Action) -> PolicySpec {
        let operation = operation.map(str::to_owned);
        self.rules.push(RuleSpec { name: name.to_owned(), operation, condition, action });
        self
    }

    /// Only `kernel` may serve `operation`.
    pub fn lock(self, operation: &str, kernel: &str) -> PolicySpec {
        let name = format!("lock {operation} to {kernel}");
        self.rule(&name, Some(operation), Condition::Always, Action::Lock(Pattern::Kernel(kernel.into())))
    }

    /// Kernels matching `kernel` may not run.
    pub fn deny(self, kernel: &str) -> PolicySpec {
        self.rule(&format!("deny {kernel}"), None, Condition::Always, Action::Deny(Pattern::Kernel(kernel.into())))
    }

    /// Prefers a library.
    pub fn prefer_source(self, source: &str) -> PolicySpec {
        self.rule(&format!("prefer {source}"), None, Condition::Always, Action::Prefer(Pattern::Source(source.into())))
    }

    /// Avoids a library.
    pub fn avoid_source(self, source: &str) -> PolicySpec {
        self.rule(&format!("avoid {source}"), None, Condition::Always, Action::Avoid(Pattern::Source(source.into())))
    }
}

/// Why a policy cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// A rule names an operation that does not exist.
    #[error("rule '{rule}': unknown operation '{name}'{}", did_you_mean(.nearest))]
    UnknownOperation {
        /// Which rule.
        rule: String,
        /// The name.
        name: String,
        /// The closest known one.
        nearest: Option<String>,
    },
    /// A condition that cannot be read.
    #[error("rule '{rule}': {error}")]
    BadCondition {
        /// Which rule.
        rule: String,
        /// What is wrong, and where.
        error: Box<ExprError>,
    },
}

/// A rule compiled for one operation.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub name: String,
    pub when: Option<Expr>,
    pub action: Action,
}

/// A policy compiled for every operation.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    by_op: Vec<Vec<Rule>>,
}

impl Policy {
    /// Compiles a policy.
    ///
    /// A condition is compiled against each operation it could apply to; one that names a field
    /// an operation does not have never applies to it, and one whose fields *no* operation has is
    /// an error.
    pub fn compile(spec: &PolicySpec) -> Result<Policy, PolicyError> {
        let catalog = Catalog::get();
        let mut by_op: Vec<Vec<Rule>> = catalog.ops().iter().map(|_| Vec::new()).collect();
        for rule in &spec.rules {
            let ops: Vec<&Op> = match &rule.operation {
                None => catalog.ops().iter().collect(),
                Some(name) => {
                    let target = catalog.find(name).map_err(|_| PolicyError::UnknownOperation {
                        rule: rule.name.clone(),
                        name: name.clone(),
                        nearest: nearest(name, catalog.ops().iter().map(Op::id)).map(str::to_owned),
                    })?;
                    target.ops.iter().map(|&ix| catalog.op(ix)).collect()
                }
            };
            let mut applies = false;
            let mut first_error = None;
            for op in ops {
                match compile_condition(&rule.condition, op) {
                    Ok(when) => {
                        applies = true;
                        let compiled = Rule { name: rule.name.clone(), when, action: rule.action.clone() };
                        by_op[op.ix().0 as usize].push(compiled);
                    }
                    Err(error) => {
                        first_error.get_or_insert(error);
                    }
                }
            }
            if let (false, Some(error)) = (applies, first_error) {
                return Err(PolicyError::BadCondition { rule: rule.name.clone(), error: Box::new(error) });
            }
        }
        Ok(Policy { by_op })
    }

    pub(crate) fn rules(&self, op: OpIx) -> &[Rule] {
        self.by_op.get(op.0 as usize).map_or(&[], Vec::as_slice)
    }
}

fn compile_condition(condition: &Condition, op: &Op) -> Result<Option<Expr>, ExprError> {
    match condition {
        Condition::Always => Ok(None),
        Condition::When(text) => Expr::compile_as(text, op.scope(), Type::Bool).map(Some),
        Condition::Match(fields) => {
            let entries = fields.iter().map(|(field, value)| (field.as_str(), MatchValue::Str(value)));
            Expr::from_match(entries, op.scope()).map(Some)
        }
    }
}

impl Rule {
    /// Whether it applies to a call. A condition that cannot be evaluated (overflow, division by
    /// zero) does not hold.
    pub fn applies(&self, facts: &Facts<'_>) -> bool {
        self.when.as_ref().is_none_or(|when| when.test(facts).unwrap_or(false))
    }
}
