"""Proof that a kernel is safe inside CUDA graphs: it is captured, replayed on other inputs, and compared with itself.

A kernel is captured on a side stream after it ran there a few times, so that cuBLAS, cuDNN and its own library have
allocated what they keep. The proof fails, each with a reason of its own, when

- the capture is refused: the kernel waits for the device, or asks the driver for memory (``synchronizes``);
- memory stays taken beyond the results: ``allocated after - allocated before - bytes of the results``, over the capture
  and over a replay, is more than ``graph.memory_delta_warning_mb`` (``allocates``). What a kernel takes and gives back
  while it is captured is the graph's own, and does not count;
- the replay on fresh inputs gives something else than a call outside of the graph does (``differs``);
- anything else is raised (``failed``).

What is found out holds for the kernel in the cell of the call's sizes, for this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

from layerzero import _native, devices
from layerzero.checks import difference
from layerzero.documents import to_json
from layerzero.loading import setting
from layerzero.tuning import inputs

#: What the driver says of work that a capture does not allow, and of the capture afterwards.
_FORBIDDEN = (
    "not permitted when stream is capturing",
    "previous error during capture",
    "cudaErrorStreamCapture",
    "unsafe call was made from a capturing",
)
#: torch allows one capture at a time in a process.
_one_at_a_time = threading.Lock()

#: What is wrong with a kernel in a graph: ``kind``, and what belongs to it.
Doubt = dict[str, Any]


class Limits(NamedTuple):
    """The settings of proofs."""

    kept_bytes: int
    """How much memory may stay taken beyond the results."""
    warmups: int
    """How often a kernel runs before it is captured."""
    strict: bool
    """Whether only proven kernels may be captured."""


def limits() -> Limits:
    """The settings in force."""
    kept = round(float(setting("graph.memory_delta_warning_mb")) * (1 << 20))
    return Limits(kept, int(setting("graph.warmup_iterations")), bool(setting("graph_strict_mode")))


def captures(device: int) -> bool:
    """Whether graphs can be captured on a device of the engine."""
    return devices.cuda_index(device) is not None


class Graphs(Protocol):
    """What captures and replays: a device, or what stands for one in a test."""

    def warm(self, run: Callable[[], Any], times: int) -> None:
        """Runs something so many times on the side stream, and has the current one wait for it."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        """Captures it there: what replays it, and what it gave."""

    def allocated(self) -> int:
        """Bytes that are in use."""

    def wait(self) -> None:
        """Waits for the device."""


class CudaGraphs:
    """A CUDA device, with a side stream. Graphs of one ``pool`` share memory."""

    def __init__(self, index: int, stream: Any = None, pool: Any = None) -> None:
        import torch

        self._pool = pool

        self._device = torch.device("cuda", index)
        self._stream = stream if stream is not None else torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def warm(self, run: Callable[[], Any], times: int) -> None:
        """Runs something so many times on the side stream, and has the current one wait for it."""
        import torch

        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                run()
        current.wait_stream(self._stream)

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        """Captures it on the side stream: what replays it, and what it gave."""
        import torch

        graph, pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[self._device.index]
        state, before = generator.clone_state(), torch.cuda.current_stream(self._device)
        # Other threads may go on allocating: only what this one does is held against the capture.
        captured = torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
        try:
            with _one_at_a_time, captured:
                outputs = run()
        except BaseException:
            # A capture that breaks off leaves torch's generator inside of it, and every draw of the process would fail.
            generator.graphsafe_set_state(state)
            # torch's capture leaves its stream as the current one where it cannot end.
            torch.cuda.set_stream(before)
            _end_pool(self._device.index, pool)
            if self._pool is not None:
                # The allocator may keep what the capture has left in this one.
                self._pool = torch.cuda.graph_pool_handle()
            raise
        return graph.replay, outputs

    def allocated(self) -> int:
        """Bytes that torch's allocator was asked for on the device and has not got back. Not what it handed out: a large
        block is rounded up by as much as the limit."""
        import torch

        return int(torch.cuda.memory_stats(self._device)["requested_bytes.all.current"])

    def wait(self) -> None:
        """Waits for the device."""
        import torch

        torch.cuda.synchronize(self._device)


def _end_pool(index: int, pool: tuple[int, int]) -> None:
    """Ends a capture for torch's allocator, where the driver refused to end it.

    In some versions of torch ``CUDAGraph.capture_end`` raises before it tells the allocator. From then on the allocator
    takes a capture to be under way: ``torch.cuda.empty_cache`` frees nothing, and an allocation that finds no memory does not
    try again without the cache.
    """
    import torch

    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except RuntimeError:
        # This torch has done it.
        return
    torch._C._cuda_releasePool(index, pool)


def prove(kernel: str, call: str, device: int, graphs: Graphs | None = None) -> Doubt | None:
    """Captures and replays a kernel for a call that is written down, and takes note of how that came out.

    ``None`` when it is proven, for the cell the call's sizes lie in.
    """
    doubt = _doubt(kernel, call, device, graphs)
    _native.graph_captured(kernel, call, device, None if doubt is None else to_json(doubt))
    return doubt


def prove_wanted(call: str, device: int) -> Iterator[tuple[str, Doubt | None]]:
    """Proves the kernel that a capture of the call would choose; when that fails the next best, until one is proven."""
    while (kernel := _native.graph_wanted(call, device)) is not None:
        yield kernel, prove(kernel, call, device)


def warm(kernel: str, call: str, device: int, graphs: Graphs) -> None:
    """Runs a kernel on the side stream, on inputs made up for a call, as often as it does before a capture."""
    with quietly(device):
        made = inputs.make(call, device)
        subject = _native.Subject(made.function, made.copied())
        graphs.warm(lambda: subject.run(kernel), limits().warmups)


@contextmanager
def quietly(device: int) -> Iterator[None]:
    """Without gradients, and with the device as the current one."""
    import torch

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if (index := devices.cuda_index(device)) is not None:
            stack.enter_context(torch.cuda.device(index))
        yield


def _doubt(kernel: str, call: str, device: int, graphs: Graphs | None) -> Doubt | None:
    try:
        with quietly(device):
            on = graphs if graphs is not None else CudaGraphs(devices.cuda_index(device) or 0)
            return _Trial(kernel, call, device, on).doubt()
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises is its result
        return _raised(error)


class _Trial:
    """One kernel, captured on inputs of one call."""

    def __init__(self, kernel: str, call: str, device: int, graphs: Graphs) -> None:
        self._graphs, self._limits = graphs, limits()
        self._made = inputs.make(call, device)
        self._fresh = inputs.make(call, device, seed=1)
        self._kwargs = self._made.copied()
        subject = _native.Subject(self._made.function, self._kwargs)
        self._run: Callable[[], Any] = lambda: subject.run(kernel)

    def doubt(self) -> Doubt | None:
        graphs = self._graphs
        graphs.warm(self._run, self._limits.warmups)
        graphs.wait()
        before = graphs.allocated()
        replay, outputs = graphs.capture(self._run)
        own = self._own(outputs)
        kept = graphs.allocated() - before - sum(storage.nbytes() for storage in own)
        if kept > self._limits.kept_bytes:
            return self._allocates(kept)
        self._refill()
        eager = [tensor.clone() for tensor in self._results(self._run())]
        self._refill()
        for tensor in own:
            # What is left of the capture must not be taken for a result.
            tensor.fill_(0x7F)
        graphs.wait()
        before = graphs.allocated()
        replay()
        graphs.wait()
        if (kept := graphs.allocated() - before) > self._limits.kept_bytes:
            return self._allocates(kept)
        if self._made.kind == "sampling" and "uniform" not in self._kwargs:
            # Draws of its own: two of them differ.
            return None
        worst, within = difference(self._results(outputs), eager, self._made.tolerance)
        return None if within else {"kind": "differs", "error": f"differs from the eager result by up to {worst:g}"}

    def _allocates(self, kept: int) -> Doubt:
        return {"kind": "allocates", "bytes": kept, "limit": self._limits.kept_bytes}

    def _results(self, outputs: Any) -> list[Any]:
        """The tensors a call gives, and those it updates."""
        return [*_tensors(outputs), *(self._kwargs[name] for name in self._made.updated)]

    def _own(self, outputs: Any) -> list[Any]:
        """The memory of the results that is no argument's."""
        given = {value.untyped_storage().data_ptr() for value in self._kwargs.values() if _is_tensor(value)}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in _tensors(outputs)}
        return [storage for address, storage in storages.items() if address not in given]

    def _refill(self) -> None:
        """Other numbers in the tensors that were captured."""
        for name, value in self._fresh.kwargs.items():
            if _is_tensor(value):
                to = self._kwargs[name]
                # Broadcast axes are one and the same memory, which cannot be copied to as a whole.
                index = tuple(slice(0, 1) if step == 0 else slice(None) for step in to.stride())
                to[index].copy_(value[index])


def _tensors(outputs: Any) -> list[Any]:
    return [one for one in (outputs if isinstance(outputs, tuple | list) else [outputs]) if _is_tensor(one)]


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _raised(error: BaseException) -> Doubt:
    """A failure as a doubt. The end of a capture raises as well, with what broke it as its context."""
    chain, seen = [], error
    while seen is not None and seen not in chain:
        chain.append(seen)
        seen = seen.__cause__ or seen.__context__  # type: ignore[assignment]
    told = " / ".join(f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}" for e in reversed(chain))
    forbidden = any(words in str(e) for e in chain for words in _FORBIDDEN)
    return {"kind": "synchronizes" if forbidden else "failed", "error": told}
