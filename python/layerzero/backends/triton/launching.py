"""Launches: what Triton works out for every call, its arguments' kinds and the binary for them, is worked out once.

Everything but addresses is settled when a `Launch` is made: a kind of call has sizes, strides and scalars of its own, and
tensors whose addresses are multiples of 16 or not. Triton's own launch costs the host about 10 µs, this one about 2.

A launch can be noted instead of made (`noting`), for another process to compile what it needs: see `ahead`. It can also
become part of a graph that torch's compiler traces (`traced`), which then makes it like the kernels of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret) if hasattr(triton, "knobs") else False
"""Whether kernels run in Triton's interpreter, on tensors of the CPU."""

#: How a binary is launched differs between versions; elsewhere Triton does it.
KNOWN = triton.__version__.startswith("3.6.") and not INTERPRETED
_Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Noted(NamedTuple):
    """A launch that was not made."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class _Notes(threading.local):
    """What this thread does with launches."""

    launches: list[Noted] | None = None
    """Those it notes; `None` while it makes them."""
    traced: bool = False
    """Whether they become part of a graph."""


class UntraceableError(Exception):
    """A call that cannot become part of a graph."""


_notes = _Notes()


@contextmanager
def noting() -> Iterator[list[Noted]]:
    """Has this thread note its launches instead of making them. One whose binary is loaded is made: it needs nothing."""
    noted: list[Noted] = []
    _notes.launches = noted
    try:
        yield noted
    finally:
        _notes.launches = None


@contextmanager
def traced() -> Iterator[None]:
    """Has the launches of this thread become part of the graph that torch traces."""
    _notes.traced = True
    try:
        yield
    finally:
        _notes.traced = False


def is_traced() -> bool:
    """Whether launches become part of a graph. Its tensors have no memory, and its sizes may be symbols."""
    return _notes.traced


def aligned(tensor: Tensor) -> bool:
    """Whether its memory begins on a multiple of 16 bytes. Of a traced tensor the compiler aligns what it is a view of, and must
    know where in it the view begins."""
    if not _notes.traced:
        return tensor.data_ptr() % 16 == 0
    at = tensor.storage_offset()
    return isinstance(at, int) and at * tensor.element_size() % 16 == 0


def hint(size: Any) -> int:
    """A size; of one that varies, what it is while the graph is traced. For what changes speed alone: it guards nothing."""
    if isinstance(size, torch.SymInt):
        found = size.node.hint
        return _UNKNOWN_SIZE if found is None else int(found)
    return int(size)


#: A size that is only known when a graph runs.
_UNKNOWN_SIZE = 1024


def settle_key(kernel: Any) -> None:
    """Has Triton work out the key of a kernel, after those of all it calls. Triton 3.6 leaves the constants of a function out of
    its caller's key if the caller's was asked for first: then the key would depend on what was compiled before."""
    function = getattr(kernel, "fn", None)
    if function is None or getattr(kernel, "hash", "") is not None:
        return
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if called is not kernel and isinstance(called, triton.runtime.jit.JITCallable):
            settle_key(called)
    kernel.cache_key  # noqa: B018


class Launch:
    """A kernel with its grid, its scalars and its constants.

    The kernel takes tensors (and numbers that differ from call to call) first, then `scalars`, then `constants`, in the
    order of its parameters. Such numbers are annotated and not specialized on. One that `overlaps` may begin before the
    launch before it has ended: see `overlapping`.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        device: torch.device,
        scalars: tuple[Any, ...] = (),
        constants: tuple[Any, ...] = (),
        warps: int = 4,
        stages: int = 2,
        overlaps: bool = False,
    ) -> None:
        self._kernel, self._grid, self._rest = kernel, grid, (*scalars, *constants)
        self._options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
        if overlaps:
            self._options["launch_pdl"] = True
        self._device = -1 if device.type == "cpu" else device.index
        self._launch: Callable[..., Any] | None = None
        self._before: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> None:
        launch = self._launch
        if launch is None or _hooks() or torch._C._cuda_getDevice() != self._device:
            self._by_triton(arguments)
            return
        addresses = [a if a is None or a.__class__ is int else a.data_ptr() for a in arguments]
        launch(
            self._grid, 1, 1, torch._C._cuda_getCurrentRawStream(self._device), *self._before, *addresses, *self._rest
        )

    def _by_triton(self, arguments: tuple[Any, ...]) -> None:
        if self._grid == 0:
            return
        if not INTERPRETED and not _notes.traced:
            settle_key(self._kernel)
        if _notes.traced:
            warps = {name: self._options[name] for name in ("num_warps", "num_stages")}
            torch.library.wrap_triton(self._kernel)[(self._grid,)](*arguments, *self._rest, **warps)
            return
        if _notes.launches is not None:
            _notes.launches.append(Noted(self._kernel, (*arguments, *self._rest), self._options))
            return
        if self._device < 0:
            self._kernel[(self._grid,)](*arguments, *self._rest, **self._options)
            return
        with torch.cuda.device(self._device):
            binary = self._kernel[(self._grid,)](*arguments, *self._rest, **self._options)
        if KNOWN and self._launch is None:
            launcher = binary.run
            if launcher.global_scratch_size == 0 and launcher.profile_scratch_size == 0:
                ways = launcher.launch_cooperative_grid, launcher.launch_pdl
                self._before = (binary.function, *ways, None, None, binary.packed_metadata, None, None, None)
                self._launch = launcher.launch


def _no_hooks() -> bool:
    return False


def _profiler_listens() -> bool:
    return bool(_ENTER.calls or _EXIT.calls)


_ENTER: Any = triton.knobs.runtime.launch_enter_hook if KNOWN else None
_EXIT: Any = triton.knobs.runtime.launch_exit_hook if KNOWN else None
_hooks = _profiler_listens if KNOWN else _no_hooks


def planned(plan: Callable[..., _Call]) -> Callable[..., Any]:
    """A kernel out of its plan: what it calls, once for each kind of call, and with which tensors."""

    @wraps(plan)
    def run(*arguments: Any, **named: Any) -> Any:
        function, tensors = plan(*arguments, **named)
        return function(*tensors)

    run.direct = plan  # type: ignore[attr-defined]
    return run


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors a device has."""
    return 4 if device.type == "cpu" else int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> int:
    """How many bytes of shared memory a block of threads may have."""
    if device.type == "cpu":
        return 1 << 20
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def power(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def warps_for(elements: int, size: int) -> int:
    """As many warps as give each thread 32 bytes of a block."""
    return min(max(elements * size // 1024, 1), 16)


def empty_like(tensor: Tensor) -> Tensor:
    """Memory for a result of the same shape, without gaps, in the usual order."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def rows_of(tensor: Tensor) -> tuple[Tensor, int, int, int] | None:
    """The rows of a tensor, last dimension whole: the tensor itself, how many rows lie evenly, how far apart those are, and
    how far apart such runs of rows are. `None` where rows lie otherwise."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > 2 or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        return None
    inner, step = dims[-1] if dims else (1, tensor.shape[-1])
    return tensor, inner, step, dims[0][1] if len(dims) == 2 else 0
