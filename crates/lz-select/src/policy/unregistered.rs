//! What a policy says of kernels that selection does not choose between: those of other libraries that nodes of graphs run.

use lz_model::{Catalog, KernelDescriptor, OpIx};

use super::compile::scope;
use super::kernels::{self, KernelFields};
use super::{Action, Condition, Pattern, RuleSpec};
use crate::snapshot::Snapshot;

/// What a policy says of such a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// It may not run.
    Denied,
    /// It runs after all others.
    Avoided,
    /// Nothing.
    Open,
    /// It runs before all others.
    Preferred,
}

impl Snapshot {
    /// What the policy says of a kernel that is not registered, in the place of an operation if it is for one. A rule with a condition
    /// is taken to apply if it forbids something, and not to if it favours something: there is no call to test it with.
    pub fn standing(&self, kernel: &KernelDescriptor, operation: Option<&str>) -> Standing {
        let known = operation.and_then(|name| Catalog::get().find(name).ok());
        let ops: &[OpIx] = known.as_ref().map_or(&[], |target| &target.ops);
        let spec = self.spec();
        let concerns = |name: &String| scope(name).iter().any(|(op, _)| ops.contains(op));
        let rules = || spec.policy.rules.iter().filter(|rule| rule.operation.as_ref().is_none_or(concerns));
        if !spec.settings.enabled || rules().any(|rule| self.forbids(rule, kernel, ops)) {
            return Standing::Denied;
        }
        // The first rule that favours or disfavours it decides.
        let said = rules().find_map(|rule| match &rule.action {
            Action::Avoid(pattern) if pattern.matches(kernel) => Some(Standing::Avoided),
            action if action.is_in_favour() && rule.condition == Condition::Always => {
                action.pattern().is_some_and(|pattern| pattern.matches(kernel)).then_some(Standing::Preferred)
            }
            _ => None,
        });
        said.unwrap_or(Standing::Open)
    }

    fn forbids(&self, rule: &RuleSpec, kernel: &KernelDescriptor, ops: &[OpIx]) -> bool {
        match &rule.action {
            Action::Deny(pattern) => pattern.matches(kernel),
            Action::Filter(text) => {
                kernels::filter(text).is_ok_and(|filter| !filter.test(&KernelFields(kernel)).unwrap_or(false))
            }
            Action::Lock(pattern) => {
                !pattern.matches(kernel) && (rule.operation.is_some() || self.serves(pattern, ops))
            }
            _ => false,
        }
    }

    /// Whether a registered kernel that a pattern names serves one of these operations: a lock to it is then about them.
    fn serves(&self, pattern: &Pattern, ops: &[OpIx]) -> bool {
        let serves = |kernel: &KernelDescriptor| {
            Catalog::get().find(&kernel.operation).is_ok_and(|target| target.ops.iter().any(|op| ops.contains(op)))
        };
        self.named(pattern).any(|ix| serves(self.kernel(ix)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicySpec;
    use crate::snapshot::SnapshotSpec;

    fn snapshot(policy: PolicySpec) -> Snapshot {
        let mut spec = SnapshotSpec { policy, ..SnapshotSpec::default() };
        spec.backend(lz_model::BackendDescriptor::native("own", "1", vec![lz_model::Platform::Cpu]));
        let mut own = KernelDescriptor::new("own.linear", "mlp.linear", "own");
        own.layouts = vec![lz_model::Layout::Strided];
        spec.kernels.push(std::sync::Arc::new(own));
        spec.build(0).unwrap()
    }

    #[test]
    fn rules_that_name_it_deny_it() {
        let addmm = KernelDescriptor::new("torch.addmm", "mlp.linear", "torch");
        let denies = |policy: PolicySpec| snapshot(policy).standing(&addmm, Some("mlp.linear")) == Standing::Denied;
        let rule = |operation, action| PolicySpec::default().rule("rule", operation, Condition::Always, action);
        assert!(!denies(PolicySpec::default()));
        assert!(denies(PolicySpec::default().deny("torch.addmm")));
        assert!(denies(PolicySpec::default().deny("torch")));
        assert!(!denies(PolicySpec::default().deny("torch.mm")));
        assert!(denies(rule(Some("mlp.*"), Action::Deny(Pattern::Source("torch".into())))));
        assert!(!denies(rule(Some("norm.rms"), Action::Deny(Pattern::Source("torch".into())))));
        assert!(denies(rule(None, Action::Filter("library != 'torch'".into()))));
        assert!(!denies(rule(None, Action::Filter("library == 'torch'".into()))));
    }

    #[test]
    fn a_lock_lets_only_what_it_names_run() {
        let addmm = KernelDescriptor::new("torch.addmm", "mlp.linear", "torch");
        let locked = |pattern: &str, operation: Option<&str>| {
            let lock = Action::Lock(Pattern::Kernel(pattern.into()));
            let policy = PolicySpec::default().rule("lock", operation, Condition::Always, lock);
            snapshot(policy)
        };
        assert_eq!(locked("own.linear", Some("mlp.linear")).standing(&addmm, Some("mlp.linear")), Standing::Denied);
        assert_eq!(locked("own.linear", None).standing(&addmm, Some("mlp.linear")), Standing::Denied);
        assert_eq!(locked("own.linear", None).standing(&addmm, None), Standing::Open);
        assert_eq!(locked("torch", Some("mlp.linear")).standing(&addmm, Some("mlp.linear")), Standing::Preferred);
        assert_eq!(locked("own.linear", Some("norm.rms")).standing(&addmm, Some("mlp.linear")), Standing::Open);
    }

    #[test]
    fn preferences_put_it_first_or_last() {
        let addmm = KernelDescriptor::new("torch.addmm", "mlp.linear", "torch");
        let standing = |policy: PolicySpec| snapshot(policy).standing(&addmm, Some("mlp.linear"));
        assert_eq!(standing(PolicySpec::default().prefer_source("torch")), Standing::Preferred);
        assert_eq!(standing(PolicySpec::default().avoid_source("torch")), Standing::Avoided);
        assert_eq!(standing(PolicySpec::default().avoid_source("torch").prefer_source("torch")), Standing::Avoided);
        assert_eq!(standing(PolicySpec::default().prefer_source("own")), Standing::Open);
        let prefer = Action::Prefer(Pattern::Source("torch".into()));
        let sometimes = PolicySpec::default().rule("few", None, Condition::When("rows < 8".into()), prefer);
        assert_eq!(standing(sometimes), Standing::Open);
    }

    #[test]
    fn nothing_runs_where_kernels_are_switched_off() {
        let mut spec = SnapshotSpec::default();
        spec.settings.enabled = false;
        let mm = KernelDescriptor::new("torch.mm", "mlp.linear", "torch");
        assert_eq!(spec.build(0).unwrap().standing(&mm, None), Standing::Denied);
    }
}
