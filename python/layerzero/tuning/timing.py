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
        self._graphs: dict[str, Any] = {}

    def time(self, kernel: str, calls: int) -> float:
        """Microseconds of one call, the median of so many.

        Every call finds the cache cold and the device at work on what came before it, as calls of a model do: what the
        host takes longer than that shows, the rest does not.
        """
        import torch

        calls = min(calls, _MOST_CALLS)
        begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(calls)] for _ in range(2))  # type: ignore[no-untyped-call]
        first, last = iter(begins), iter(ends)

        def before() -> None:
            self._flushed.zero_()
            next(first).record()

        def after() -> float:
            next(last).record()
            return 0.0

        with torch.cuda.device(self._device):
            if self._mode == "graph":
                replay = self._replay(kernel)
                for _ in range(calls):
                    before()
                    replay()
                    after()
            else:
                self._subject.time_between(kernel, calls, before, after)
            ends[-1].synchronize()
        times = [float(begin.elapsed_time(end)) for begin, end in zip(begins, ends, strict=True)]
        return statistics.median(times) * 1e3

    def replayed(self, kernel: str) -> Any:
        """What a kernel gives when it is captured on a side stream after a warm-up, and replayed.

        Raises what capturing raises, and when a replay takes memory: what it wrote to may be somebody else's then.
        """
        import torch

        with torch.cuda.device(self._device):
            replay = self._replay(kernel)
            outputs = self._graphs[kernel][1]
            for tensor in outputs if isinstance(outputs, tuple | list) else [outputs]:
                if isinstance(tensor, torch.Tensor):
                    # What is left of the capture must not be taken for a result.
                    tensor.view(torch.uint8).fill_(0x7F) if tensor.is_contiguous() else tensor.zero_()
            before = torch.cuda.memory_allocated(self._device)
            replay()
            torch.cuda.synchronize(self._device)
            taken = torch.cuda.memory_allocated(self._device) - before
        if taken:
            raise RuntimeError(f"a replay of the captured graph took {taken} bytes of memory")
        return outputs

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
            with torch.cuda.graph(graph, stream=side):
                outputs = self._subject.run(kernel)
            self._graphs[kernel] = (graph, outputs)
        return self._graphs[kernel][0].replay
