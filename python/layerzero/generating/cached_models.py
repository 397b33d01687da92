"""A causal language model of transformers as a module whose cache is an input.

The cache has room for a fixed number of tokens, its capacity. `index_copy` writes new keys and values to it. Attention is one
operator, which gets the number of tokens in the cache (`cached_attention.py`). So no mask is built, and one graph serves the
prompt and every later token.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerzero import device_graphs
from layerzero.errors import InvalidCallError
from layerzero.generating.cached_attention import cached_attention
from layerzero.lifecycle import open_in_forks

#: The name of our attention function in transformers' registry.
_NAME = "layerzero_cached"
#: Arguments of attention functions that change the result, and that ours does not take.
_REFUSED = ("position_bias", "s_aux", "indices")


def refused(model: Any, why: str) -> InvalidCallError:
    """The error for a model that cannot generate as a compiled model."""
    return InvalidCallError(
        f"{type(model).__name__} cannot generate as a compiled model: {why}",
        code="NOT_EXPORTABLE",
        hint="use model.generate, which runs uncompiled",
    )


@dataclass(frozen=True)
class LayerCache:
    """The shape of the keys and values that one layer keeps of each token."""

    kv_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, batch: int, capacity: int) -> list[Tensor]:
        """Memory for the keys and values of `capacity` tokens. Attention reads only what was written."""
        made = []
        for width in (self.key_width, self.value_width):
            if not device_graphs.serves(self.device):
                made.append(torch.zeros(batch, self.kv_heads, capacity, width, dtype=self.dtype))
            else:
                # The heads of a token lie beside each other, as in pages: kernels for paged caches read it.
                shape = (batch, capacity, self.kv_heads, width)
                made.append(torch.zeros(shape, dtype=self.dtype, device=self.device).transpose(1, 2))
        return made


@dataclass
class _Tracing:
    """State of one pass through the model: the places of the new tokens, and what the layers called."""

    position: Tensor
    firsts: Tensor | None
    attended: int = 0
    windows: int = 0
    #: Arguments that a layer passed and that are not supported.
    refused: list[str] = field(default_factory=list)


_tracing: ContextVar[_Tracing] = ContextVar("layerzero_cached_attention")


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """The function for transformers' `AttentionInterface`."""
    tracing = _tracing.get()
    tracing.attended += 1
    tracing.windows += sliding_window is not None
    tracing.refused += [name for name in _REFUSED if given.get(name) is not None]
    if attention_mask is not None:
        tracing.refused.append("attention_mask")
    if is_causal is False or not getattr(module, "is_causal", True):
        tracing.refused.append("is_causal=False")
    # The window of transformers includes the query's own key, ours does not.
    window = None if sliding_window is None else sliding_window - 1
    out = cached_attention(query, key, value, tracing.position, tracing.firsts, scaling, window, softcap)
    return out.transpose(1, 2).contiguous(), None


def _cache(tensors: list[Tensor], places: Tensor) -> Any:
    from transformers.cache_utils import Cache

    class Written(Cache):  # type: ignore[misc]
        """A cache that writes new keys and values to their places in given tensors."""

        def __init__(self) -> None:
            super().__init__(layers=[])
            self.updates = 0

        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
            self.updates += 1
            keys, values = tensors[2 * layer_idx], tensors[2 * layer_idx + 1]
            keys.index_copy_(2, places, key_states)
            values.index_copy_(2, places, value_states)
            return keys, values

        def get_seq_length(self, *_: Any, **__: Any) -> int:
            # It is not used: positions are passed, and no mask is built.
            return 0

    return Written()


class CachedModel(torch.nn.Module):
    """The logits of a causal language model for the next token, with the cache as an input."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        if "position_ids" not in accepted or "past_key_values" not in accepted:
            raise refused(model, "its forward takes no position_ids and past_key_values")

    def forward(self, input_ids: Tensor, position: Tensor, firsts: Tensor | None, cache: list[Tensor]) -> Tensor:
        """The logits after the last token, (batch, vocabulary).

        Args:
            input_ids: the new tokens, (batch, tokens).
            position: how many tokens are in the cache before these, a tensor of one integer.
            firsts: how many tokens of padding are before each sequence, (batch,); ``None`` without padding.
            cache: keys and values of each layer, (batch, kv_heads, capacity, width).
        """
        places = position + torch.arange(input_ids.shape[1], device=input_ids.device)
        position_ids = places[None, :]
        if firsts is not None:
            position_ids = (position_ids - firsts[:, None]).clamp(min=0)
        written = _cache(cache, places)
        tracing = _Tracing(position, firsts)
        token = _tracing.set(tracing)
        try:
            result = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                past_key_values=written,
                use_cache=True,
                **self._last_only,
            )
        finally:
            _tracing.reset(token)
        self._check(tracing, written.updates, len(cache) // 2)
        logits: Tensor = result.logits[:, -1]
        return logits

    def _check(self, tracing: _Tracing, updates: int, layers: int) -> None:
        if tracing.refused:
            raise refused(self.model, f"its attention takes {tracing.refused[0]}")
        if updates != layers or tracing.attended != layers:
            raise refused(self.model, "its attention is not looked up by name in every layer")
        kinds = getattr(self.model.config, "layer_types", None) or []
        if others := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
            raise refused(self.model, f"it has layers of {others[0]}")
        if tracing.windows < kinds.count("sliding_attention"):
            raise refused(self.model, "not every layer with a sliding window passes it to its attention function")


_switching = open_in_forks(threading.Lock())


@contextmanager
def our_attention(model: Any) -> Iterator[None]:
    """Inside the block, the model uses our attention function."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with _switching:
        ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
        config = model.config
        before = config._attn_implementation
        config._attn_implementation = _NAME
        try:
            yield
        finally:
            config._attn_implementation = before


def layers_of(model: Any) -> list[LayerCache]:
    """What each layer of a model keeps of a token, found by running the model with one token."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache()
    # Under autocast, keys would have another dtype.
    with torch.no_grad(), torch._C._DisableAutocast():
        ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    found = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            raise refused(model, f"a layer keeps {type(layer).__name__}, not keys and values of each token")
        found.append(LayerCache(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device))
    if not found:
        raise refused(model, "it keeps no keys and values")
    return found


def is_causal_language_model(model: Any) -> bool:
    """Whether it is a model of transformers that generates text from text."""
    config = getattr(model, "config", None)
    generates = callable(getattr(model, "generate", None)) and callable(getattr(model, "forward", None))
    return config is not None and generates and not getattr(config, "is_encoder_decoder", False)
