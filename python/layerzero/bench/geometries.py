"""The sizes of published models that ``layerzero bench out-of-box`` makes its rows of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from layerzero.integrations._transformers.models import published


@dataclass(frozen=True)
class Geometry:
    """What of a model decides the shapes and the parameters of its calls."""

    name: str
    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of the feed-forward block."""
    vocab: int
    norm: Literal["rms", "layer"]
    eps: float
    activation: Literal["silu", "gelu", "tanh", "relu"]
    """Of the feed-forward block; ``silu`` is the gated one, ``tanh`` gelu's approximation."""
    rotary: int = 0
    """How many dimensions of a head are rotated; 0 for a model without rotary positions."""
    interleaved: bool = False
    """Rotated pairs are neighbours instead of half a head apart."""
    bias: bool = False
    """Whether projections have a bias."""
    window: int | None = None
    """How many keys a query sees in the layers that slide, the key at its own position included."""
    softcap: float = 0.0
    scale: float | None = None
    """Of the scores, where it is not 1/sqrt(head_dim)."""
    positions: int | None = None
    """How many tokens a sequence may have, where that is less than a row would take."""
    decodes: bool = True
    """Whether it makes tokens one by one."""
    mask: Literal["padding", "bias"] | None = None
    """``padding``: a boolean mask of batched prompts; ``bias``: one that is added for every head."""
    source: int | None = None
    """How many keys of an encoder the decoder attends to."""
    v_dim: int | None = None
    """Of a head of the values, where it is not head_dim."""
    head_norm: bool = False
    """Whether queries and keys are normalized head by head."""
    latent: int | None = None
    """Of the compressed keys and values (MLA); beside them are ``rotary`` dimensions."""

    @property
    def projection(self) -> tuple[int, int]:
        """The weight that gives queries, keys and values; of MLA, the one that gives the compressed keys and values."""
        if self.latent is not None:
            return self.latent + self.rotary, self.hidden
        return (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden


_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "relu": "relu"}


def _of_config(name: str, family: str, config: Mapping[str, Any], **more: Any) -> Geometry:
    """A geometry from a published configuration; ``more`` is what the model's code says and the configuration does not."""

    def first(*keys: str) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), None)

    hidden, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
    head_dim = first("head_dim") or hidden // heads
    rms = first("rms_norm_eps")
    said: dict[str, Any] = {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": first("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "inner": first("intermediate_size", "n_inner") or 4 * hidden,
        "vocab": config["vocab_size"],
        "norm": "layer" if rms is None else "rms",
        "eps": rms or first("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        "activation": _ACTIVATIONS[first("hidden_act", "activation_function")],
        "rotary": 0 if rms is None else head_dim,
        "window": first("sliding_window") if config.get("use_sliding_window", True) else None,
        "softcap": first("attn_logit_softcapping") or 0.0,
    }
    return Geometry(name, family, **{**said, **more})


#: Published models whose configurations are not among those that calls are traced of, under the same keys.
_MORE: dict[str, dict[str, Any]] = {
    "falcon-7b": {
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "num_key_value_heads": 1,
        "intermediate_size": 18176,
        "vocab_size": 65024,
        "layer_norm_epsilon": 1e-5,
        "hidden_act": "gelu",
    },
    "phi-3-mini": {
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "intermediate_size": 8192,
        "vocab_size": 32064,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "sliding_window": 2047,
    },
    "gpt-oss-20b": {
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "vocab_size": 201088,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "sliding_window": 128,
    },
    "t5-base": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 32128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "relu",
    },
    "whisper-large-v3": {
        "hidden_size": 1280,
        "num_attention_heads": 20,
        "intermediate_size": 5120,
        "vocab_size": 51866,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
    },
    "glm-4-9b": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 13696,
        "vocab_size": 151552,
        "rms_norm_eps": 1.5625e-7,
        "hidden_act": "silu",
    },
    "olmo-2-7b": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 100352,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    },
    "starcoder2-3b": {
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "intermediate_size": 12288,
        "vocab_size": 49152,
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": 4096,
    },
}


def _deepseek(config: Mapping[str, Any]) -> Geometry:
    rope, content = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    sizes = {"head_dim": content + rope, "v_dim": config["v_head_dim"], "latent": config["kv_lora_rank"]}
    return _of_config("deepseek-v3", "DeepSeek", config, rotary=rope, interleaved=True, **sizes)


@cache
def models() -> dict[str, Geometry]:
    """Every model, by name."""
    configs = {**published(), **_MORE}

    def one(name: str, family: str, **more: Any) -> Geometry:
        return _of_config(name, family, configs[name], **more)

    rows = [
        one("gpt2", "GPT-2", bias=True, positions=1024),
        one("llama-3-8b", "Llama", mask="padding"),
        one("llama-3.2-1b", "Llama"),
        one("qwen2.5-7b", "Qwen", bias=True, mask="padding"),
        one("qwen3-8b", "Qwen", head_norm=True),
        one("mistral-7b", "Mistral"),
        one("gemma-2-9b", "Gemma"),
        _deepseek(configs["deepseek-v3"]),
        one("bert-base", "BERT", bias=True, decodes=False, mask="padding", positions=512),
        one("falcon-7b", "Falcon", rotary=64),
        one("phi-3-mini", "Phi"),
        one("gpt-oss-20b", "gpt-oss", bias=True),
        one("t5-base", "T5", rotary=0, scale=1.0, mask="bias", source=512, positions=512),
        one("whisper-large-v3", "Whisper", bias=True, source=1500, positions=448),
        one("glm-4-9b", "GLM", rotary=64, interleaved=True, bias=True),
        one("olmo-2-7b", "OLMo"),
        one("starcoder2-3b", "StarCoder", rotary=128, bias=True),
    ]
    return {row.name: row for row in rows}
