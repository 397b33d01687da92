"""Timing on CUDA devices: by events, with the cache flushed, eager or replayed in a graph."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from layerzero import _native

#: Twice the L2 cache where its size is not known.
_FLUSH_BYTES = 128 << 20
#: Calls of one sample: each is timed by itself, and more say no more.
_MOST_CALLS = 10
#: Calls of one eager sample, from the least to so many as take no longer than that together, in microseconds: what the host
#: does for the first one is not in its caches, since other kernels were timed before.
_LEAST_CALLS, _WARM_CALLS, _LONG_US = 2, 4, 20_000.0
#: How long the host is thought to take for the calls of a sample before that is known, and at most, in microseconds.
_LEAD_US, _MOST_LEAD_US = 1000.0, 8000.0
#: How often the host may be late, with twice the lead each time, in how many samples, before that is taken for the kernel's
#: doing: hosts have bad moments, too.
_TRIES, _LATE_SAMPLES = 4, 2
#: How often the host does the same to find out how fast it is, how long it has for that, in microseconds, and how many
#: samples its best pace is known by: a few may have been lucky.
_PACE_CALLS, _PACE_US, _PACE_SAMPLES = 12, 200.0, 25
#: Cycles of the device, for finding out how long one takes, and how often that is done: the shortest counts.
_CYCLES, _CLOCK_TRIES = 200_000, 3


class Pace:
    """How fast the host is, by what it takes for something that is always the same.

    Hosts take half as long again for seconds at a time, whatever they do: more than kernels differ. What was measured then
    would be compared with what is measured a moment later.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_PACE_SAMPLES)
        self._best_us = math.inf

    def share(self, us: float) -> float:
        """The share that a time would be of itself at the host's best pace so far, if now it takes so long for what is
        always the same."""
        self._last.append(us)
        if len(self._last) == _PACE_SAMPLES:
            self._best_us = min(self._best_us, statistics.median(self._last))
        return min(1.0, self._best_us / us)


#: Of this process: all that is timed in it is to be comparable.
_PACE = Pace()


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
        self._small = torch.empty(1, dtype=torch.int8, device=self._device)
        self._cycles_per_us = 0.0
        self._graphs: dict[str, Any] = {}
        # What a call took when a kernel was last timed, and the host for all calls of that sample; and in how many samples
        # the host was late, whatever the lead.
        self._took_us: dict[str, float] = {}
        self._host_us: dict[str, float] = {}
        self._late: Counter[str] = Counter()
        # What each sample of a kernel was on either side.
        self._sides: dict[str, list[tuple[float, float]]] = {}

    def time(self, kernel: str, calls: int) -> float:
        """Microseconds of one call, out of so many or more, each with a cold cache on the device: the median of what they
        take the device, the lower quartile of what they take the host at its best pace.

        In a graph, that is what the device takes. Else it is what the host takes to make a call, or the device to carry
        it out, whichever is more: calls follow one another, and the slower of the two sets the pace.
        """
        import torch

        calls = min(calls, _MOST_CALLS)
        with torch.cuda.device(self._device):
            if self._mode == "graph":
                replay = self._replay(kernel)
                return self._sample(calls, 0.0, lambda before, after: _repeat(calls, before, replay, after)).device_us
            took = self._took_us[kernel] = self._eager(kernel, max(calls, self._warm(kernel)))
            return took

    def _warm(self, kernel: str) -> int:
        """How many calls in a row it takes for the host to have what it does in its caches, if there is time for that."""
        took = self._took_us.get(kernel)
        return min(max(int(_LONG_US / took), _LEAST_CALLS), _WARM_CALLS) if took else _LEAST_CALLS

    def _eager(self, kernel: str, calls: int) -> float:
        def run(before: Callable[[], None], after: Callable[[], float]) -> None:
            self._subject.time_between(kernel, calls, before, after)

        lead = self._host_us.get(kernel, _LEAD_US)
        for _ in range(0 if self._waits(kernel) else _TRIES):
            sample = self._sample(calls, 2 * lead, run)
            lead = min(max(2 * lead, sample.all_us), _MOST_LEAD_US)
            if sample.kept_busy:
                self._host_us[kernel] = min(sample.all_us, _MOST_LEAD_US)
                self._sides.setdefault(kernel, []).append((sample.host_us, sample.device_us))
                return sample.us
        # Whatever lead it is given it uses up: it waits for the device, it seems. What it waits for is to be its own work.
        self._late[kernel] += 1
        return self._sample(calls, 0.0, run, idle=True).us

    def _waits(self, kernel: str) -> bool:
        """Whether a kernel waits for the device."""
        return self._late[kernel] >= _LATE_SAMPLES

    def parts(self, kernel: str) -> list[tuple[float, float]] | None:
        """What a call of a kernel took the host and the device, in each sample so far; ``None`` for one that waits, so
        that its time is both in turn, and in a graph."""
        return None if self._waits(kernel) or self._mode == "graph" else self._sides.get(kernel, [])

    def _sample(
        self,
        calls: int,
        lead_us: float,
        run: Callable[[Callable[[], None], Callable[[], float]], None],
        idle: bool = False,
    ) -> _Sample:
        """Calls made while the device is at work, for so long at least, so that it never waits for one of them; or each
        made when the device is idle."""
        import torch

        begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(calls)] for _ in range(2))  # type: ignore[no-untyped-call]
        first, last = iter(begins), iter(ends)
        host: list[float] = []
        begun = 0.0

        def before() -> None:
            nonlocal begun
            self._flushed.zero_()
            if idle:
                torch.cuda.synchronize()
            next(first).record()
            begun = time.perf_counter()

        def after() -> float:
            host.append((time.perf_counter() - begun) * 1e6)
            next(last).record()
            return 0.0

        share = 1.0
        if lead_us:
            # One thing that takes long: a queue that is full makes the host wait.
            torch.cuda._sleep(round((lead_us + _PACE_US) * self._clock()))  # type: ignore[no-untyped-call]
            share = _PACE.share(self._now_us())
        queued = time.perf_counter()
        run(before, after)
        all_us = (time.perf_counter() - queued) * 1e6
        kept_busy = not begins[0].query()  # type: ignore[no-untyped-call]
        ends[-1].synchronize()
        device = [float(begin.elapsed_time(end)) * 1e3 for begin, end in zip(begins, ends, strict=True)]
        return _Sample(share * _undisturbed(host), statistics.median(device), all_us, kept_busy)

    def _now_us(self) -> float:
        """What the host takes at the moment for something small: in a row, as what a kernel leaves of its caches differs."""
        times = []
        for _ in range(_PACE_CALLS):
            begun = time.perf_counter()
            self._small.zero_()
            times.append((time.perf_counter() - begun) * 1e6)
        return _undisturbed(times)

    def _clock(self) -> float:
        """Cycles in a microsecond, at most: where the device is slower than that, it is busy for longer."""
        import torch

        if not self._cycles_per_us:
            times = []
            for _ in range(_CLOCK_TRIES):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
                end.record()
                end.synchronize()
                times.append(float(begin.elapsed_time(end)) * 1e3)
            self._cycles_per_us = _CYCLES / max(min(times), 1.0)
        return self._cycles_per_us

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
        # Imported here: proofs make inputs as measurements do, and are a module beside this package.
        from layerzero.graphs import CudaGraphs, limits

        if kernel not in self._graphs:
            on = CudaGraphs(self._device.index)
            on.warm(lambda: self._subject.run(kernel), limits().warmups)
            self._graphs[kernel] = on.capture(lambda: self._subject.run(kernel))
        return self._graphs[kernel][0]


def _undisturbed(times: list[float]) -> float:
    """The lower quartile: a host is often kept from its work, and never helped."""
    return sorted(times)[len(times) // 4]


class _Sample(NamedTuple):
    """What some calls took, each, in microseconds."""

    host_us: float
    device_us: float
    all_us: float
    """What the host took for all of them, flushes and events included."""
    kept_busy: bool
    """Whether the device was still at work on what came before when the last call was made."""

    @property
    def us(self) -> float:
        return max(self.host_us, self.device_us)


def _repeat(calls: int, before: Callable[[], None], call: Callable[[], Any], after: Callable[[], float]) -> None:
    for _ in range(calls):
        before()
        call()
        after()
