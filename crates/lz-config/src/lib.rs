//! Configuration: files, environment and code in layers; every setting declared once.
//!
//! - [`SETTINGS`] is the list of all settings. Files, environment variables, `configure(key=value)`, the
//!   [reference](reference_markdown) and the [JSON schema](schema) all follow from it.
//! - [`Layers`] reads and keeps what everybody says; [`Layers::resolve`] gives the [`Config`] in force, in which every
//!   value knows its [`Origin`].
//! - [`Config::policy`] is the operator's will as selection takes it: locks, rules, preferences, kernels documents.
//! - A [`ConfigError`] names file, line, column, key, value and the nearest valid key, for everything that is wrong.
//!
//! ```
//! use lz_config::{Layers, Origin, Sources, Value};
//!
//! let folder = tempfile::tempdir()?;
//! let project = folder.path().join("layerzero.yaml");
//! std::fs::write(&project, "
//! version: 1
//! breaker: {timeout_ms: 5000}
//! locks:
//!   attention.causal: flash_attn.v3.causal
//! rules:
//!   - match: {sm: '>=90', operation: 'attention.*'}
//!     prefer: flash_attn.v3.*
//! ")?;
//! let environment = [("LAYERZERO_PREFER".into(), "flashinfer".into())].into();
//! let sources = Sources { project: Some(project.clone()), environment, ..Sources::default() };
//!
//! let mut layers = Layers::load(&sources)?;
//! layers.code().set("fallback_enabled", Value::Bool(false))?;
//! let config = layers.resolve()?;
//! assert_eq!(config.settings.breaker.timeout_ms, 5000);
//! assert!(!config.selection().fallback_enabled);
//! assert_eq!(config.origin("fallback_enabled"), Some(&Origin::Code));
//! let rules: Vec<&str> = config.policy().rules.iter().map(|rule| rule.name.as_str()).collect();
//! assert_eq!(rules[0], "lock attention.causal to flash_attn.v3.causal (layerzero.yaml:5)");
//! assert_eq!(rules[1..], ["layerzero.yaml:7", "prefer flashinfer (LAYERZERO_PREFER)"]);
//!
//! // Mistakes are found when the file is read.
//! std::fs::write(&project, "fallback_enabld: true")?;
//! let error = layers.reread().unwrap_err();
//! assert!(error.to_string().ends_with(":1:1: fallback_enabld: unknown key; did you mean 'fallback_enabled'?"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Precedence
//!
//! call > context > code > environment > project file > user file > default. What a call says is its own arguments;
//! [`Layers::resolve_in`] takes the contexts. An included file stands right below the file that includes it. The highest
//! layer that says a setting decides it, a list of libraries as a whole. Locks add up by operation, rules are put one
//! behind the other, those of higher layers first.
//!
//! # Kernels documents
//!
//! A document with `kernels:` or `schema_version:` says which implementations operations have, within which constraints
//! (see `read/kernels.rs` for what each key turns into). It is a file like others: the project file itself, or included
//! by it. Its kernels are [names in any spelling](lz_select::Pattern::Name).
//!
//! This crate stands above `lz-select`, not below it: the policy's types live there, with the code that obeys them.
#![forbid(unsafe_code)]

mod config;
mod declare;
mod environment;
mod file;
mod files;
mod layers;
mod node;
mod operation;
mod origin;
mod paths;
mod problem;
mod read;
mod reference;
mod rollout;
mod settings;
mod value;
mod yaml;

pub use config::{Config, Entry};
pub use declare::{Kind, Setting, Variable};
pub use environment::environment;
pub use file::read as read_file;
pub use layers::{CodeLayer, FILE_NAME, Layers, Sources};
pub use origin::Origin;
pub use paths::resolve as resolve_path;
pub use problem::{ConfigError, ConfigWarning, Problem, ProblemKind};
pub use reference::{reference_markdown, schema};
pub use rollout::{Rollout, RolloutMode};
pub use settings::{
    BreakerSettings, CacheLayout, CacheSettings, CompileSettings, DegradationSettings, DenseLayout, GraphSettings,
    HealthSettings, InProcess, JitSettings, Lowering, OneByOne, PerfDbSettings, Recompile, SECTIONS, SETTINGS, Section,
    Settings, VARIABLES,
};
pub use value::Value;
pub use yaml::MAX_DEPTH;

pub use lz_select::{Finding, FindingKind, Severity, analyse};
