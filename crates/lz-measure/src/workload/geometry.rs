//! Models, reduced to the sizes of the calls they make.

use std::borrow::Cow;

use lz_model::nearest;

use super::error::WorkloadError;
use super::models::GEOMETRIES;

/// No size of a model is larger: products of three of them can be counted.
pub(super) const MOST_SIZE: i64 = 1 << 30;

/// How a model normalizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// By the root mean square.
    Rms,
    /// By mean and variance.
    Layer,
}

/// What stands between the projections of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `silu(gate) * up`.
    SiluMul,
    /// `gelu(gate) * up`: the product is no operation of its own.
    GeluMul {
        /// The approximation by tanh.
        tanh: bool,
    },
    /// `gelu(up)`, without a gate.
    Gelu {
        /// The approximation by tanh.
        tanh: bool,
    },
}

impl Activation {
    /// Whether there is a gate projection.
    pub const fn is_gated(self) -> bool {
        !matches!(self, Activation::Gelu { .. })
    }
}

/// Rotary positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f64,
    /// How many dimensions of a head are rotated.
    pub dims: i64,
    /// Whether pairs are neighbours.
    pub interleaved: bool,
}

/// Layers that attend to the last keys only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// How many keys a query attends to, its own included.
    pub keys: i64,
    /// How many layers have it.
    pub layers: i64,
}

/// Latent attention: queries, keys and values are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mla {
    /// Width of the compressed queries; `None` when they are not compressed.
    pub q_lora_rank: Option<i64>,
    /// Width of the compressed keys and values.
    pub kv_lora_rank: i64,
    /// Dimensions of a query and key head without positions.
    pub qk_nope_head_dim: i64,
    /// Dimensions of a query and key head with rotary positions.
    pub qk_rope_head_dim: i64,
    /// Dimensions of a value head.
    pub v_head_dim: i64,
}

/// Feed-forward blocks of which a token uses a few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// How many layers have them; the others are dense.
    pub layers: i64,
    /// How many there are to choose from.
    pub routed: i64,
    /// How many a token goes through.
    pub per_token: i64,
    /// How many every token goes through besides; they are one block.
    pub shared: i64,
    /// Their width.
    pub intermediate: i64,
}

/// Which projections have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// Those of queries, keys and values.
    pub qkv: bool,
    /// That of attention's result.
    pub out: bool,
    /// Those of the feed-forward block.
    pub mlp: bool,
}

/// The sizes of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    /// What it is called.
    pub name: Cow<'static, str>,
    /// Width of the residual stream.
    pub hidden: i64,
    /// Query heads.
    pub heads: i64,
    /// Key/value heads.
    pub kv_heads: i64,
    /// Dimensions of a head.
    pub head_dim: i64,
    /// Width of the dense feed-forward blocks.
    pub intermediate: i64,
    /// Layers.
    pub layers: i64,
    /// Tokens in the vocabulary; `None` when it reads none.
    pub vocab: Option<i64>,
    /// Whether it generates: attention is causal, and a head gives logits.
    pub causal: bool,
    /// Its norms.
    pub norm: Norm,
    /// Their epsilon.
    pub norm_eps: f64,
    /// Norms of one layer.
    pub norms: i64,
    /// Whether query and key heads are normalized.
    pub qk_norm: bool,
    /// What its feed-forward blocks activate with.
    pub activation: Activation,
    /// Rotary positions.
    pub rope: Option<Rope>,
    /// Learned positions: how many.
    pub positions: Option<i64>,
    /// How many tokens an input always has.
    pub tokens: Option<i64>,
    /// Whether one projection gives queries, keys and values.
    pub fused_qkv: bool,
    /// Which projections have a bias.
    pub bias: Biases,
    /// Softmax scale, where it is not one over the root of the head dimension.
    pub scale: Option<f64>,
    /// Cap of the attention scores.
    pub softcap: Option<f64>,
    /// Layers with a sliding window.
    pub window: Option<Window>,
    /// Latent attention.
    pub mla: Option<Mla>,
    /// Experts.
    pub experts: Option<Experts>,
}

impl Geometry {
    /// The model of that name.
    ///
    /// ```
    /// use lz_measure::workload::Geometry;
    ///
    /// assert_eq!(Geometry::named("llama-3-8b").unwrap().kv_heads, 8);
    /// let error = Geometry::named("lama-3-8b").unwrap_err();
    /// assert_eq!(error.to_string(), "unknown model 'lama-3-8b'; did you mean 'llama-3-8b'?");
    /// ```
    pub fn named(name: &str) -> Result<&'static Geometry, WorkloadError> {
        GEOMETRIES.iter().find(|g| g.name.eq_ignore_ascii_case(name)).ok_or_else(|| WorkloadError::UnknownModel {
            name: name.to_owned(),
            nearest: nearest(&name.to_lowercase(), GEOMETRIES.iter().map(|g| g.name.as_ref())),
        })
    }

    /// Its sizes by name.
    pub(super) fn sizes(&self) -> Vec<(&'static str, i64)> {
        let mut sizes = vec![
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("intermediate", self.intermediate),
            ("layers", self.layers),
            ("norms", self.norms),
        ];
        sizes.extend(self.vocab.map(|n| ("vocab", n)));
        sizes.extend(self.positions.map(|n| ("positions", n)));
        sizes.extend(self.tokens.map(|n| ("tokens", n)));
        sizes.extend(self.rope.map(|rope| ("rotated pairs", rope.dims / 2)));
        if let Some(window) = self.window {
            sizes.extend([("window.keys", window.keys), ("window.layers", window.layers)]);
        }
        if let Some(mla) = self.mla {
            sizes.extend(mla.q_lora_rank.map(|n| ("q_lora_rank", n)));
            sizes.extend([("kv_lora_rank", mla.kv_lora_rank), ("qk_nope_head_dim", mla.qk_nope_head_dim)]);
            sizes.extend([("qk_rope_head_dim", mla.qk_rope_head_dim), ("v_head_dim", mla.v_head_dim)]);
        }
        if let Some(experts) = self.experts {
            sizes.extend([("experts.layers", experts.layers), ("experts.routed", experts.routed)]);
            sizes.extend([("experts.per_token", experts.per_token), ("experts.intermediate", experts.intermediate)]);
            sizes.extend([("experts.shared", experts.shared.max(1))]);
        }
        sizes
    }
}
