//! What transformers writes down about the models that are known by name: the keys that size them, and some that do not.

/// Each with its name here.
pub const CONFIGS: &[(&str, &str)] = &[
    (
        "gpt2",
        r#"{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
            "bos_token_id": 50256, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
            "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257}"#,
    ),
    (
        "gpt2-medium",
        r#"{"activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024,
            "n_embd": 1024, "n_head": 16, "n_inner": null, "n_layer": 24, "n_positions": 1024, "vocab_size": 50257}"#,
    ),
    (
        "llama-3-8b",
        r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 500000.0, "tie_word_embeddings": false,
            "torch_dtype": "bfloat16", "vocab_size": 128256}"#,
    ),
    (
        "llama-3-70b",
        r#"{"attention_bias": false, "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 28672,
            "model_type": "llama", "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "vocab_size": 128256}"#,
    ),
    (
        "tinyllama-1.1b",
        r#"{"attention_bias": false, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632,
            "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 22, "num_key_value_heads": 4, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "vocab_size": 32000}"#,
    ),
    (
        "llama-3.2-1b",
        r#"{"attention_bias": false, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 8192, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
            "rope_theta": 500000.0, "tie_word_embeddings": true, "vocab_size": 128256}"#,
    ),
    (
        "qwen2.5-7b",
        r#"{"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3584,
            "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
            "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": false,
            "vocab_size": 152064}"#,
    ),
    (
        "qwen3-8b",
        r#"{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36, "model_type": "qwen3",
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": null,
            "use_sliding_window": false, "vocab_size": 151936}"#,
    ),
    (
        "mistral-7b",
        r#"{"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000}"#,
    ),
    (
        "gemma-2-9b",
        r#"{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "intermediate_size": 14336,
            "model_type": "gemma2", "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
            "vocab_size": 256000}"#,
    ),
    (
        "deepseek-v3",
        r#"{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "first_k_dense_replace": 3,
            "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
            "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "original_max_position_embeddings": 4096, "type": "yarn"},
            "rope_theta": 10000, "v_head_dim": 128, "vocab_size": 129280}"#,
    ),
    (
        "vit-b-16",
        r#"{"architectures": ["ViTForImageClassification"], "hidden_act": "gelu", "hidden_size": 768,
            "image_size": 224, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "model_type": "vit",
            "num_attention_heads": 12, "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16,
            "qkv_bias": true}"#,
    ),
    (
        "bert-base",
        r#"{"architectures": ["BertForMaskedLM"], "hidden_act": "gelu", "hidden_size": 768,
            "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
            "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 12, "type_vocab_size": 2,
            "vocab_size": 30522}"#,
    ),
];

/// The text of a model's configuration.
pub fn config(name: &str) -> &'static str {
    CONFIGS.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no {name}")).1
}
