//! Arguments as they are written. What they mean is resolved in [`crate::session`] and [`crate::call`].

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, ValueEnum};
use lz_model::{Accuracy, DType, Layout, Packing};

use crate::commands::Command;

/// Runs the fastest kernel that is proven right for a call, and says why.
///
/// LayerZero knows operations, the kernels that implement them, and what each of them needs. This command shows what
/// this machine has and which kernel serves a call.
#[derive(Debug, Parser)]
#[command(name = "layerzero", version, arg_required_else_help = true, after_help = EXITS)]
pub struct Cli {
    /// Arguments every command has.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXITS: &str = "Exit codes: 0 done; 1 the answer is no (no kernel, a difference); 2 wrong usage or call; \
3 wrong configuration, capabilities or device file; 4 unusable environment; 130 stopped.";

/// Arguments every command has.
#[derive(Debug, Args)]
pub struct Global {
    /// Print JSON instead of text
    #[arg(long, global = true)]
    pub json: bool,
    /// The project's configuration file, instead of $LAYERZERO_CONFIG or ./layerzero.yaml
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// When to colour; 'auto' colours terminals unless NO_COLOR is set
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: ColorChoice,
}

/// When to colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ColorChoice {
    /// Terminals, unless `NO_COLOR` is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// What the engine is made of.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// The device to answer for: a JSON file, a described device (h100, a100, mi300x, …), or one
    /// of this machine (cpu, cuda:0, …). By default torch's accelerator in use, else the CPU
    #[arg(long, value_name = "FILE|NAME")]
    pub device: Option<String>,
    /// A capabilities document whose kernels are considered too; may be repeated
    #[arg(long, value_name = "FILE")]
    pub capabilities: Vec<PathBuf>,
    /// A library that a described device has, beside torch; may be repeated. If none is named, it has all known
    /// libraries
    #[arg(long, value_name = "LIB[=VERSION]")]
    pub assume: Vec<String>,
}

/// What the operator wants.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Policy")]
pub struct PolicyArgs {
    /// Only this kernel may serve the call; a glob, or id@version
    #[arg(long, value_name = "KERNEL")]
    pub lock: Option<String>,
    /// This kernel may not serve the call; a glob, or id@version; may be repeated
    #[arg(long, value_name = "KERNEL")]
    pub deny: Vec<String>,
    /// Prefer the kernels of this backend; may be repeated
    #[arg(long, value_name = "BACKEND")]
    pub prefer: Vec<String>,
    /// Avoid the kernels of this backend; may be repeated
    #[arg(long, value_name = "BACKEND")]
    pub avoid: Vec<String>,
    /// Refuse transforms of the arguments, and strides that contradict the layout
    #[arg(long)]
    pub strict: bool,
}

/// A call.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Call")]
pub struct CallArgs {
    /// The operation or alias; see 'layerzero ops'
    #[arg(long, value_name = "NAME")]
    pub op: String,
    /// A tensor of the call and its shape; repeated for each
    #[arg(long = "shape", value_name = "TENSOR=2x8x64")]
    pub shapes: Vec<Named<Extents>>,
    /// The dtype of the data: bf16, float16, fp8_e4m3, … (default: float32 if the operation has it)
    #[arg(long)]
    pub dtype: Option<DType>,
    /// The dtype of one tensor; may be repeated
    #[arg(long = "input-dtype", value_name = "TENSOR=DTYPE")]
    pub input_dtypes: Vec<Named<DType>>,
    /// The strides of one tensor, in elements; may be repeated
    #[arg(long, value_name = "TENSOR=512x64x1")]
    pub strides: Vec<Named<Extents>>,
    /// A parameter of the call; may be repeated
    #[arg(long = "param", value_name = "NAME=VALUE")]
    pub params: Vec<Named<String>>,
    /// The layout; BSHD for attention and rope, NHD for paged caches when not given (see default_layout and
    /// default_cache_layout in 'layerzero config')
    #[arg(long)]
    pub layout: Option<Layout>,
    /// Only deterministic kernels
    #[arg(long)]
    pub deterministic: bool,
    /// A CUDA graph is being captured
    #[arg(long)]
    pub capturing: bool,
    /// Gradients are wanted
    #[arg(long)]
    pub requires_grad: bool,
    /// Only kernels whose result for a row does not depend on the rest of the batch
    #[arg(long)]
    pub batch_invariant: bool,
    /// How the weights lie in memory: plain, blocked_32x1, …
    #[arg(long, default_value_t)]
    pub packing: Packing,
    /// The least accuracy of the computation: bf16, tf32, split_bf16_2, split_bf16_3, standard
    #[arg(long, value_name = "CLASS", default_value_t)]
    pub accuracy: Accuracy,
    /// Threads a kernel on the CPU may use (default: one per core)
    #[arg(long, value_name = "N", default_value_t, hide_default_value = true)]
    pub threads: u16,
}

/// Something with a name, written `name=value`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named<T> {
    /// The name.
    pub name: String,
    /// The value.
    pub value: T,
}

/// What is wrong with the text of an argument.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadText(String);

impl BadText {
    /// This is wrong with it.
    pub fn new(what: impl Into<String>) -> BadText {
        BadText(what.into())
    }
}

impl<T: FromStr<Err: fmt::Display>> FromStr for Named<T> {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Self, BadText> {
        match text.split_once('=') {
            Some((name, value)) if !name.trim().is_empty() => Ok(Named {
                name: name.trim().to_owned(),
                value: value.trim().parse().map_err(|e: T::Err| BadText(e.to_string()))?,
            }),
            _ => Err(BadText("expected NAME=VALUE".into())),
        }
    }
}

/// Sizes or strides, written `2x1024x32x128`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extents(pub Vec<i64>);

impl FromStr for Extents {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Self, BadText> {
        let number = |part: &str| {
            let bad = || BadText(format!("'{part}' is no whole number; write sizes like 2x1024x32x128"));
            part.trim().parse().map_err(|_| bad())
        };
        text.split('x').map(number).collect::<Result<_, _>>().map(Extents)
    }
}

impl fmt::Display for Extents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&joined(&self.0))
    }
}

/// Sizes as they are written: `2x1024x32x128`.
pub fn joined(sizes: &[i64]) -> String {
    sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join("x")
}
