"""Timing on CUDA devices: by events, with the cache flushed, eager or replayed in a graph."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerzero import _native

#: Twice the L2 cache where its size is not known.
_FLUSH_BYTES = 128 << 20
#: Calls of one sample: each is timed by itself, and more say no more.
_MOST_CALLS = 10


class CudaTimer:
    """Times kernels on the inputs of one call."""

    def __init__(self, subject: _native.Subject, index: int, mode: str) -> None:
        import torch

        if mode not in ("eager", "graph"):
            raise ValueError(f"the mode is {mode!r}, expected 'eager' or 'graph'")
        self._subject = subject
        self._mode = mode
        self._device = torch.device("cuda", index)
        cache = getattr(torch.cuda.get_device_properties(self._device), "L2_cache_size", 0)
        size = 2 * cache or _FLUSH_BYTES
        self._flushed = torch.empty(size, dtype=torch.int8, device=self._device)
        self._begin, self._end, self._flushed_now = (self._event(torch) for _ in range(3))
        self._graphs: dict[str, Any] = {}

    @staticmethod
    def _event(torch: Any) -> Any:
        return torch.cuda.Event(enable_timing=True)

    def time(self, kernel: str, calls: int) -> float:
        """Microseconds of one call, the median of so many. Every call begins with a cold cache and an idle device, so that
        the host's share shows where it is not hidden by work before it."""
        import torch

        calls = min(calls, _MOST_CALLS)
        with torch.cuda.device(self._device):
            if self._mode == "graph":
                replay = self._replay(kernel)
                times = []
                for _ in range(calls):
                    self._before()
                    replay()
                    times.append(self._after())
            else:
                times = self._subject.time_between(kernel, calls, self._before, self._after)
        return statistics.median(times)

    def _before(self) -> None:
        self._flushed.zero_()
        self._flushed_now.record()
        self._flushed_now.synchronize()
        self._begin.record()

    def _after(self) -> float:
        self._end.record()
        self._end.synchronize()
        elapsed: float = self._begin.elapsed_time(self._end)
        return elapsed * 1e3

    def _replay(self, kernel: str) -> Any:
        import torch

        if kernel not in self._graphs:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._subject.run(kernel)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._subject.run(kernel)
            self._graphs[kernel] = graph
        return self._graphs[kernel].replay
