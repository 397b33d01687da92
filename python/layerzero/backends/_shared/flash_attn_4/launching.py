"""Calls of FlashAttention 4 without its Python.

The library works out what to launch in some 800 lines of Python for every call: 0.2 to 0.5 ms of the host, where the kernel
itself may take 10 µs. For calls of one kind it comes to the same compiled function and the same numbers. So the first
call of a kind goes through the library, with an eye on what it launches; later ones call that function at once, with
tensors of their own. Where more was launched than one function over query, key, value and output, or anything else of it
is a tensor, calls of that kind stay the library's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_Compiled = Callable[..., Any]
# One call is watched at a time.
_watching = threading.Lock()


class _Watched:
    """The library's cache of compiled functions. Calls made by one thread are noted."""

    def __init__(self, cache: Any) -> None:
        self._cache, self._thread = cache, threading.get_ident()
        self.calls: list[tuple[_Compiled, tuple[Any, ...]]] = []

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, compiled: _Compiled) -> None:
        self._cache[key] = compiled

    def __getitem__(self, key: Any) -> _Compiled:
        compiled: _Compiled = self._cache[key]

        def call(*arguments: Any) -> Any:
            if threading.get_ident() == self._thread:
                self.calls.append((compiled, arguments))
            return compiled(*arguments)

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@contextmanager
def _watch() -> Iterator[list[tuple[_Compiled, tuple[Any, ...]]]]:
    """What the library launches meanwhile; nothing is seen where it keeps its compiled functions elsewhere."""
    try:
        forward = import_module("flash_attn.cute.interface")._flash_attn_fwd
    except (ImportError, AttributeError):
        yield []
        return
    with _watching:
        cache = getattr(forward, "compile_cache", None)
        if cache is None:
            yield []
            return
        forward.compile_cache = watched = _Watched(cache)
        try:
            yield watched.calls
        finally:
            forward.compile_cache = cache


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_holds_tensor, value))
    return not (value is None or isinstance(value, bool | int | float))


def _same(given: Any, tensor: Tensor) -> bool:
    return (
        isinstance(given, Tensor)
        and given.data_ptr() == tensor.data_ptr()
        and given.shape == tensor.shape
        and given.stride() == tensor.stride()
    )


def _is_elsewhere(device: torch.device) -> bool:
    """Whether another device is the current one."""
    return device.type == "cuda" and torch._C._cuda_getDevice() != device.index


class Launch:
    """The library's call for tensors of one kind, in the order batch, sequence, heads, element (or `heads_first`)."""

    def __init__(self, library: Callable[..., Any], heads_first: bool, keywords: dict[str, Any]) -> None:
        self._library, self._heads_first, self._keywords = library, heads_first, keywords
        self._compiled: _Compiled | None = None
        self._rest: tuple[Any, ...] = ()
        self._output: tuple[Any, ...] = ()
        self._settled = False

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.requires_grad or key.requires_grad or value.requires_grad:
            # The library would keep what gradients need.
            query, key, value = query.detach(), key.detach(), value.detach()
        if self._heads_first:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        compiled = self._compiled
        if compiled is None or _is_elsewhere(self._output[2]):
            output = self._by_library(query, key, value)
        else:
            shape, dtype, device = self._output
            output = torch.empty(shape, dtype=dtype, device=device)
            compiled(query, key, value, output, *self._rest)
        return output.transpose(1, 2) if self._heads_first else output

    def _by_library(self, *operands: Tensor) -> Tensor:
        # It launches on the current device, whatever its tensors are on.
        device = operands[0].device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if self._settled:
                output: Tensor = self._library(*operands, **self._keywords)[0]
                return output
            with _watch() as calls:
                output = self._library(*operands, **self._keywords)[0]
        self._settle(calls, operands, output)
        return output

    def _settle(
        self, calls: list[tuple[_Compiled, tuple[Any, ...]]], operands: tuple[Tensor, ...], output: Tensor
    ) -> None:
        self._settled = True
        if len(calls) != 1 or not output.is_contiguous():
            return
        compiled, arguments = calls[0]
        tensors, rest = arguments[:4], arguments[4:]
        if len(tensors) == 4 and all(map(_same, tensors, (*operands, output))) and not any(map(_holds_tensor, rest)):
            self._output = output.shape, output.dtype, output.device
            self._rest = rest
            self._compiled = compiled


def launch(library: Callable[..., Any], operands: tuple[Tensor, ...], heads_first: bool, **keywords: Any) -> Launch:
    """The launch for tensors like these, which all plans for them share: what it has found out is not lost."""
    kinds = tuple((t.shape, t.stride(), t.dtype, t.device) for t in operands)
    return _kept(library, kinds, heads_first, tuple(keywords.items()))


@lru_cache(maxsize=1024)
def _kept(
    library: Callable[..., Any], kinds: tuple[Any, ...], heads_first: bool, keywords: tuple[tuple[str, Any], ...]
) -> Launch:
    return Launch(library, heads_first, dict(keywords))
