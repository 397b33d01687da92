//! The models that are known by name, with the sizes their makers published.

use std::borrow::Cow;

use super::geometry::{Activation, Biases, Experts, Geometry, Mla, Norm, Rope, Window};

/// A decoder as most are now: RMS norms, rotary positions, a gated feed-forward block, no biases.
pub(super) const DECODER: Geometry = Geometry {
    name: Cow::Borrowed(""),
    hidden: 0,
    heads: 0,
    kv_heads: 0,
    head_dim: 128,
    intermediate: 0,
    layers: 0,
    vocab: None,
    causal: true,
    norm: Norm::Rms,
    norm_eps: 1e-6,
    norms: 2,
    qk_norm: false,
    activation: Activation::SiluMul,
    rope: Some(rope(1e4, 128)),
    positions: None,
    tokens: None,
    fused_qkv: false,
    bias: Biases { qkv: false, out: false, mlp: false },
    scale: None,
    softcap: None,
    window: None,
    mla: None,
    experts: None,
};

/// A transformer of the first kind: layer norms, no rotary positions, biases everywhere.
pub(super) const FIRST_KIND: Geometry = Geometry {
    head_dim: 64,
    norm: Norm::Layer,
    activation: Activation::Gelu { tanh: false },
    rope: None,
    bias: Biases { qkv: true, out: true, mlp: true },
    ..DECODER
};

const fn rope(theta: f64, dims: i64) -> Rope {
    Rope { theta, dims, interleaved: false }
}

/// The models that are known by name.
pub static GEOMETRIES: &[Geometry] = &[
    Geometry {
        name: Cow::Borrowed("gpt2"),
        hidden: 768,
        heads: 12,
        kv_heads: 12,
        intermediate: 3072,
        layers: 12,
        vocab: Some(50_257),
        norm_eps: 1e-5,
        activation: Activation::Gelu { tanh: true },
        positions: Some(1024),
        fused_qkv: true,
        ..FIRST_KIND
    },
    Geometry {
        name: Cow::Borrowed("gpt2-medium"),
        hidden: 1024,
        heads: 16,
        kv_heads: 16,
        intermediate: 4096,
        layers: 24,
        vocab: Some(50_257),
        norm_eps: 1e-5,
        activation: Activation::Gelu { tanh: true },
        positions: Some(1024),
        fused_qkv: true,
        ..FIRST_KIND
    },
    Geometry {
        name: Cow::Borrowed("llama-3-8b"),
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        intermediate: 14_336,
        layers: 32,
        vocab: Some(128_256),
        norm_eps: 1e-5,
        rope: Some(rope(5e5, 128)),
        ..DECODER
    },
    Geometry {
        name: Cow::Borrowed("llama-3-70b"),
        hidden: 8192,
        heads: 64,
        kv_heads: 8,
        intermediate: 28_672,
        layers: 80,
        vocab: Some(128_256),
        norm_eps: 1e-5,
        rope: Some(rope(5e5, 128)),
        ..DECODER
    },
    Geometry {
        name: Cow::Borrowed("tinyllama-1.1b"),
        hidden: 2048,
        heads: 32,
        kv_heads: 4,
        head_dim: 64,
        intermediate: 5632,
        layers: 22,
        vocab: Some(32_000),
        norm_eps: 1e-5,
        rope: Some(rope(1e4, 64)),
        ..DECODER
    },
    Geometry {
        name: Cow::Borrowed("llama-3.2-1b"),
        hidden: 2048,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        intermediate: 8192,
        layers: 16,
        vocab: Some(128_256),
        norm_eps: 1e-5,
        rope: Some(rope(5e5, 64)),
        ..DECODER
    },
    Geometry {
        name: Cow::Borrowed("qwen2.5-7b"),
        hidden: 3584,
        heads: 28,
        kv_heads: 4,
        intermediate: 18_944,
        layers: 28,
        vocab: Some(152_064),
        rope: Some(rope(1e6, 128)),
        bias: Biases { qkv: true, out: false, mlp: false },
        ..DECODER
    },
    Geometry {
        name: Cow::Borrowed("qwen3-8b"),
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        intermediate: 12_288,
        layers: 36,
        vocab: Some(151_936),
        qk_norm: true,
        rope: Some(rope(1e6, 128)),
        ..DECODER
    },
    // Version 0.1, the one with the sliding window.
    Geometry {
        name: Cow::Borrowed("mistral-7b"),
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        intermediate: 14_336,
        layers: 32,
        vocab: Some(32_000),
        norm_eps: 1e-5,
        window: Some(Window { keys: 4096, layers: 32 }),
        ..DECODER
    },
    Geometry {
        name: Cow::Borrowed("gemma-2-9b"),
        hidden: 3584,
        heads: 16,
        kv_heads: 8,
        head_dim: 256,
        intermediate: 14_336,
        layers: 42,
        vocab: Some(256_000),
        norms: 4,
        activation: Activation::GeluMul { tanh: true },
        rope: Some(rope(1e4, 256)),
        softcap: Some(50.0),
        window: Some(Window { keys: 4096, layers: 21 }),
        ..DECODER
    },
    Geometry {
        name: Cow::Borrowed("deepseek-v3"),
        hidden: 7168,
        heads: 128,
        kv_heads: 128,
        head_dim: 192,
        intermediate: 18_432,
        layers: 61,
        vocab: Some(129_280),
        rope: Some(Rope { theta: 1e4, dims: 64, interleaved: true }),
        // 192^-0.5 times the square of YaRN's 0.1 ln 40 + 1.
        scale: Some(0.135_233_778_860_880_1),
        mla: Some(Mla {
            q_lora_rank: Some(1536),
            kv_lora_rank: 512,
            qk_nope_head_dim: 128,
            qk_rope_head_dim: 64,
            v_head_dim: 128,
        }),
        experts: Some(Experts { layers: 58, routed: 256, per_token: 8, shared: 1, intermediate: 2048 }),
        ..DECODER
    },
    Geometry {
        name: Cow::Borrowed("vit-b-16"),
        hidden: 768,
        heads: 12,
        kv_heads: 12,
        intermediate: 3072,
        layers: 12,
        causal: false,
        norm_eps: 1e-12,
        // 14 by 14 patches of a picture of 224 by 224, and the class.
        tokens: Some(197),
        ..FIRST_KIND
    },
    Geometry {
        name: Cow::Borrowed("bert-base"),
        hidden: 768,
        heads: 12,
        kv_heads: 12,
        intermediate: 3072,
        layers: 12,
        vocab: Some(30_522),
        causal: false,
        norm_eps: 1e-12,
        positions: Some(512),
        ..FIRST_KIND
    },
];
