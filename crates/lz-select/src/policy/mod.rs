//! The operator's will: locks, denials, preferences and rules, compiled per operation.

mod analysis;
mod applied;
mod compile;
mod kernels;
mod locks;
mod naming;
mod reach;
mod trace;
mod unregistered;

use lz_expr::ExprError;
use lz_model::{KernelDescriptor, did_you_mean};

pub use analysis::{Finding, FindingKind, Severity, analyse, not_installed, refusals};
pub(crate) use applied::Applied;
pub(crate) use compile::{Policy, Rule, scope};
pub use naming::KernelName;
pub use trace::{Effect, RuleTrace};
pub use unregistered::Standing;

/// Points a preference is worth.
pub const PREFER_POINTS: i32 = 20;
/// Points an avoidance costs.
pub const AVOID_POINTS: i32 = -50;

/// Names kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Kernels by a name or a glob: their id, one of their aliases, their backend or their library. `flashinfer` names
    /// every kernel of the library, whichever backend it is in; `flashinfer_prefill` those of that backend. `@version`
    /// narrows it to one version.
    Kernel(String),
    /// Every kernel of a library or of a backend, by name or glob. A library and a backend of one name are the library.
    Source(String),
    /// Kernels as a document calls them that does not know their ids: an id, or its beginning, in
    /// any spelling. `.`, `_` and `-` separate words and are the same; so are `attention` and
    /// `attn`, `v2` and `2`; case and words written together make no difference. So
    /// `flash_attention_v2` names `flash_attn.v2.causal`, `torch_sdpa` names `torch.sdpa.math`,
    /// and `flash_infer` everything of `flashinfer`. `*` and `?` work as in a glob.
    Name(String),
}

impl Pattern {
    /// Whether a kernel is meant.
    pub fn matches(&self, kernel: &KernelDescriptor) -> bool {
        self.versioned().1.is_none_or(|version| kernel.version == version) && self.names(kernel.into())
    }

    /// As written.
    pub fn as_str(&self) -> &str {
        match self {
            Pattern::Kernel(text) | Pattern::Source(text) | Pattern::Name(text) => text,
        }
    }
}

/// What a rule does to the kernels it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Raises their score by [`PREFER_POINTS`].
    Prefer(Pattern),
    /// Lowers their score by [`AVOID_POINTS`].
    Avoid(Pattern),
    /// Raises their score by this much.
    Boost(Pattern, i32),
    /// Replaces their declared priority. The first such rule that names a kernel decides.
    Priority(Pattern, i32),
    /// They come first, if they can serve the call; all others stay behind them. Of several such
    /// rules the first decides that has a kernel which can serve the call.
    Override(Pattern),
    /// They are next in line after the chosen kernel, if they can serve the call.
    Fallback(Pattern),
    /// Only they may run. The first lock that applies decides.
    Lock(Pattern),
    /// They may not run, whatever other rules say.
    Deny(Pattern),
    /// Kernels for which an expression over their own fields (`id`, `backend`, `version`,
    /// `operation`, `priority` as declared, `deterministic`, `graph_safe`, `autograd`, `batch_invariant`,
    /// `jit`, `reference`, `experimental`) is not true may not run.
    Filter(String),
}

impl Action {
    /// The kernels it names; a filter goes by their fields.
    pub fn pattern(&self) -> Option<&Pattern> {
        match self {
            Action::Prefer(p)
            | Action::Avoid(p)
            | Action::Boost(p, _)
            | Action::Priority(p, _)
            | Action::Override(p)
            | Action::Fallback(p)
            | Action::Lock(p)
            | Action::Deny(p) => Some(p),
            Action::Filter(_) => None,
        }
    }

    /// Whether it lets kernels run, or run more often.
    pub(crate) fn is_in_favour(&self) -> bool {
        match self {
            Action::Boost(_, points) => *points > 0,
            Action::Prefer(_) | Action::Priority(..) | Action::Override(_) | Action::Fallback(_) | Action::Lock(_) => {
                true
            }
            Action::Avoid(_) | Action::Deny(_) | Action::Filter(_) => false,
        }
    }

    /// What it is called in files.
    pub fn name(&self) -> &'static str {
        match self {
            Action::Prefer(_) => "prefer",
            Action::Avoid(_) => "avoid",
            Action::Boost(..) => "boost",
            Action::Priority(..) => "priority",
            Action::Override(_) => "override",
            Action::Fallback(_) => "fallback",
            Action::Lock(_) => "lock",
            Action::Deny(_) => "deny",
            Action::Filter(_) => "filter",
        }
    }
}

/// What a field is matched against: a value, a comparison (`">=90"`) or a glob, or any of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldPattern {
    /// This one.
    One(String),
    /// Any of these.
    Any(Vec<String>),
}

impl From<&str> for FieldPattern {
    fn from(text: &str) -> FieldPattern {
        FieldPattern::One(text.to_owned())
    }
}

impl From<String> for FieldPattern {
    fn from(text: String) -> FieldPattern {
        FieldPattern::One(text)
    }
}

/// When a rule applies.
#[derive(Clone, Debug, PartialEq)]
pub enum Condition {
    /// Always.
    Always,
    /// When an expression holds.
    When(String),
    /// When every field matches its pattern (`sm: ">=90"`).
    Match(Vec<(String, FieldPattern)>),
    /// When all of these hold.
    All(Vec<Condition>),
}

/// A rule as written.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleSpec {
    /// What to call it in explanations.
    pub name: String,
    /// The operation, alias or function it is about, or a glob over their names; `None` for all.
    /// A lock without one is about the operations that the kernels it names serve.
    pub operation: Option<String>,
    /// When it applies.
    pub condition: Condition,
    /// What it does.
    pub action: Action,
    /// It may name a kernel or library that is not there; then it does nothing. For plugins that may not be installed.
    pub optional: bool,
}

impl RuleSpec {
    /// A rule whose names must be known.
    pub fn new(name: String, operation: Option<String>, condition: Condition, action: Action) -> RuleSpec {
        RuleSpec { name, operation, condition, action, optional: false }
    }

    /// Whether it can be read: the operation exists, and its expressions make sense for at least
    /// one operation it is about.
    pub fn check(&self) -> Result<(), PolicyError> {
        compile::check(self)
    }
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
        self.rules.push(RuleSpec::new(name.to_owned(), operation, condition, action));
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
    /// A condition or filter that cannot be read.
    #[error("rule '{rule}': {error}")]
    BadCondition {
        /// Which rule.
        rule: String,
        /// What is wrong, and where.
        error: Box<ExprError>,
    },
}
