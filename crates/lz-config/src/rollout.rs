//! Rollouts: a new kernel on a part of the calls.

use serde::Serialize;

/// How a candidate is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutMode {
    /// Beside the serving kernel; the answer is the serving kernel's.
    Shadow,
    /// Instead of it, for a part of the calls.
    Canary,
}

impl RolloutMode {
    pub(crate) const WORDS: &'static [&'static str] = &["shadow", "canary"];
}

/// A kernel that is tried on a part of the calls.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rollout {
    /// What it is called; no two have one name.
    pub name: String,
    /// The operation, alias or function.
    pub operation: String,
    /// The id of the kernel that is tried.
    pub candidate: String,
    /// How.
    pub mode: RolloutMode,
    /// On which part of the calls, above 0 and up to 1. `0.01` (or `1%`) when not given.
    pub fraction: f64,
    /// Decides which calls those are; 0 when not given.
    pub seed: u64,
    /// Rolled back above this part of failed calls; 0.01 when not given.
    pub max_error_rate: f64,
    /// Rolled back above this part of results that differ; 0 when not given.
    pub max_mismatch_rate: f64,
    /// Rolled back when it takes this many times as long as the serving kernel; 1.25 when not given.
    pub max_slowdown: f64,
    /// Not judged before this many calls; 50 when not given.
    pub min_samples: u64,
}

/// The keys of a rollout, with what they mean.
pub(crate) const ROLLOUT_KEYS: &[(&str, &str)] = &[
    ("name", "what it is called"),
    ("operation", "the operation, alias or function"),
    ("candidate", "the id of the kernel that is tried"),
    ("mode", "`shadow` (beside the serving kernel) or `canary` (instead of it)"),
    ("fraction", "part of the calls, `0.01` or `1%`"),
    ("seed", "decides which calls those are; 0"),
    ("max_error_rate", "rolled back above this part of failed calls; 0.01"),
    ("max_mismatch_rate", "rolled back above this part of results that differ; 0"),
    ("max_slowdown", "rolled back when it takes this many times as long; 1.25"),
    ("min_samples", "calls before it is judged; 50"),
];
