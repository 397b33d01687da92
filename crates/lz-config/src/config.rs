//! What is in force, and where it comes from.

use std::path::{Path, PathBuf};

use lz_model::{DefaultLayouts, Layout, nearest};
use lz_select::{Action, Condition, Finding, FindingKind, PREFER_POINTS, Pattern, PolicySpec, RuleSpec};
use serde::Serialize;

use crate::operation;
use crate::origin::Origin;
use crate::problem::{ConfigError, ConfigWarning, Problem, ProblemKind};
use crate::read::{Layer, Lock, Said};
use crate::rollout::Rollout;
use crate::settings::{CacheLayout, DenseLayout, SETTINGS, Settings};
use crate::value::Value;

/// A setting, lock, rule or rollout in force.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Entry {
    /// Its key: `breaker.timeout_ms`, `locks.attention.causal`, `rules[0]`.
    pub key: String,
    /// Its value.
    pub value: Value,
    /// Who said it.
    pub origin: Origin,
}

/// What is in force.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// The settings.
    pub settings: Settings,
    /// The rollouts, those of higher layers first; of one name only the highest.
    pub rollouts: Vec<Rollout>,
    /// What is probably a mistake.
    pub warnings: Vec<ConfigWarning>,
    policy: PolicySpec,
    /// By rule of the policy, its key and who said it.
    places: Vec<(String, Option<Origin>)>,
    entries: Vec<Entry>,
    files: Vec<PathBuf>,
    home: Option<PathBuf>,
}

impl Config {
    /// Puts layers together, highest first.
    pub(crate) fn resolve(
        layers: &[&Layer],
        files: Vec<PathBuf>,
        home: Option<PathBuf>,
    ) -> Result<Config, ConfigError> {
        let mut config = Config { files, home, ..Config::default() };
        let chosen = chosen_policy(layers)?;
        for setting in SETTINGS {
            let said = layers.iter().find_map(|layer| match layer.values.get(setting.key) {
                Some(said) => Some((said.value.clone(), said.origin.clone())),
                None if setting.key == "health.sample_every" => {
                    let policy = chosen.as_ref().and_then(|name| layer.policies.get(name));
                    policy.and_then(|policy| policy.profiling.clone()).map(|origin| (Value::Int(1), origin))
                }
                None => None,
            });
            let (value, origin) = said.unwrap_or_else(|| (setting.default(), Origin::Default));
            (setting.set)(&mut config.settings, &value);
            config.entries.push(Entry { key: setting.key.to_owned(), value, origin });
        }
        config.check_thresholds()?;
        let locks = locks_in_force(layers);
        for lock in locks.iter().flatten() {
            let key = format!("locks.{}", lock.what.operation);
            config.entries.push(Entry { key, value: lock.value.clone(), origin: lock.origin.clone() });
        }
        for (layer, locks) in layers.iter().zip(&locks) {
            config.take_rules(layer, locks, chosen.as_deref());
            config.take_rollouts(layer);
            config.warnings.extend(layer.warnings.iter().cloned());
        }
        config.take_sources("prefer_sources");
        config.take_sources("avoid_sources");
        Ok(config)
    }

    fn take_rules(&mut self, layer: &Layer, locks: &[&Said<Lock>], chosen: Option<&str>) {
        // A lock on fewer operations is the more special one, and comes first.
        let mut locks = locks.to_vec();
        locks.sort_by_key(|lock| operation::breadth(&lock.what.operation));
        for lock in locks {
            let (operation, Some(kernel)) = (lock.what.operation.clone(), lock.what.kernel.clone()) else { continue };
            let name = format!("lock {operation} to {kernel} ({})", lock.origin.short());
            let (key, action) = (format!("locks.{operation}"), Action::Lock(Pattern::Kernel(kernel)));
            let rule = RuleSpec::new(name, Some(operation), Condition::Always, action);
            self.add_rule(RuleSpec { optional: lock.what.optional, ..rule }, key, Some(&lock.origin));
        }
        for rule in &layer.rules {
            let key = format!("rules[{}]", self.entries.iter().filter(|e| e.key.starts_with("rules[")).count());
            rule.what.iter().for_each(|one| self.add_rule(one.clone(), key.clone(), Some(&rule.origin)));
            self.entries.push(Entry { key, value: rule.value.clone(), origin: rule.origin.clone() });
        }
        let policy = chosen.and_then(|name| layer.policies.get(name)).map_or(&[][..], |policy| &policy.rules);
        policy.iter().chain(&layer.document).for_each(|rule| self.add_rule(rule.clone(), rule.name.clone(), None));
    }

    fn add_rule(&mut self, rule: RuleSpec, key: String, origin: Option<&Origin>) {
        self.policy.rules.push(rule);
        self.places.push((key, origin.cloned()));
    }

    fn take_rollouts(&mut self, layer: &Layer) {
        for rollout in &layer.rollouts {
            if self.rollouts.iter().all(|known| known.name != rollout.what.name) {
                let key = format!("rollouts[{}]", self.rollouts.len());
                self.entries.push(Entry { key, value: rollout.value.clone(), origin: rollout.origin.clone() });
                self.rollouts.push(rollout.what.clone());
            }
        }
    }

    /// Libraries preferred or avoided. Of several preferred ones, an earlier one is worth more.
    fn take_sources(&mut self, key: &str) {
        let Some(entry) = self.entries.iter().find(|e| e.key == key) else { return };
        let (Value::List(names), origin) = (entry.value.clone(), entry.origin.clone()) else { return };
        let count = names.len();
        for (i, name) in names.iter().enumerate() {
            let Value::Str(name) = name else { continue };
            let pattern = Pattern::Source(name.clone());
            let ahead = i32::try_from(count - 1 - i).unwrap_or(0);
            let (verb, action) = match (key, ahead) {
                ("avoid_sources", _) => ("avoid", Action::Avoid(pattern)),
                (_, 0) => ("prefer", Action::Prefer(pattern)),
                (_, ahead) => ("prefer", Action::Boost(pattern, PREFER_POINTS + ahead)),
            };
            let name = format!("{verb} {name} ({})", origin.short());
            let rule = RuleSpec::new(name, None, Condition::Always, action);
            self.add_rule(rule, key.to_owned(), Some(&origin));
        }
    }

    /// Thresholds of degradation go down from level to level.
    fn check_thresholds(&self) -> Result<(), ConfigError> {
        let levels = &self.settings.degradation;
        let thresholds = [
            ("degradation.reduced_health", levels.reduced_health),
            ("degradation.cached_health", levels.cached_health),
            ("degradation.rule_based_health", levels.rule_based_health),
            ("degradation.minimal_health", levels.minimal_health),
        ];
        let wrong = thresholds.windows(2).find(|pair| pair[1].1 > pair[0].1).map(|pair| (pair[1], pair[0]));
        let breaker = &self.settings.breaker;
        let longest = ("breaker.max_timeout_ms", breaker.max_timeout_ms);
        let (key, value, message) = if let Some(((key, value), (above, most))) = wrong {
            (key, value.to_string(), format!("{value} is above {above}, which is {most}"))
        } else if longest.1 < breaker.timeout_ms {
            let message = format!("{} is below breaker.timeout_ms, which is {}", longest.1, breaker.timeout_ms);
            (longest.0, longest.1.to_string(), message)
        } else {
            return Ok(());
        };
        let at = self.origin(key).cloned().unwrap_or(Origin::Default);
        let kind = ProblemKind::Contradiction { message };
        Err(Problem { at, key: key.to_owned(), value: Some(value), kind }.into())
    }

    /// Locks, preferences, rules and documents as one ordered policy for selection.
    pub fn policy(&self) -> &PolicySpec {
        &self.policy
    }

    /// What findings about the policy come to as an error: each with its key and place.
    pub fn refused(&self, findings: &[Finding]) -> ConfigError {
        let problem = |finding: &Finding| {
            let (key, origin) = self.places.get(finding.index).cloned().unwrap_or_default();
            let (name, kind) = match &finding.kind {
                FindingKind::UnknownKernel { name, nearest } => {
                    let kind =
                        ProblemKind::UnknownName { what: "kernel", name: name.clone(), nearest: nearest.clone() };
                    (Some(name.clone()), kind)
                }
                FindingKind::UnknownSource { name, nearest } => {
                    let kind =
                        ProblemKind::UnknownName { what: "library", name: name.clone(), nearest: nearest.clone() };
                    (Some(name.clone()), kind)
                }
                other => (None, ProblemKind::Contradiction { message: other.to_string() }),
            };
            Problem { at: origin.unwrap_or(Origin::Default), key, value: name, kind }
        };
        ConfigError { problems: findings.iter().map(problem).collect() }
    }

    /// That nobody knows the kernel a rollout is to try: with its key and place.
    pub fn unknown_candidate(&self, rollout: usize, nearest: Option<String>) -> Problem {
        let key = format!("rollouts[{rollout}]");
        let at = self.origin(&key).cloned().unwrap_or(Origin::Default);
        let name = self.rollouts.get(rollout).map(|rollout| rollout.candidate.clone()).unwrap_or_default();
        let kind = ProblemKind::UnknownName { what: "kernel", name: name.clone(), nearest };
        Problem { at, key: format!("{key}.candidate"), value: Some(name), kind }
    }

    /// That nobody knows a backend or library of `backends.unproven`: with its key and place.
    pub fn unknown_unproven(&self, name: &str, nearest: Option<String>) -> Problem {
        let key = "backends.unproven";
        let at = self.origin(key).cloned().unwrap_or(Origin::Default);
        let kind = ProblemKind::UnknownName { what: "backend or library", name: name.to_owned(), nearest };
        Problem { at, key: key.to_owned(), value: Some(name.to_owned()), kind }
    }

    /// The switches of selection.
    pub fn selection(&self) -> lz_select::Settings {
        let settings = &self.settings;
        lz_select::Settings {
            enabled: settings.enabled,
            strict: settings.strict_mode,
            allow_adaptation: settings.allow_adaptation,
            deterministic: settings.deterministic,
            batch_invariant: settings.batch_invariant,
            allow_jit: settings.allow_jit,
            max_cpu_isa: settings.max_cpu_isa,
            most_threads: usize::try_from(settings.num_threads).ok().filter(|&n| n > 0).unwrap_or(usize::MAX),
            memory_headroom_bytes: i64::try_from(settings.memory_headroom_mb << 20).unwrap_or(i64::MAX),
            graph_strict: settings.graph_strict_mode,
            fallback_enabled: settings.fallback_enabled,
            default_layouts: DefaultLayouts {
                dense: match settings.default_layout {
                    DenseLayout::Bshd => Layout::Bshd,
                    DenseLayout::Bhsd => Layout::Bhsd,
                },
                cache: match settings.default_cache_layout {
                    CacheLayout::Nhd => Layout::Nhd,
                    CacheLayout::Hnd => Layout::Hnd,
                },
            },
            verify: settings.verify,
            explains: settings.explain_enabled,
            unproven: settings.backends.unproven.clone(),
        }
    }

    /// Every setting, lock, rule and rollout in force, with who said it.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Who said a setting.
    pub fn origin(&self, key: &str) -> Option<&Origin> {
        self.entries.iter().find(|entry| entry.key == key).map(|entry| &entry.origin)
    }

    /// Every file that was read, included ones too: those to watch.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Where the performance database is, with the home directory put in; `None` when that is needed and not known.
    pub fn perfdb_path(&self) -> Option<PathBuf> {
        let path = &self.settings.perfdb.path;
        (self.home.is_some() || !path.starts_with("~")).then(|| self.placed("perfdb.path", path))
    }

    /// Where the manifest of calls is, with the home directory put in; `None` when that is needed and not known.
    pub fn manifest_path(&self) -> Option<PathBuf> {
        let path = &self.settings.jit.manifest_path;
        (self.home.is_some() || !path.starts_with("~")).then(|| self.placed("jit.manifest_path", path))
    }

    /// Where the lockfile is, if there is one; a relative path is relative to the file that says it.
    pub fn lockfile_path(&self) -> Option<PathBuf> {
        self.settings.lockfile.as_ref().map(|path| self.placed("lockfile", path))
    }

    /// Where the dispatch table is, likewise.
    pub fn dispatch_table_path(&self) -> Option<PathBuf> {
        self.settings.dispatch_table.as_ref().map(|path| self.placed("dispatch_table", path))
    }

    /// A setting's path with the home directory put in; a relative one is relative to the file that says it.
    pub(crate) fn placed(&self, key: &str, path: &Path) -> PathBuf {
        if let (Ok(rest), Some(home)) = (path.strip_prefix("~"), &self.home) {
            return home.join(rest);
        }
        self.origin(key).and_then(Origin::file).and_then(Path::parent).map_or_else(|| path.to_owned(), |f| f.join(path))
    }
}

/// The policy of the kernels documents that is in force; it must be in one of them.
fn chosen_policy(layers: &[&Layer]) -> Result<Option<String>, ConfigError> {
    let Some(said) = layers.iter().find_map(|layer| layer.values.get("policy")) else { return Ok(None) };
    let Value::Str(name) = &said.value else { return Ok(None) };
    let known = || layers.iter().flat_map(|layer| layer.policies.keys().map(String::as_str));
    if known().any(|known| known == name) {
        return Ok(Some(name.clone()));
    }
    let nearest = nearest(name, known()).map(str::to_owned);
    let kind = ProblemKind::UnknownPolicy { name: name.clone(), nearest };
    Err(Problem { at: said.origin.clone(), key: "policy".into(), value: Some(name.clone()), kind }.into())
}

/// By layer, its locks that no higher layer replaces or takes away.
fn locks_in_force<'a>(layers: &[&'a Layer]) -> Vec<Vec<&'a Said<Lock>>> {
    let mut decided: Vec<&str> = Vec::new();
    let mut by_layer = Vec::new();
    for layer in layers {
        let open = |lock: &&Said<Lock>| !decided.contains(&lock.what.operation.as_str());
        let locks: Vec<&Said<Lock>> = layer.locks.iter().filter(open).collect();
        decided.extend(locks.iter().map(|lock| lock.what.operation.as_str()));
        by_layer.push(locks);
    }
    by_layer
}
