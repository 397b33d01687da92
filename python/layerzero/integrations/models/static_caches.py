"""What a step of a model was given, and the caches of fixed size of transformers among it.

A step can be replayed if all it reads and writes is in tensors at fixed addresses. A `StaticCache` of transformers is,
except for counts of tokens that Python keeps beside it for layers with a sliding window.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from layerzero._native import kv_append

__all__ = ["Given", "Results", "State", "UnfitError", "capturable"]

#: The layers of a cache whose memory stays where it is.
_LAYERS = ("StaticLayer", "StaticSlidingWindowLayer")
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class UnfitError(Exception):
    """A call that no graph is made of. ``lasting`` unless a later call of its kind may be one."""

    def __init__(self, why: str, lasting: bool = True) -> None:
        super().__init__(why)
        self.lasting = lasting


class State:
    """What a step changes besides its results: the caches."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self._layers = [layer for cache in caches for layer in cache.layers]

    def _counters(self) -> Iterator[tuple[Any, str]]:
        """The counts that Python keeps."""
        for layer in self._layers:
            yield from ((layer, name) for name in _counts_of(layer))

    def counts(self) -> list[int]:
        """What Python has counted."""
        return [getattr(layer, name) for layer, name in self._counters()]

    def advance(self, steps: Sequence[int]) -> None:
        """Counts a step that Python did not see."""
        for (layer, name), step in zip(self._counters(), steps, strict=True):
            setattr(layer, name, getattr(layer, name) + step)

    def save(self) -> tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]:
        """A copy of what a repeated step would change. Slots of a layer without a window would be written again with the
        same numbers, so that only its length is copied."""
        held = [x for layer in self._layers for x in _lengths_of(layer)]
        held += [x for layer in self._layers if layer.is_sliding for x in (layer.keys, layer.values)]
        return self.counts(), [(tensor, tensor.clone()) for tensor in held]

    def restore(self, saved: tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        """Everything as it was saved."""
        counts, tensors = saved
        self.advance([then - now for then, now in zip(counts, self.counts(), strict=True)])
        for tensor, copy in tensors:
            tensor.copy_(copy)


@contextmanager
def capturable(caches: Sequence[Any]) -> Iterator[Callable[[], None]]:
    """Has a step of one token write to its caches by few operations, all of them on the device. Gives what must be called at
    the end of the step.

    transformers makes an index on the host for a layer whose window is full, which a capture does not allow; and for every
    other layer it works out anew which slot is next, copies keys and values apart, and counts. Here all layers share the slot,
    `lz.kv_append` writes both, and one operation counts for all.
    """
    writers = [_Writer(cache) for cache in caches]

    def end() -> None:
        for writer in writers:
            writer.count()

    for writer in writers:
        for layer in writer.layers:
            layer.update = partial(_moved_on if layer.is_sliding else writer.appended, layer)
    try:
        yield end
    finally:
        for writer in writers:
            for layer in writer.layers:
                del layer.update


def _moved_on(layer: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`StaticSlidingWindowLayer.update`, for one token when the window is full: the oldest goes, the new one is last."""
    (name,) = _counts_of(layer)
    if keys.shape[-2] != 1 or getattr(layer, name) < layer.max_cache_len:
        return type(layer).update(layer, keys, values, *args, **kwargs)
    setattr(layer, name, getattr(layer, name) + 1)
    for held, new in ((layer.keys, keys), (layer.values, values)):
        held.copy_(torch.cat((held[:, :, 1:], new), dim=-2))
    return layer.keys, layer.values


class _Writer:
    """What one step writes to the layers of a cache that have no window."""

    def __init__(self, cache: Any) -> None:
        self.layers = list(cache.layers)
        self._written: list[torch.Tensor] = []
        self._slots: torch.Tensor | None = None
        plain = [layer for layer in self.layers if not layer.is_sliding]
        lengths = [length for layer in plain for length in _lengths_of(layer)]
        shapes = {(tuple(layer.keys.shape), layer.keys.device) for layer in plain}
        # Layers move on together, unless somebody has set one back.
        together = len(lengths) == len(plain) > 0 and len(shapes) == 1
        self._together = together and bool((torch.stack(lengths) == lengths[0]).all())

    def appended(self, layer: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`StaticLayer.update`, for one token."""
        if not self._together or keys.shape[-2] != 1 or keys.shape != values.shape or keys.dtype != layer.keys.dtype:
            return type(layer).update(layer, keys, values, *args, **kwargs)
        if self._slots is None:
            batch, _, room, _ = layer.keys.shape
            length = layer.cumulative_length
            # A full cache is not written to: its next slot would be the next sequence's first.
            first = torch.where(length < room, torch.arange(batch, device=keys.device) * room, -1 - length)
            self._slots = first + length
        # A sequence's slots are one block of memory.
        kv_append(keys[:, :, 0], values[:, :, 0], layer.keys, layer.values, self._slots, layout="HND")
        self._written.append(layer.cumulative_length)
        return layer.keys, layer.values

    def count(self) -> None:
        """Counts the token in every layer that it was written to."""
        if self._written:
            torch._foreach_add_(self._written, 1)


class Results:
    """What a step gives. A cache that it was given may be among it, and is not held."""

    def __init__(self, results: Any, caches: Sequence[Any]) -> None:
        leaves, self._spec = torch.utils._pytree.tree_flatten(results)
        self._leaves = [_number(leaf, caches) for leaf in leaves]

    def copied(self, caches: Sequence[Any]) -> Any:
        """Copies of its tensors, and the caches of this call."""
        leaves = [
            leaf.clone() if isinstance(leaf, torch.Tensor) else caches[leaf.at] if isinstance(leaf, _CacheAt) else leaf
            for leaf in self._leaves
        ]
        return torch.utils._pytree.tree_unflatten(leaves, self._spec)


@dataclass(frozen=True)
class _CacheAt:
    """Which of the caches of a call."""

    at: int


def _number(leaf: Any, caches: Sequence[Any]) -> Any:
    if isinstance(leaf, (torch.Tensor, *_PLAIN)):
        return leaf
    for at, cache in enumerate(caches):
        if leaf is cache:
            return _CacheAt(at)
    raise UnfitError(f"a result is a {type(leaf).__name__}")


class Given:
    """The arguments of a step, with its tensors and caches found."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.tensors: list[torch.Tensor] = []
        self.caches: list[Any] = []
        self._form = self._look((args, kwargs))
        for cache in self.caches:
            _check_counts(cache, kwargs, self.tensors)

    def form(self) -> Hashable:
        """Everything but the numbers in tensors and the addresses of caches."""
        return self._form

    def addresses(self) -> Hashable:
        """Where the caches are."""
        return tuple(
            (id(cache), *(x.data_ptr() for layer in cache.layers for x in (layer.keys, layer.values)))
            for cache in self.caches
        )

    def state(self) -> State:
        """What the step changes."""
        return State(self.caches)

    def over(self, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments, with other tensors."""
        left = iter(tensors)
        args, kwargs = _mapped((self.args, self.kwargs), lambda _: next(left))
        return args, kwargs

    def results(self, results: Any) -> Results:
        """What the step gave."""
        return Results(results, self.caches)

    def _look(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return "tensor", value.dtype, tuple(value.shape)
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, list | tuple):
            return type(value), *(self._look(one) for one in value)
        if isinstance(value, dict):
            return dict, *((name, self._look(one)) for name, one in value.items())
        if _is_cache(value):
            _check_layers(value)
            self.caches.append(value)
            return "cache", *(_form_of(layer) for layer in value.layers)
        raise UnfitError(f"an argument is a {type(value).__name__}")


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A structure as `Given` walks it, with its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(one, change) for one in value)
    if isinstance(value, dict):
        return {name: _mapped(one, change) for name, one in value.items()}
    return value


def _is_cache(value: Any) -> bool:
    theirs = sys.modules.get("transformers.cache_utils")
    return theirs is not None and isinstance(value, theirs.Cache)


def _counts_of(layer: Any) -> list[str]:
    return [name for name, held in vars(layer).items() if name.startswith("cumulative_length") and type(held) is int]


def _lengths_of(layer: Any) -> list[torch.Tensor]:
    held = vars(layer).get("cumulative_length")
    return [held] if isinstance(held, torch.Tensor) else []


def _form_of(layer: Any) -> Hashable:
    """What a graph depends on: which tensors there are, and whether a window is full, when it writes elsewhere."""
    full = tuple(getattr(layer, name) >= layer.max_cache_len for name in _counts_of(layer))
    return type(layer), tuple(layer.keys.shape), full


def _check_layers(cache: Any) -> None:
    """Raises `UnfitError` where a cache's memory moves."""
    layers = getattr(cache, "layers", None)
    if layers is None or getattr(cache, "offloading", False):
        raise UnfitError(f"a {type(cache).__name__}: only a StaticCache in the device's memory stays where it is")
    for layer in layers:
        name = type(layer).__name__
        if name not in _LAYERS:
            raise UnfitError(f"a cache with layers of class {name}: only those of a StaticCache stay where they are")
        if not layer.is_initialized:
            raise UnfitError("the cache has no memory before its first step", lasting=False)


def _check_counts(cache: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> None:
    """Raises `UnfitError` where a step would read counts that Python keeps."""
    if not any(_counts_of(layer) for layer in cache.layers):
        return
    masked = kwargs.get("attention_mask")
    positions = kwargs.get("position_ids", kwargs.get("cache_position"))
    if not isinstance(masked, dict) and getattr(masked, "ndim", 0) != 4 or positions is None:
        raise UnfitError(
            "windows in the cache, and no position_ids or no mask of four dimensions, as generate() makes them"
        )
    if tensors[0].shape[1:2] != (1,):
        raise UnfitError("several tokens at once into a cache with windows")
