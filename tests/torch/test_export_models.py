"""Whole models of transformers from their configurations, tiny and with random weights: the graph gives what eager gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exported_graphs import assert_graph_is, operations
from torch import Tensor
from torch.export import Dim

transformers = pytest.importorskip("transformers", reason="the models are transformers'")

SMALL: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "num_hidden_layers": 1}
TEXT: dict[str, Any] = {"vocab_size": 50, "max_position_embeddings": 64}
SHARED: dict[str, Any] = {**SMALL, **TEXT, "num_key_value_heads": 2}


def gpt2() -> Any:
    """Learned positions, GELU by tanh, weights of products the other way round."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=64)
    )


def llama() -> Any:
    """RMS norms, rotary positions, shared heads, SwiGLU."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHARED))


def qwen2() -> Any:
    """The same with biases."""
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHARED))


def bert() -> Any:
    """Layer norms behind the residuals, three embeddings."""
    return transformers.BertModel(transformers.BertConfig(**SMALL, **TEXT))


def t5_encoder() -> Any:
    """Positions as a bias of the scores."""
    return transformers.T5EncoderModel(
        transformers.T5Config(num_layers=1, d_model=16, num_heads=4, d_kv=4, d_ff=24, vocab_size=50)
    )


def vit() -> Any:
    """Patches by a convolution."""
    return transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=16, patch_size=4))


def whisper_encoder() -> Any:
    """Two convolutions over time."""
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(
        transformers.WhisperConfig(
            encoder_layers=1,
            d_model=16,
            encoder_attention_heads=4,
            encoder_ffn_dim=24,
            num_mel_bins=8,
            max_source_positions=16,
        )
    )


class Plain(torch.nn.Module):
    """A model that takes a tensor and gives its first result."""

    def __init__(self, model: Any, causal: bool) -> None:
        super().__init__()
        self.model = model
        self.options = {"use_cache": False} if causal else {}

    def forward(self, x: Tensor) -> Tensor:
        """The call."""
        result: Tensor = self.model(x, return_dict=False, **self.options)[0]
        return result


def built(make: Callable[[], Any]) -> Plain:
    """The model, its weights those of a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
    return Plain(model, make in (gpt2, llama, qwen2))


def tokens(batch: int, length: int) -> Tensor:
    """Ids of a seed."""
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(length))


BATCH, SEQ = Dim("batch", min=1, max=8), Dim("seq", min=1, max=64)


@pytest.mark.parametrize("make", [gpt2, llama, qwen2, bert, t5_encoder])
def test_texts_of_any_size(make: Callable[[], Any]) -> None:
    """Batch and length are symbols; every size is one graph, without a call that stays torch's."""
    more = [[tokens(*size)] for size in [(1, 1), (3, 4), (1, 13)]]
    exported = assert_graph_is(built(make), [tokens(2, 7)], *more, dynamic_shapes=({0: BATCH, 1: SEQ},), close=1e-4)
    assert exported.hosts == []
    assert "attention" in operations(exported)
    assert exported.violated({name: 5 for name in _symbols(exported)}) == []


def _symbols(exported: Any) -> set[str]:
    return {symbol.name for condition in exported.conditions for symbol in condition.free_symbols}


@pytest.mark.parametrize("make", [vit, whisper_encoder])
def test_images_and_sounds(make: Callable[[], Any]) -> None:
    """The batch is a symbol."""
    shape = (3, 16, 16) if make is vit else (8, 32)

    def numbers(batch: int) -> Tensor:
        return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))

    exported = assert_graph_is(
        built(make), [numbers(2)], [numbers(1)], [numbers(3)], dynamic_shapes=({0: BATCH},), close=1e-4
    )
    assert exported.hosts == []
    assert {"attention", "conv"} <= set(operations(exported))
