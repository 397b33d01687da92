//! The capabilities document as it is written. The checked-in JSON Schema is generated from these types.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};

use crate::accuracy::Accuracy;
use crate::context::KvStrategy;
use crate::device::Platform;
use crate::generation::GenerationRow;
use crate::kernel::{DimRule, GridRule, ParamRule, PluginOrigin, TpRule};
use crate::layout::Layout;
use crate::quant::{Granularity, QuantFormat};
use crate::sdpa::SdpaRole;

/// Keeps "absent" and "null" apart: a constraint must be stated, even if as "none".
fn stated<'de, D: Deserializer<'de>, T: Deserialize<'de>>(d: D) -> Result<Option<Option<T>>, D::Error> {
    Option::<T>::deserialize(d).map(Some)
}

/// One platform, or several.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum Platforms {
    One(Platform),
    Many(Vec<Platform>),
}

impl Platforms {
    pub fn list(&self) -> Vec<Platform> {
        match self {
            Platforms::One(platform) => vec![*platform],
            Platforms::Many(platforms) => platforms.clone(),
        }
    }
}

/// A backend's capabilities, version 1.0. Whatever is not stated is not supported.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "LayerZero capabilities v1.0")]
pub(super) struct Document {
    /// Must be "1.0".
    #[allow(dead_code)] // Checked before anything else is read.
    pub schema_version: String,
    /// The backend's name.
    pub backend: String,
    /// The library it belongs to, when that is not the backend's name: `flash_attn` for `flash_attn_3`. Preferences, bans
    /// and locks that name a library are about all of its backends.
    #[serde(default)]
    pub library: Option<String>,
    /// The version this document describes.
    pub backend_version: String,
    /// Where its kernels run.
    pub platform: Platforms,
    /// What is imported to use it.
    #[serde(default)]
    #[allow(dead_code)] // Read by those who import it, from the document.
    pub import_name: Option<String>,
    /// Where the backend came from.
    #[serde(default)]
    pub plugin_origin: Option<PluginOrigin>,
    /// Whether its kernels were run on the hardware they are for. Those that were not are only chosen where the setting
    /// `backends.unproven` names the backend or its library.
    #[serde(default = "yes")]
    pub proven: bool,
    /// Version requirements of the whole backend, e.g. `["cuda>=12.0", "torch>=2.2"]`.
    #[serde(default)]
    pub requires: Vec<String>,
    /// GPU generations the built-in table does not know, or knows differently.
    #[serde(default)]
    pub gpu_generations: Vec<GenerationRow>,
    /// Kernels by the operation or alias they are written against.
    pub ops: BTreeMap<String, Vec<Kernel>>,
}

/// Rules for one input.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct InputDoc {
    /// Dtypes, when they differ from the kernel's own.
    pub dtypes: Option<Vec<String>>,
    /// Layouts, when they differ from the kernel's own.
    pub layouts: Option<Vec<Layout>>,
    /// Must be given although the operation does not need it.
    pub required: bool,
    /// The kernel is only for calls with this input; another kernel is for calls without it. Explanations of calls
    /// without it do not list the kernel.
    pub purpose: bool,
    /// Must not be broadcast.
    pub no_broadcast: bool,
}

/// One kernel.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Kernel {
    /// Unique in the backend (with its version).
    pub kernel_id: String,
    /// Other names it answers to in locks, rules and preferences. Several kernels may share one.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Its version; the backend's when not given.
    #[serde(default)]
    pub version: Option<String>,
    /// Where it runs, when that is not everywhere the backend does.
    #[serde(default)]
    pub platform: Option<Platforms>,

    /// Oldest SM version (CUDA); required there, null for any.
    #[serde(default, deserialize_with = "stated")]
    pub min_sm: Option<Option<u32>>,
    /// First SM version that is too new.
    #[serde(default)]
    pub max_sm: Option<u32>,
    /// GPU generations it is written for.
    #[serde(default)]
    pub supported_generations: Vec<String>,
    /// Oldest tensor-core generation.
    #[serde(default)]
    pub min_tensor_core_generation: Option<u32>,
    /// Instruction set it uses, e.g. "wgmma", "avx512f".
    #[serde(default)]
    pub instruction_set: Option<String>,
    /// Several instruction sets.
    #[serde(default)]
    pub instruction_sets: Vec<String>,
    /// Device features it needs.
    #[serde(default)]
    pub device_features: Vec<String>,
    /// Vendors it runs on.
    #[serde(default)]
    pub vendors: Vec<String>,
    /// Version requirements of this kernel.
    #[serde(default)]
    pub requires: Vec<String>,
    /// Oldest driver.
    #[serde(default)]
    pub min_driver_version: Option<String>,

    /// Dtypes of its data operands.
    pub dtypes: Vec<String>,
    /// Layouts of its data operands: named ones, or "contiguous" or "strided".
    pub requires_layouts: Vec<Layout>,
    /// Layout of its result: one of `requires_layouts`, since a result is laid out as the operands are.
    #[serde(default)]
    pub produces_layout: Option<Layout>,
    /// The dtype it computes in.
    #[serde(default)]
    pub requires_dtype: Option<String>,
    /// Operands must be contiguous.
    #[serde(default)]
    pub requires_contiguous: bool,
    /// The last dimension of operands must have stride 1.
    #[serde(default)]
    pub requires_last_dim_stride1: bool,
    /// Operands must be aligned to 16 bytes.
    #[serde(default)]
    pub requires_aligned: bool,

    /// Smallest head dimension.
    #[serde(default, deserialize_with = "stated")]
    pub min_head_dim: Option<Option<i64>>,
    /// Largest head dimension.
    #[serde(default, deserialize_with = "stated")]
    pub max_head_dim: Option<Option<i64>>,
    /// Head dimensions must be multiples of this.
    #[serde(default)]
    pub head_dim_multiple: Option<i64>,
    /// Longest sequence, queries and keys.
    #[serde(default)]
    pub max_seq_len: Option<i64>,
    /// Smallest batch.
    #[serde(default)]
    pub min_batch_size: Option<i64>,
    /// Largest batch.
    #[serde(default)]
    pub max_batch_size: Option<i64>,
    /// Rules for dimensions by name.
    #[serde(default)]
    pub dims: BTreeMap<String, DimRule>,
    /// `[min, max]` by dimension name.
    #[serde(default)]
    pub shape_constraints: BTreeMap<String, (i64, i64)>,
    /// Rules for inputs by name; an optional input without one cannot be used.
    #[serde(default)]
    pub inputs: BTreeMap<String, InputDoc>,
    /// Rules for parameters by name; one without must be at its default.
    #[serde(default)]
    pub params: BTreeMap<String, ParamRule>,
    /// Further conditions, as expressions.
    #[serde(default)]
    pub conditions: Vec<String>,

    /// Query heads may share key/value heads.
    #[serde(default)]
    pub supports_gqa: bool,
    /// Takes an attention mask.
    #[serde(default)]
    pub supports_attn_mask: bool,
    /// Which kinds of mask: "none", "bool", "float".
    #[serde(default)]
    pub supported_attn_mask_types: Option<Vec<String>>,
    /// Takes a dropout probability.
    #[serde(default)]
    pub supports_dropout: bool,
    /// Takes a softmax scale.
    #[serde(default)]
    pub supports_scale: bool,
    /// Layouts of a key/value cache it reads.
    #[serde(default)]
    pub supports_kv_cache_layouts: Option<Vec<Layout>>,
    /// Dtypes of a key/value cache it reads.
    #[serde(default)]
    pub supports_kv_cache_dtypes: Option<Vec<String>>,
    /// Ways of keeping keys and values it can read.
    #[serde(default)]
    pub supports_kv_strategies: Vec<KvStrategy>,

    /// Quantization formats it multiplies.
    #[serde(default)]
    pub supported_quant_dtypes: Vec<QuantFormat>,
    /// What its scales may cover.
    #[serde(default)]
    pub quantization_scale_granularity: Option<Granularity>,
    /// Takes zero points.
    #[serde(default)]
    pub quantization_zero_point: bool,

    /// Proven safe in CUDA graph capture.
    #[serde(default)]
    pub is_cuda_graph_safe: bool,
    /// Same inputs, same bits.
    #[serde(default)]
    pub deterministic: bool,
    /// Gives gradients.
    #[serde(default)]
    pub autograd: bool,
    /// A row's result does not depend on the rest of the batch.
    #[serde(default)]
    pub batch_invariant: bool,
    /// What a kernel of torch's is among the implementations of `scaled_dot_product_attention`, so that
    /// `torch.nn.attention.sdpa_kernel` is honoured.
    #[serde(default)]
    pub sdpa: Option<SdpaRole>,
    /// Compiled on first use.
    #[serde(default)]
    pub jit: bool,
    /// Results do not depend on the number of ranks.
    #[serde(default)]
    pub tp_invariance: Option<TpRule>,
    /// Formats of its weights it takes, e.g. ["plain", "blocked_32x1"]; plain ones alone when not given.
    #[serde(default)]
    pub packing_formats: Vec<String>,
    /// How exactly it computes with float32 operands.
    #[serde(default)]
    pub accuracy_class: Accuracy,
    /// Workspace in bytes, as an expression.
    #[serde(default)]
    pub workspace_bytes: Option<String>,
    /// The grid it launches.
    #[serde(default)]
    pub grid_layout: Option<GridRule>,

    /// Tokenizers served; any when not given.
    #[serde(default)]
    pub tokenizer_ids: Option<Vec<String>>,
    /// Vocabularies served.
    #[serde(default)]
    pub vocab_hashes: Option<Vec<String>>,
    /// Merges served.
    #[serde(default)]
    pub merges_hashes: Option<Vec<String>>,
    /// Added tokens served.
    #[serde(default)]
    pub added_tokens_hashes: Option<Vec<String>>,
    /// Special tokens served.
    #[serde(default)]
    pub special_tokens_hashes: Option<Vec<String>>,
    /// Normalizers served.
    #[serde(default)]
    pub supports_normalizers: Option<Vec<String>>,
    /// Pre-tokenizers served.
    #[serde(default)]
    pub supports_pretokenizers: Option<Vec<String>>,
    /// Gives character offsets.
    #[serde(default)]
    pub supports_offsets: bool,

    /// 0 to 100; higher is preferred while nothing is measured.
    #[serde(default = "default_priority")]
    #[schemars(range(min = 0, max = 100))]
    pub priority: i32,
    /// It is what you would write in plain torch. If several such kernels can serve a call, the others are compared
    /// with the one of the highest priority.
    #[serde(default)]
    pub baseline: bool,
    /// Whether it was run on the hardware it is for; see the backend's own field.
    #[serde(default = "yes")]
    pub proven: bool,
    /// Operations it can do along with its own; their names must exist. Selection knows a fused operation, such as
    /// `norm.fused_add_rms`, as an operation of its own: write a kernel for it against that one.
    #[serde(default)]
    pub fuses_ops: Vec<String>,
    /// Why it is faster than the plain torch code on any machine: one launch instead of several, pages that are read
    /// where they are. Of the kernels that ship, only those with an advantage have a higher priority than plain
    /// torch's. The others are chosen only by measured times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advantage: Option<String>,
    /// Points it loses, beyond what every kernel does, when arguments must be adapted to it.
    #[serde(default)]
    pub transform_cost_hint: i32,
}

fn yes() -> bool {
    true
}

fn default_priority() -> i32 {
    50
}
