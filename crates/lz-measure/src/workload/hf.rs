//! Models from the `config.json` of transformers.

use std::borrow::Cow;

use lz_model::nearest;
use serde_json::{Map, Value};

use super::error::WorkloadError;
use super::geometry::{Activation, Biases, Experts, Geometry, MOST_SIZE, Mla, Rope, Window};
use super::models::{DECODER, FIRST_KIND};

type Reader = fn(&Config) -> Result<Geometry, WorkloadError>;

/// The kinds of models that can be read, by their `model_type`.
pub(super) static MODEL_TYPES: &[(&str, Reader)] = &[
    ("llama", llama),
    ("mistral", mistral),
    ("qwen2", qwen2),
    ("qwen3", qwen3),
    ("gemma2", gemma2),
    ("gpt2", gpt2),
    ("bert", bert),
    ("vit", vit),
    ("deepseek_v3", deepseek_v3),
];

/// A configuration being read.
pub(super) struct Config {
    model_type: String,
    keys: Map<String, Value>,
}

impl Geometry {
    /// The model a transformers `config.json` describes.
    ///
    /// ```
    /// use lz_measure::workload::Geometry;
    ///
    /// let text = r#"{"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": null,
    ///               "n_positions": 1024, "vocab_size": 50257}"#;
    /// assert_eq!(Geometry::from_hf_config(text).unwrap().intermediate, 3072);
    /// let error = Geometry::from_hf_config(&text.replace("12", "-12")).unwrap_err();
    /// assert_eq!(error.to_string(), "the configuration's 'n_head' is -12, expected a positive integer");
    /// ```
    pub fn from_hf_config(json: &str) -> Result<Geometry, WorkloadError> {
        let unreadable = |problem: String| WorkloadError::Unreadable { problem };
        let keys = match serde_json::from_str(json) {
            Ok(Value::Object(keys)) => keys,
            Ok(_) => return Err(unreadable("it is no JSON object".into())),
            Err(error) => return Err(unreadable(error.to_string())),
        };
        let config = Config { model_type: "transformers".into(), keys };
        let model_type = match config.text("model_type")? {
            Some(model_type) => model_type.to_owned(),
            None => return Err(config.missing("model_type")),
        };
        let Some((_, reader)) = MODEL_TYPES.iter().find(|(name, _)| *name == model_type) else {
            let known = nearest(&model_type, MODEL_TYPES.iter().map(|(name, _)| *name));
            return Err(WorkloadError::UnknownModelType { got: shortened(&model_type), nearest: known });
        };
        let config = Config { model_type, ..config };
        let name = config.text("_name_or_path")?.filter(|name| !name.is_empty()).unwrap_or(&config.model_type);
        Ok(Geometry { name: Cow::Owned(name.to_owned()), ..reader(&config)? })
    }
}

impl Config {
    /// The value of a key; nothing for null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).filter(|value| !value.is_null())
    }

    fn missing(&self, key: &'static str) -> WorkloadError {
        WorkloadError::MissingKey { model_type: self.model_type.clone(), key }
    }

    fn bad(key: &'static str, got: &Value, expected: impl Into<String>) -> WorkloadError {
        WorkloadError::BadKey { key, got: shortened(&got.to_string()), expected: expected.into() }
    }

    fn typed<'a, T>(
        &'a self,
        key: &'static str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, WorkloadError> {
        self.get(key).map(|value| read(value).ok_or_else(|| Config::bad(key, value, expected))).transpose()
    }

    fn text(&self, key: &'static str) -> Result<Option<&str>, WorkloadError> {
        self.typed(key, "a string", Value::as_str)
    }

    fn flag(&self, key: &'static str, otherwise: bool) -> Result<bool, WorkloadError> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(otherwise))
    }

    fn number(&self, key: &'static str) -> Result<Option<f64>, WorkloadError> {
        self.typed(key, "a positive number", |value| value.as_f64().filter(|x| x.is_finite() && *x > 0.0))
    }

    fn size(&self, key: &'static str) -> Result<Option<i64>, WorkloadError> {
        self.typed(key, "a positive integer", |value| value.as_i64().filter(|n| (1..=MOST_SIZE).contains(n)))
    }

    fn count(&self, key: &'static str) -> Result<Option<i64>, WorkloadError> {
        self.typed(key, "an integer, 0 or more", |value| value.as_i64().filter(|n| (0..=MOST_SIZE).contains(n)))
    }

    fn needed(&self, key: &'static str) -> Result<i64, WorkloadError> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// The dimensions of a head, where the width of all heads is that of the model.
    fn head_dim(&self, width: &'static str, heads: &'static str) -> Result<i64, WorkloadError> {
        let (hidden, heads_) = (self.needed(width)?, self.needed(heads)?);
        if hidden % heads_ == 0 {
            return Ok(hidden / heads_);
        }
        Err(Config::bad(heads, &heads_.into(), format!("a divisor of {width}, {hidden}")))
    }

    /// An activation by its name in transformers.
    fn activation(&self, key: &'static str, otherwise: &str, gated: bool) -> Result<Activation, WorkloadError> {
        let gelu = |tanh| if gated { Activation::GeluMul { tanh } } else { Activation::Gelu { tanh } };
        match self.text(key)?.unwrap_or(otherwise) {
            "silu" | "swish" if gated => Ok(Activation::SiluMul),
            "gelu" | "gelu_python" => Ok(gelu(false)),
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Ok(gelu(true)),
            other if gated => Err(Config::bad(key, &other.into(), "silu or a gelu")),
            other => Err(Config::bad(key, &other.into(), "a gelu")),
        }
    }

    /// The base of the rotary frequencies, where either version of transformers writes it.
    fn theta(&self) -> Result<f64, WorkloadError> {
        let nested = self.get("rope_parameters").and_then(|p| p.get("rope_theta")).and_then(Value::as_f64);
        Ok(self.number("rope_theta")?.or(nested.filter(|x| x.is_finite() && *x > 0.0)).unwrap_or(1e4))
    }

    /// The layers with a sliding window: those listed, or else this many.
    fn window(&self, layers: i64, otherwise: i64) -> Result<Option<Window>, WorkloadError> {
        let Some(keys) = self.size("sliding_window")? else { return Ok(None) };
        let listed = match self.get("layer_types") {
            Some(Value::Array(types)) => {
                Some(types.iter().filter(|t| t.as_str() == Some("sliding_attention")).count() as i64)
            }
            Some(other) => return Err(Config::bad("layer_types", other, "a list")),
            None => None,
        };
        let with = listed.unwrap_or(otherwise).clamp(0, layers);
        Ok((with > 0).then_some(Window { keys, layers: with }))
    }

    /// What all decoders write alike.
    fn decoder(&self, head_dim: Option<i64>) -> Result<Geometry, WorkloadError> {
        let heads = self.needed("num_attention_heads")?;
        let kv_heads = self.size("num_key_value_heads")?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            let expected = format!("a divisor of num_attention_heads, {heads}");
            return Err(Config::bad("num_key_value_heads", &kv_heads.into(), expected));
        }
        let head_dim = match self.size("head_dim")?.or(head_dim) {
            Some(head_dim) => head_dim,
            None => self.head_dim("hidden_size", "num_attention_heads")?,
        };
        let attention_bias = self.flag("attention_bias", false)?;
        Ok(Geometry {
            hidden: self.needed("hidden_size")?,
            heads,
            kv_heads,
            head_dim,
            intermediate: self.needed("intermediate_size")?,
            layers: self.needed("num_hidden_layers")?,
            vocab: Some(self.needed("vocab_size")?),
            norm_eps: self.number("rms_norm_eps")?.unwrap_or(1e-6),
            activation: self.activation("hidden_act", "silu", true)?,
            rope: Some(Rope { theta: self.theta()?, dims: head_dim, interleaved: false }),
            bias: Biases { qkv: attention_bias, out: attention_bias, mlp: self.flag("mlp_bias", false)? },
            ..DECODER
        })
    }
}

fn llama(config: &Config) -> Result<Geometry, WorkloadError> {
    config.decoder(None)
}

fn mistral(config: &Config) -> Result<Geometry, WorkloadError> {
    let geometry = config.decoder(None)?;
    Ok(Geometry { window: config.window(geometry.layers, geometry.layers)?, ..geometry })
}

fn qwen2(config: &Config) -> Result<Geometry, WorkloadError> {
    let geometry = config.decoder(None)?;
    let full = config.count("max_window_layers")?.unwrap_or(geometry.layers);
    let window = match config.flag("use_sliding_window", false)? {
        true => config.window(geometry.layers, geometry.layers - full)?,
        false => None,
    };
    Ok(Geometry { window, bias: Biases { qkv: true, ..geometry.bias }, ..geometry })
}

fn qwen3(config: &Config) -> Result<Geometry, WorkloadError> {
    let geometry = config.decoder(Some(128))?;
    let full = config.count("max_window_layers")?.unwrap_or(geometry.layers);
    let window = match config.flag("use_sliding_window", false)? {
        true => config.window(geometry.layers, geometry.layers - full)?,
        false => None,
    };
    Ok(Geometry { window, qk_norm: true, ..geometry })
}

fn gemma2(config: &Config) -> Result<Geometry, WorkloadError> {
    let geometry = Geometry { norms: 4, ..config.decoder(Some(256))? };
    let scalar = config.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    Ok(Geometry {
        activation: config.activation("hidden_activation", "gelu_pytorch_tanh", true)?,
        scale: (scalar != geometry.head_dim as f64).then(|| scalar.sqrt().recip()),
        softcap: config.number("attn_logit_softcapping")?,
        // Every other layer, the first one included.
        window: config.window(geometry.layers, (geometry.layers + 1) / 2)?,
        ..geometry
    })
}

fn gpt2(config: &Config) -> Result<Geometry, WorkloadError> {
    let (hidden, heads) = (config.needed("n_embd")?, config.needed("n_head")?);
    Ok(Geometry {
        hidden,
        heads,
        kv_heads: heads,
        head_dim: config.head_dim("n_embd", "n_head")?,
        intermediate: config.size("n_inner")?.unwrap_or(4 * hidden),
        layers: config.needed("n_layer")?,
        vocab: Some(config.needed("vocab_size")?),
        norm_eps: config.number("layer_norm_epsilon")?.unwrap_or(1e-5),
        activation: config.activation("activation_function", "gelu_new", false)?,
        positions: Some(config.size("n_positions")?.unwrap_or(1024)),
        fused_qkv: true,
        ..FIRST_KIND
    })
}

/// What encoders write alike.
fn encoder(config: &Config) -> Result<Geometry, WorkloadError> {
    let heads = config.needed("num_attention_heads")?;
    Ok(Geometry {
        hidden: config.needed("hidden_size")?,
        heads,
        kv_heads: heads,
        head_dim: config.head_dim("hidden_size", "num_attention_heads")?,
        intermediate: config.needed("intermediate_size")?,
        layers: config.needed("num_hidden_layers")?,
        causal: false,
        norm_eps: config.number("layer_norm_eps")?.unwrap_or(1e-12),
        activation: config.activation("hidden_act", "gelu", false)?,
        ..FIRST_KIND
    })
}

fn bert(config: &Config) -> Result<Geometry, WorkloadError> {
    Ok(Geometry {
        vocab: Some(config.needed("vocab_size")?),
        positions: Some(config.size("max_position_embeddings")?.unwrap_or(512)),
        ..encoder(config)?
    })
}

fn vit(config: &Config) -> Result<Geometry, WorkloadError> {
    let (image, patch) = (config.size("image_size")?.unwrap_or(224), config.size("patch_size")?.unwrap_or(16));
    if patch > image {
        return Err(Config::bad("patch_size", &patch.into(), format!("at most image_size, {image}")));
    }
    let geometry = encoder(config)?;
    let bias = Biases { qkv: config.flag("qkv_bias", true)?, ..geometry.bias };
    Ok(Geometry { tokens: Some((image / patch).pow(2) + 1), bias, ..geometry })
}

fn deepseek_v3(config: &Config) -> Result<Geometry, WorkloadError> {
    let mla = Mla {
        q_lora_rank: config.size("q_lora_rank")?,
        kv_lora_rank: config.needed("kv_lora_rank")?,
        qk_nope_head_dim: config.needed("qk_nope_head_dim")?,
        qk_rope_head_dim: config.needed("qk_rope_head_dim")?,
        v_head_dim: config.needed("v_head_dim")?,
    };
    let head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
    let geometry = Geometry { head_dim, ..config.decoder(Some(head_dim))? };
    let dense = config.count("first_k_dense_replace")?.unwrap_or(0);
    let experts = match config.count("n_routed_experts")?.unwrap_or(0) {
        0 => None,
        routed => Some(Experts {
            layers: (geometry.layers - dense).max(0),
            routed,
            per_token: config.needed("num_experts_per_tok")?.min(routed),
            shared: config.count("n_shared_experts")?.unwrap_or(0),
            intermediate: config.needed("moe_intermediate_size")?,
        }),
    };
    let interleaved = config.flag("rope_interleave", true)?;
    Ok(Geometry {
        rope: Some(Rope { theta: config.theta()?, dims: mla.qk_rope_head_dim, interleaved }),
        scale: yarn(config).map(|by| by * by / (head_dim as f64).sqrt()),
        experts: experts.filter(|e| e.layers > 0),
        mla: Some(mla),
        ..geometry
    })
}

/// How much longer contexts sharpen the scores.
fn yarn(config: &Config) -> Option<f64> {
    let scaling = config.get("rope_scaling").or_else(|| config.get("rope_parameters"))?;
    let (factor, by) = (scaling.get("factor")?.as_f64()?, scaling.get("mscale_all_dim")?.as_f64()?);
    (factor > 1.0 && by != 0.0).then(|| 0.1 * by * factor.ln() + 1.0)
}

/// Text for a message: not all of a long one.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
