"""A causal language model as one graph, for the prompt and for each later token, and its cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from layerzero import device_graphs
from layerzero.checks import largest_error
from layerzero.compiled_model import CompiledModel
from layerzero.errors import InvalidCallError
from layerzero.generating.cached_models import (
    CachedModel,
    LayerCache,
    is_causal_language_model,
    layers_of,
    our_attention,
    refused,
)
from layerzero.graph_answers import GraphReport, GraphStep, TimedStep
from layerzero.graph_variants import How, Session
from layerzero.lifecycle import open_in_forks
from layerzero.results import Rows

#: The capacity of a cache is a multiple of this, so that calls of similar lengths share a plan.
_ROOM = 128
#: The capacity for models whose configuration does not say how many positions they have.
_MOST = 1 << 20


class Decoder:
    """The graph of a model with a cache. It is exported once, for every batch, number of new tokens and capacity."""

    def __init__(self, model: Any, how: How, share: Session | None = None) -> None:
        if not is_causal_language_model(model):
            raise InvalidCallError(
                f"{type(model).__name__} is no causal language model of transformers",
                code="NOT_A_MODEL",
                hint="pass a model such as AutoModelForCausalLM gives",
            )
        if model.training:
            raise InvalidCallError(
                "the model is in training mode, and generating is inference",
                code="TRAINING_MODE",
                hint="call model.eval() first",
            )
        if model.device.type not in ("cpu", "cuda"):
            raise refused(model, f"it is on {model.device}")
        self.model, self.device = model, model.device
        self.layers = layers_of(model)
        self.most = _positions(model)
        own_pages = device_graphs.serves(self.device)
        # On a device, sequences without padding have a graph of their own: its attention reads the cache as pages.
        self._compiled = _compiled(model, self.layers, self.most, how, share, padded=not own_pages)
        self._padded = None if own_pages else self._compiled
        self._how = how
        self.session = self._compiled._variants[0].session
        self._lock = open_in_forks(threading.Lock())
        self._cache: list[Tensor] = []

    @contextmanager
    def taken_cache(self, batch: int, tokens: int) -> Iterator[list[Tensor]]:
        """A cache for so many tokens that only this block uses. It is kept for the next block."""
        with self._lock:
            self.cache(batch, tokens)
            cache, self._cache = self._cache, []
        try:
            yield cache
        finally:
            with self._lock:
                self._cache = cache

    def cache(self, batch: int, tokens: int) -> list[Tensor]:
        """A cache for so many tokens: the one kept from the last call, if it is large enough."""
        self.checked(tokens)
        kept = self._cache
        if not kept or kept[0].shape[0] != batch or kept[0].shape[2] < tokens:
            self._cache = self.room(batch, tokens)
        return self._cache

    def room(self, batch: int, tokens: int) -> list[Tensor]:
        """A new cache for so many tokens."""
        self.checked(tokens)
        capacity = min(-(-tokens // _ROOM) * _ROOM, self.most)
        return [one for layer in self.layers for one in layer.empty(batch, capacity)]

    def checked(self, tokens: int) -> None:
        """Raises an error if the model has fewer positions than this."""
        if tokens > self.most:
            raise InvalidCallError(
                f"{tokens} tokens do not fit: {type(self.model).__name__} has {self.most} positions",
                code="TOO_LONG",
                hint="pass a shorter prompt, or a smaller max_new_tokens",
            )

    def step(self, input_ids: Tensor, position: Tensor, firsts: Tensor | None, cache: Sequence[Tensor]) -> Tensor:
        """The logits after the last of some new tokens, (batch, vocabulary). Their keys and values are written to the cache.

        Args:
            input_ids: the new tokens, (batch, tokens).
            position: how many tokens are in the cache before these, a tensor of one integer.
            firsts: how many tokens of padding are before each sequence, (batch,); ``None`` without padding.
            cache: what :meth:`cache` gives.
        """
        compiled = self._compiled
        if firsts is not None and compiled is not self._padded:
            compiled = self._with_padding()
        elif firsts is None and compiled is self._padded:
            firsts = torch.zeros(input_ids.shape[0], dtype=torch.int64)
        variant = compiled._variants[0]
        given = [input_ids, position, *([] if firsts is None else [firsts]), *cache]
        self._compiled._calls += 1
        exported = variant.exported
        logits: Tensor = variant.session.run([*given, *exported.buffers, *exported.held], variant.host)[0]
        return logits

    def _with_padding(self) -> CompiledModel:
        """The graph for padded sequences, made at its first use."""
        with self._lock:
            if self._padded is None:
                self._padded = _compiled(self.model, self.layers, self.most, self._how, None, padded=True)
            return self._padded

    def inputs(
        self, batch: int = 1, tokens: int = 1, written: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Arguments for :meth:`step`: ``tokens`` new tokens after ``written`` earlier ones, all with the id 0, and a new cache.

        Without ``written`` there are 127 earlier tokens, or as many as fit.
        """
        written = min(127, self.most - tokens) if written is None else written
        ids = torch.zeros((batch, tokens), dtype=torch.int64, device=self.device)
        firsts = torch.zeros(batch, dtype=torch.int64) if self._compiled is self._padded else None
        position = torch.tensor([written], device=self.device)
        return ids, position, firsts, self.room(batch, written + tokens)

    def report(self, batch: int = 1, tokens: int = 1, written: int | None = None) -> GraphReport:
        """As :meth:`CompiledModel.report`, for a step of these sizes. ``largest_error`` is that of the logits after 16 random tokens."""
        if self._compiled._how.weights is not None and self._compiled._error is None:
            self._compiled._error = self._measured_error()
        return self._compiled.report(*self.inputs(batch, tokens, written))

    def _measured_error(self) -> float:
        vocabulary = self.model.get_input_embeddings().num_embeddings
        tokens = min(16, self.most)
        ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0)).to(self.device)
        at = torch.zeros(1, dtype=torch.int64, device=self.device)
        with torch.no_grad(), torch._C._DisableAutocast():
            found = self.step(ids, at, None, self.room(1, tokens))
            expected = self.model(input_ids=ids, use_cache=False).logits[:, -1]
        return largest_error([found], [expected])

    def explain(self, batch: int = 1, tokens: int = 1, written: int | None = None) -> Rows[GraphStep]:
        """As :meth:`CompiledModel.explain`."""
        return self._compiled.explain(*self.inputs(batch, tokens, written))

    def profile(
        self, batch: int = 1, tokens: int = 1, written: int | None = None, *, rounds: int = 20
    ) -> Rows[TimedStep]:
        """As :meth:`CompiledModel.profile`."""
        return self._compiled.profile(*self.inputs(batch, tokens, written), rounds=rounds)

    def graph(self, form: str = "text") -> str:
        """As :meth:`CompiledModel.graph`."""
        return self._compiled.graph(form)

    def __repr__(self) -> str:
        return f"<Decoder of {type(self.model).__name__}: {len(self.layers)} layers, up to {self.most} tokens>"


def _positions(model: Any) -> int:
    """How many positions a model has."""
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    found = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return int(found) if found else _MOST


#: The upper limits of the symbols.
_BOUNDS = {"batch": 1 << 16, "tokens": _MOST, "capacity": _MOST}


def _compiled(
    model: Any, layers: Sequence[LayerCache], most: int, how: How, share: Session | None, *, padded: bool
) -> CompiledModel:
    """The model with a cache as one graph. The batch, the number of new tokens and the capacity are symbols."""
    # Three different numbers: torch.export would take equal ones for the same symbol.
    batch, tokens, capacity = 2, 3, min(8, most)
    cache = [one for layer in layers for one in layer.empty(batch, capacity)]
    device = model.device
    arguments = (
        torch.zeros(batch, tokens, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(batch, dtype=torch.int64, device=device) if padded else None,
        cache,
    )
    dims = {name: torch.export.Dim(name, min=1, max=greatest) for name, greatest in _BOUNDS.items()}
    shapes = (
        {0: dims["batch"], 1: dims["tokens"]},
        None,
        {0: dims["batch"]} if padded else None,
        [{0: dims["batch"], 2: dims["capacity"]} for _ in cache],
    )
    with our_attention(model):
        module = CachedModel(model).eval()
        compiled = CompiledModel(module, dynamic_shapes=shapes, share=share, **asdict(how))
        compiled._prepare(arguments, {})
    if not compiled._variants:
        raise refused(model, f"it could not be exported on {device}")
    # A pass of the module by itself would need our attention.
    compiled._example = None
    return compiled
