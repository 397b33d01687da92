//! The configuration of an engine: its layers, what came of reloads, and what each part of it means below.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use lz_config::{Config, Layers, RolloutMode};
use lz_resilience::rollout::{Limits, Mode};
use lz_resilience::{BreakerConfig, DegradationConfig, Rollout, RolloutSpec, Watch};
use lz_select::{Pattern, RolloutRule, SnapshotSpec};
use parking_lot::Mutex;
use serde::Serialize;

use crate::documents::PinStatus;

/// What became of the attempts to reload.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Reloads {
    /// Configurations that were taken over.
    pub succeeded: u64,
    /// Configurations that were refused.
    pub refused: u64,
    /// Why the last one was, until one succeeds.
    pub last_error: Option<String>,
}

/// The configuration of an engine, and where it comes from.
#[derive(Default)]
pub(crate) struct Control {
    pub layers: Mutex<Layers>,
    pub config: ArcSwap<Config>,
    pub succeeded: AtomicU64,
    pub refused: AtomicU64,
    pub last_error: Mutex<Option<String>>,
    pub watch: Mutex<Option<Watch>>,
    /// The program is ending: nothing is watched any more.
    pub ended: AtomicBool,
    /// Kernels are still to be registered; until then a name in a configuration may be one of theirs.
    pub kernels_follow: AtomicBool,
    /// Names that were said not to be installed.
    pub absent: Mutex<BTreeSet<String>>,
    /// Settings that name documents which are not read.
    pub unread: Mutex<Vec<&'static str>>,
    /// What of lockfiles and tables was in force in a version.
    pub judged: Mutex<Option<(u64, Arc<Vec<PinStatus>>)>>,
}

impl Control {
    /// Whether kernels are still to be registered.
    pub fn new(kernels_follow: bool) -> Control {
        Control { kernels_follow: AtomicBool::new(kernels_follow), ..Control::default() }
    }

    pub fn reloads(&self) -> Reloads {
        Reloads {
            succeeded: self.succeeded.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            last_error: self.last_error.lock().clone(),
        }
    }
}

/// What a configuration says about selection.
pub(crate) fn apply(config: &Config, spec: &mut SnapshotSpec) {
    spec.policy = config.policy().clone();
    spec.settings = config.selection();
}

pub(crate) fn rollout_rule(rollout: &Arc<Rollout>) -> RolloutRule {
    let spec = rollout.spec();
    let taken = rollout.clone();
    let takes = Arc::new(move |key| taken.spec().mode == Mode::Canary && taken.takes(key));
    RolloutRule::new(&spec.name, &spec.operation, Pattern::Kernel(spec.candidate.clone()), takes)
}

pub(crate) fn rollout_spec(rollout: &lz_config::Rollout) -> RolloutSpec {
    RolloutSpec {
        name: rollout.name.clone(),
        operation: rollout.operation.clone(),
        candidate: rollout.candidate.clone(),
        mode: match rollout.mode {
            RolloutMode::Shadow => Mode::Shadow,
            RolloutMode::Canary => Mode::Canary,
        },
        fraction: rollout.fraction,
        seed: rollout.seed,
        limits: Limits {
            max_error_rate: rollout.max_error_rate,
            max_mismatch_rate: rollout.max_mismatch_rate,
            max_slowdown: rollout.max_slowdown,
            min_samples: rollout.min_samples,
        },
    }
}

pub(crate) fn breaker(config: &Config) -> BreakerConfig {
    let s = &config.settings.breaker;
    BreakerConfig {
        failure_threshold: if s.enabled { s.failure_threshold } else { u32::MAX },
        success_threshold: s.success_threshold,
        timeout_ms: s.timeout_ms,
        max_timeout_ms: s.max_timeout_ms,
        half_open_max_calls: s.half_open_max_calls,
        ..BreakerConfig::default()
    }
}

pub(crate) fn degradation(config: &Config) -> Option<DegradationConfig> {
    let s = &config.settings.degradation;
    s.enabled.then(|| DegradationConfig {
        reduced: s.reduced_health,
        cached: s.cached_health,
        rule_based: s.rule_based_health,
        minimal: s.minimal_health,
        hysteresis: s.hysteresis,
        min_calls: u64::from(s.min_calls),
        window_ms: s.window_ms,
    })
}
