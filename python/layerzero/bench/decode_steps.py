"""Decode steps of causal language models for ``layerzero bench graph``: one new token after a context in a cache.

The step is repeated: the same token, written to the same place of the cache, after the same keys and values.

- torch and the peers that export the model run :class:`DecodeStep`. Its cache has room for exactly the context and one token, so
  all of it is read. Eager torch needs no mask then; exported models may have one, because transformers builds it when traced.
- LayerZero runs the step of ``generate``. Its cache has room for a multiple of 128 tokens, of which it reads the written ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class DecodeStep(nn.Module):
    """A causal language model of transformers with a cache of random keys and values. Returns the logits after a token."""

    def __init__(self, model: Any, context: int, layers: int, kv_heads: int, width: int) -> None:
        super().__init__()
        self.model, self.context, self.tensors = model, context, 2 * layers
        for number in range(2 * layers):
            self.register_buffer(f"cache_{number}", torch.randn(1, kv_heads, context + 1, width))

    @property
    def cache(self) -> list[Tensor]:
        """Keys and values of each layer."""
        return [getattr(self, f"cache_{number}") for number in range(self.tensors)]

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.full((1, 1), self.context, dtype=torch.int64)
        kept = _Kept(self.cache, self.context)
        found = self.model(input_ids=ids, position_ids=at, past_key_values=kept, use_cache=True)
        return found.logits[:, -1]  # type: ignore[no-any-return]


class _Kept:
    """A cache for transformers' models that writes to a fixed place of given tensors."""

    is_compileable, is_sliding = False, (False,)

    def __init__(self, tensors: list[Tensor], place: int) -> None:
        self.tensors, self.place = tensors, place
        self.layers: list[Any] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of a layer."""
        keys, values = self.tensors[2 * layer], self.tensors[2 * layer + 1]
        keys[:, :, self.place : self.place + 1] = key
        values[:, :, self.place : self.place + 1] = value
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """How many tokens are written."""
        return self.place

    def get_query_offset(self, *_: Any) -> int:
        """The place of the first query."""
        return self.place

    def get_mask_sizes(self, queries: Any, *_: Any) -> tuple[int, int]:
        """How many keys there are, and the first of them."""
        return self.place + 1, 0


def layerzero_step(step: DecodeStep, ids: Tensor, **options: Any) -> Callable[[], Tensor]:
    """The step that `generate` of a compiled model runs."""
    import layerzero as lz

    decoder = lz.compile(step.model, **options).decoder()
    cache = decoder.cache(1, step.context + 1)
    for ours, theirs in zip(cache, step.cache, strict=True):
        ours[:, :, : step.context + 1] = theirs
    position, firsts = torch.tensor([step.context]), torch.zeros(1, dtype=torch.int64)
    return lambda: decoder.step(ids, position, firsts, cache)


def gpt2(context: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """GPT-2 of 124 million parameters."""
    from layerzero.bench.graph_models import gpt2_model

    model = gpt2_model()
    config = model.config
    step = DecodeStep(model, context, config.n_layer, config.n_head, config.n_embd // config.n_head)
    return step, (torch.randint(0, config.vocab_size, (1, 1)),)


def llama(context: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The small Llama of the other cases."""
    from layerzero.bench.graph_models import llama_model

    model = llama_model()
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    step = DecodeStep(model, context, config.num_hidden_layers, config.num_key_value_heads, width)
    return step, (torch.randint(0, config.vocab_size, (1, 1)),)
