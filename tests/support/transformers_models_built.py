"""Models of transformers with seeded random weights, small enough for a test, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY = 99

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SHARED = {**_SIZES, **_IDS, "num_key_value_heads": 2}


def _mla(kind: Any, **more: Any) -> Any:
    sizes = {**_SIZES, **_IDS, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8}
    sizes |= {"v_head_dim": 16, "qk_nope_head_dim": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
    return kind(**sizes, **more, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1)


#: Models that generate text, decoder only. Windows are shorter than the texts of the tests.
DECODERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=128, **_IDS
    ),
    "llama": lambda: transformers.LlamaConfig(**_SHARED),
    "qwen2": lambda: transformers.Qwen2Config(**_SHARED),
    "qwen3": lambda: transformers.Qwen3Config(**_SHARED, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**_SHARED, sliding_window=7),
    "gemma2": lambda: transformers.Gemma2Config(**_SHARED, head_dim=16, sliding_window=7),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_SHARED, head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi": lambda: transformers.PhiConfig(**_SIZES, **_IDS),
    "phi3": lambda: transformers.Phi3Config(**_SHARED),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **{**_SHARED, "intermediate_size": 32},
        head_dim=16,
        sliding_window=7,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "deepseek_v3": lambda: _mla(transformers.DeepseekV3Config),
    # Of chunks, each of which sees only itself.
    "llama4": lambda: transformers.Llama4TextConfig(
        **_SHARED, head_dim=16, attention_chunk_size=6, num_local_experts=2, intermediate_size_mlp=96
    ),
    "mixtral": lambda: transformers.MixtralConfig(**{**_SHARED, "intermediate_size": 32}, num_local_experts=4),
}

if hasattr(transformers, "DeepseekV32Config"):
    # An indexer chooses six keys for each query. With few heads several keys have a score of exactly 0, and which of
    # them are chosen is a matter of sorting.
    DECODERS["deepseek_v32"] = lambda: _mla(
        transformers.DeepseekV32Config, index_topk=6, index_n_heads=16, index_head_dim=16
    )


def randomized(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose weights are not those of a new one, which are too small for attention to matter."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif "sinks" in name:
                parameter.normal_()
            elif parameter.dim() >= 2:
                parameter.normal_(std=0.15)
    return model.to(dtype).eval()


def decoder(name: str, implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    """A decoder by name, with an attention implementation."""
    config = DECODERS[name]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return randomized(model, dtype)


class Logits(torch.nn.Module):
    """A causal language model without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits of all tokens."""
        found: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        return found


def tokens(batch: int, length: int, seed: int = 3) -> torch.Tensor:
    """Tokens, none of them special."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def _bert() -> tuple[Any, dict[str, Any]]:
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    padding = torch.ones(2, 14, dtype=torch.int64)
    padding[1, 9:] = 0
    return (config, transformers.BertForMaskedLM), {"input_ids": tokens(2, 14), "attention_mask": padding}


def _t5() -> tuple[Any, dict[str, Any]]:
    config = transformers.T5Config(
        vocab_size=99,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    padding = torch.ones(2, 14, dtype=torch.int64)
    padding[1, 9:] = 0
    given = {"input_ids": tokens(2, 14), "attention_mask": padding, "decoder_input_ids": tokens(2, 6, seed=4)}
    return (config, transformers.T5ForConditionalGeneration), given


def _whisper() -> tuple[Any, dict[str, Any]]:
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 8}
    sizes |= {"max_source_positions": 20, "max_target_positions": 32, "vocab_size": 99}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **ids)
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(2))
    given = {"input_features": features, "decoder_input_ids": tokens(2, 6)}
    return (config, transformers.WhisperForConditionalGeneration), given


def _vit() -> tuple[Any, dict[str, Any]]:
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
    )
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    return (config, transformers.ViTForImageClassification), {"pixel_values": pixels}


#: Encoders, encoder-decoders, speech and pictures: a configuration with its class, and what the model is called with.
OTHERS = {"bert": _bert, "t5": _t5, "whisper": _whisper, "vit": _vit}
