//! Kernels and the libraries they come from, described: constraints are data on named dimensions.

use std::collections::BTreeMap;

use lz_abi::{DType, DTypeSet};
use serde::{Deserialize, Serialize};

use crate::accuracy::Accuracy;
use crate::context::{KvStrategy, ReductionOrder};
use crate::device::Platform;
use crate::layout::Layout;
use crate::packing::Packing;
use crate::quant::{Granularity, QuantFormat};
use crate::sdpa::SdpaRole;
use crate::version::Requirement;

/// Which sizes of a dimension a kernel takes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DimRule {
    /// At least.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min: Option<i64>,
    /// At most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<i64>,
    /// A multiple of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multiple_of: Option<i64>,
    /// One of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub one_of: Option<Vec<i64>>,
}

impl DimRule {
    /// Whether a size is allowed.
    pub fn allows(&self, size: i64) -> bool {
        self.min.is_none_or(|min| size >= min)
            && self.max.is_none_or(|max| size <= max)
            && self.multiple_of.is_none_or(|m| size % m == 0)
            && self.one_of.as_ref().is_none_or(|set| set.contains(&size))
    }

    /// Adds the demands of another rule: only what both allow is allowed.
    pub fn tighten(&mut self, other: &DimRule) {
        let both = |a: Option<i64>, b: Option<i64>, pick: fn(i64, i64) -> i64| match (a, b) {
            (Some(a), Some(b)) => Some(pick(a, b)),
            (one, other) => one.or(other),
        };
        self.min = both(self.min, other.min, i64::max);
        self.max = both(self.max, other.max, i64::min);
        self.multiple_of = both(self.multiple_of, other.multiple_of, least_common_multiple);
        self.one_of = match (self.one_of.take(), &other.one_of) {
            (Some(mine), Some(theirs)) => Some(mine.into_iter().filter(|v| theirs.contains(v)).collect()),
            (mine, theirs) => mine.or_else(|| theirs.clone()),
        };
    }

    /// In words: `32 to 256, multiples of 8`.
    pub fn describe(&self) -> String {
        let mut parts = Vec::new();
        match (self.min, self.max) {
            (Some(min), Some(max)) => parts.push(format!("{min} to {max}")),
            (Some(min), None) => parts.push(format!("at least {min}")),
            (None, Some(max)) => parts.push(format!("at most {max}")),
            (None, None) => {}
        }
        parts.extend(self.multiple_of.map(|m| format!("multiples of {m}")));
        parts.extend(self.one_of.as_ref().map(|set| format!("{set:?}")));
        if parts.is_empty() { "any".into() } else { parts.join(", ") }
    }
}

/// Saturates: no size is a multiple of something larger than every size.
fn least_common_multiple(a: i64, b: i64) -> i64 {
    if a < 1 || b < 1 {
        return a.min(b);
    }
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

/// What a kernel asks of one input. An optional input without a rule cannot be used at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InputRule {
    /// Dtypes, when they differ from the kernel's own.
    pub dtypes: Option<DTypeSet>,
    /// Layouts, when they differ from the kernel's own.
    pub layouts: Option<Vec<Layout>>,
    /// It must be given, though the operation does not need it.
    pub required: bool,
    /// The kernel is for calls with it, beside another one for calls without. It must be given.
    pub purpose: bool,
    /// It must not be broadcast.
    pub no_broadcast: bool,
}

/// A value in a capabilities document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(untagged)]
pub enum Scalar {
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A number.
    Float(f64),
    /// A name.
    Str(String),
}

/// Which values of a parameter a kernel takes; an empty rule takes all. A parameter without a
/// rule must be at its default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ParamRule {
    /// One of these values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub one_of: Option<Vec<Scalar>>,
    /// At least.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,
    /// At most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
}

/// How a kernel maps its work to a CUDA grid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GridRule {
    /// Blocks along x, an expression; `seq_tiles` is the tiled sequence length.
    pub x_formula: String,
    /// Blocks along y.
    #[serde(default)]
    pub y_formula: Option<String>,
    /// Blocks along z.
    #[serde(default)]
    pub z_formula: Option<String>,
    /// Multiplies x.
    #[serde(default = "one")]
    pub blocks_per_batch_head: i64,
    /// Whether the sequence is tiled; `seq_tiles` is 1 where it is not.
    #[serde(default)]
    pub tiles_sequence: bool,
    /// Positions per tile.
    #[serde(default = "tile")]
    pub tile_size: i64,
    /// Threads of one block.
    #[serde(default)]
    pub threads_per_block: Option<i64>,
    /// Shared memory of one block in bytes, an expression.
    #[serde(default)]
    pub shared_bytes_formula: Option<String>,
}

fn one() -> i64 {
    1
}

fn tile() -> i64 {
    128
}

/// What a kernel asks of quantized operands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuantRule {
    /// Formats it multiplies.
    pub formats: Vec<QuantFormat>,
    /// What its scales may cover; empty for anything.
    pub granularities: Vec<Granularity>,
    /// Whether it takes zero points.
    pub zero_point: bool,
}

/// Whether results depend on how many ranks share the work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TpRule {
    /// Holds up to this many ranks; unlimited when not given.
    #[serde(default)]
    pub max_size: Option<u16>,
    /// The order it reduces in.
    pub reduction_order: ReductionOrder,
}

/// Which tokenizers a kernel serves; an empty list serves any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerRule {
    /// By parameter name (`tokenizer_id`, `vocab_hash`, …), the values served.
    pub serves: BTreeMap<String, Vec<String>>,
}

/// Calls a kernel is better or worse for than for others, as was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Preferred {
    /// Which calls: an expression, as in [`KernelDescriptor::conditions`].
    pub when: String,
    /// Its priority for them, instead of [`KernelDescriptor::priority`].
    pub priority: i32,
}

/// Everything known about a kernel before it is called.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelDescriptor {
    /// Unique with its version: `flash_attn.v2.causal`.
    pub id: String,
    /// Its own version, usually the library's.
    pub version: String,
    /// The backend it comes from: `flash_attn_3`.
    pub backend: String,
    /// The library that backend belongs to, when it is not the backend's name; see [`KernelDescriptor::library`].
    pub library: Option<String>,
    /// Other names it answers to in locks, rules and preferences; several kernels may share one.
    pub aliases: Vec<String>,
    /// The operation or alias it was written against.
    pub operation: String,

    /// Processors it runs on.
    pub platforms: Vec<Platform>,
    /// Oldest SM version.
    pub min_sm: Option<u32>,
    /// First SM version that is too new.
    pub max_sm: Option<u32>,
    /// GPU generations it is written for; empty for any.
    pub generations: Vec<String>,
    /// Oldest tensor-core generation.
    pub min_tensor_core_generation: Option<u32>,
    /// Instruction sets it uses.
    pub instruction_sets: Vec<String>,
    /// Other device features it needs.
    pub device_features: Vec<String>,
    /// Vendors it runs on; empty for any.
    pub vendors: Vec<String>,
    /// Versions it needs: libraries, `cuda`, `driver`, `torch`.
    pub requires: Vec<Requirement>,

    /// Dtypes of its data operands.
    pub dtypes: DTypeSet,
    /// Layouts of its data operands.
    pub layouts: Vec<Layout>,
    /// The one dtype it computes in: operands that widen to it exactly may be cast.
    pub requires_dtype: Option<DType>,
    /// Operands must be row-major without gaps.
    pub requires_contiguous: bool,
    /// The last dimension of operands must have stride 1.
    pub requires_last_dim_stride1: bool,
    /// Operands must start at multiples of 16 bytes.
    pub requires_aligned: bool,
    /// Rules for single inputs.
    pub inputs: BTreeMap<String, InputRule>,
    /// Rules for dimensions.
    pub dims: BTreeMap<String, DimRule>,
    /// Rules for parameters.
    pub params: BTreeMap<String, ParamRule>,
    /// Whether query heads may share key/value heads, for kernels written against an alias that
    /// covers both.
    pub shares_kv_heads: bool,
    /// Further conditions, expressions over the operation's fields.
    pub conditions: Vec<String>,

    /// Proven safe inside CUDA graph capture.
    pub graph_safe: bool,
    /// Same inputs, same bits.
    pub deterministic: bool,
    /// Gives gradients.
    pub autograd: bool,
    /// A row's result does not depend on the rest of the batch.
    pub batch_invariant: bool,
    /// What it is among torch's implementations of attention; `None` for a kernel that is not torch's.
    pub sdpa: Option<SdpaRole>,
    /// Registered with code of its own: that its backend's library is missing does not concern it.
    pub standalone: bool,
    /// Compiled on first use.
    pub jit: bool,
    /// Independence of the number of ranks.
    pub tp: Option<TpRule>,
    /// Ways of keeping keys and values it can read; empty for the operation's own.
    pub kv_strategies: Vec<KvStrategy>,
    /// Quantized operands.
    pub quant: Option<QuantRule>,
    /// Formats of its weights it takes; empty for plain ones alone.
    pub packing: Vec<Packing>,
    /// How exactly it computes.
    pub accuracy: Accuracy,
    /// Workspace in bytes, an expression.
    pub workspace: Option<String>,
    /// Grid it launches.
    pub grid: Option<GridRule>,
    /// Tokenizers it serves.
    pub tokenizer: TokenizerRule,

    /// 0 to 100, higher is preferred while nothing is measured.
    pub priority: i32,
    /// Calls for which it has another priority.
    pub preferred: Option<Preferred>,
    /// Points it loses, beyond what every kernel does, when arguments must be adapted to it.
    pub transform_cost_hint: i32,
    /// Whether it is the operation's definition of right, and its last resort.
    pub reference: bool,
    /// Whether it is what plain torch would run: what the others are compared with.
    pub baseline: bool,
    /// Whether it was run on the hardware it is for.
    pub proven: bool,
    /// On whose word it counts as right.
    pub trust: Trust,
}

/// On whose word a kernel counts as right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// It is built in: this project tests it.
    #[default]
    BuiltIn,
    /// Whoever registered it vouches for it (`trusted=True`).
    Vouched,
    /// Nobody's: it is compared with the reference at its first use for each class of call, before it serves.
    Unproven,
}

impl KernelDescriptor {
    /// A kernel that supports nothing yet: every capability is off until declared.
    pub fn new(id: impl Into<String>, operation: impl Into<String>, backend: impl Into<String>) -> KernelDescriptor {
        KernelDescriptor {
            id: id.into(),
            version: "0".into(),
            backend: backend.into(),
            library: None,
            aliases: Vec::new(),
            operation: operation.into(),
            platforms: Vec::new(),
            min_sm: None,
            max_sm: None,
            generations: Vec::new(),
            min_tensor_core_generation: None,
            instruction_sets: Vec::new(),
            device_features: Vec::new(),
            vendors: Vec::new(),
            requires: Vec::new(),
            dtypes: DTypeSet::EMPTY,
            layouts: Vec::new(),
            requires_dtype: None,
            requires_contiguous: false,
            requires_last_dim_stride1: false,
            requires_aligned: false,
            inputs: BTreeMap::new(),
            dims: BTreeMap::new(),
            params: BTreeMap::new(),
            shares_kv_heads: false,
            conditions: Vec::new(),
            graph_safe: false,
            deterministic: false,
            autograd: false,
            batch_invariant: false,
            sdpa: None,
            standalone: false,
            jit: false,
            tp: None,
            kv_strategies: Vec::new(),
            quant: None,
            packing: Vec::new(),
            accuracy: Accuracy::Standard,
            workspace: None,
            grid: None,
            tokenizer: TokenizerRule::default(),
            priority: 50,
            preferred: None,
            transform_cost_hint: 0,
            reference: false,
            baseline: false,
            proven: true,
            trust: Trust::BuiltIn,
        }
    }

    /// Whether it takes weights in a format.
    pub fn takes(&self, packing: Packing) -> bool {
        if self.packing.is_empty() { packing.is_plain() } else { self.packing.contains(&packing) }
    }

    /// The library it comes from: `flash_attn` for every kernel of the backends `flash_attn`, `flash_attn_3`, ….
    pub fn library(&self) -> &str {
        self.library.as_deref().unwrap_or(&self.backend)
    }
}

/// Where a backend came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PluginOrigin {
    /// Shipped with LayerZero.
    Builtin,
    /// An installed package's entry point.
    EntryPoint,
    /// A kernel hub.
    Hub,
    /// Registered by code.
    Code,
}

/// A backend, described: kernels of one library that are loaded together.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendDescriptor {
    /// Its name: `flash_attn_3`.
    pub name: String,
    /// The library it belongs to, when it is not the backend's name; see [`BackendDescriptor::library`].
    pub library: Option<String>,
    /// The version the description is about.
    pub version: String,
    /// Processors it serves.
    pub platforms: Vec<Platform>,
    /// Where it came from.
    pub origin: PluginOrigin,
    /// What it needs as a whole.
    pub requires: Vec<Requirement>,
    /// SHA-256 of its canonical capabilities document.
    pub capabilities_hash: String,
}

impl BackendDescriptor {
    /// The library it belongs to: `flash_attn` for `flash_attn_3`.
    pub fn library(&self) -> &str {
        self.library.as_deref().unwrap_or(&self.name)
    }

    /// Whether it was registered by code, and not read from a document.
    pub fn is_code(&self) -> bool {
        self.capabilities_hash.is_empty() && self.origin != PluginOrigin::EntryPoint
    }

    /// A backend made of code, without a document.
    pub fn native(name: impl Into<String>, version: impl Into<String>, platforms: Vec<Platform>) -> BackendDescriptor {
        BackendDescriptor {
            name: name.into(),
            library: None,
            version: version.into(),
            platforms,
            origin: PluginOrigin::Builtin,
            requires: Vec::new(),
            capabilities_hash: String::new(),
        }
    }
}
