"""Timing on CUDA devices: by events, with the cache flushed, eager or replayed in a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerzero import _native

#: Twice the L2 cache where its size is not known.
_FLUSH_BYTES = 128 << 20


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
        self._graphs: dict[str, Any] = {}

    def time(self, kernel: str, calls: int) -> float:
        """Microseconds of one call. Eager: from the first launch to the end of the last kernel, the host included."""
        import torch

        with torch.cuda.device(self._device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            once = self._replay(kernel) if self._mode == "graph" else lambda: self._subject.run(kernel)
            total = 0.0
            for _ in range(calls):
                # Every call begins with a cold cache, and with the device idle: what the host takes shows.
                self._flushed.zero_()
                torch.cuda.synchronize()
                begin.record()
                once()
                end.record()
                end.synchronize()
                total += begin.elapsed_time(end)
        return total * 1e3 / calls

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
