"""Timing on a GPU, against one that is made up: a queue with a clock of its own. Kernels that wait for the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from layerzero.tuning import timing

CALLS = 5
#: What filling the cache takes on the device, and what queueing anything takes on the host, in microseconds.
FLUSH_US, QUEUE_US = 100.0, 2.0
CYCLES_PER_US = 1980.0


class Device:
    """A host and a device that works off what the host queues, each with its time, in microseconds."""

    def __init__(self) -> None:
        self.host, self.done, self.flushes, self.slept = 0.0, 0.0, 0, 0.0
        #: How many times as long as usual the host takes for anything.
        self.slow = 1.0

    def work(self, takes: float) -> None:
        """The host does something."""
        self.host += self.slow * takes

    def queue(self, takes: float) -> None:
        """The device begins when it is done with what came before."""
        self.work(QUEUE_US)
        self.done = max(self.done, self.host) + takes

    def synchronize(self) -> None:
        """The host waits."""
        self.host = max(self.host, self.done)

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def flush(self) -> None:
        """What the timer fills the cache with."""
        self.flushes += 1
        self.queue(FLUSH_US)

    def sleep(self, cycles: int) -> None:
        """What keeps the device busy."""
        self.slept += cycles / CYCLES_PER_US
        self.queue(cycles / CYCLES_PER_US)


class Event:
    """A place in the queue."""

    def __init__(self, device: Device) -> None:
        self._device, self._at = device, 0.0

    def record(self) -> None:
        self._at = max(self._device.done, self._device.host)

    def query(self) -> bool:
        return self._at <= self._device.host

    def synchronize(self) -> None:
        self._device.host = max(self._device.host, self._at)

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) / 1e3


class Subject:
    """Kernels by name, called as the native subject calls them."""

    def __init__(self, kernels: dict[str, Callable[[], None]]) -> None:
        self._kernels = kernels

    def time_between(self, kernel: str, calls: int, before: Callable[[], None], after: Callable[[], float]) -> None:
        for _ in range(calls):
            before()
            self._kernels[kernel]()
            after()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device that stands for torch's."""
    made = Device()
    cuda = SimpleNamespace(
        Event=made.event,
        synchronize=made.synchronize,
        _sleep=made.sleep,
        device=lambda _: nullcontext(),
        get_device_properties=lambda _: SimpleNamespace(L2_cache_size=1 << 20),
    )
    filled, small = SimpleNamespace(zero_=made.flush), SimpleNamespace(zero_=lambda: made.queue(1.0))
    torch = SimpleNamespace(
        cuda=cuda,
        device=lambda *_: "cuda:0",
        empty=lambda size, **_: filled if size > 1 else small,
        int8=None,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: made.host / 1e6))
    monkeypatch.setattr(timing, "_PACE", timing.Pace())
    return made


def timed(device: Device, host_us: float, device_us: float, waits: bool) -> timing.CudaTimer:
    """What times a kernel that takes so long on either side."""

    def kernel() -> None:
        device.work(host_us)
        device.queue(device_us)
        if waits:
            device.synchronize()

    subject: Any = Subject({"kernel": kernel})
    return timing.CudaTimer(subject, 0, "eager")


def timer(device: Device, host_us: float, device_us: float, waits: bool) -> Callable[[], float]:
    """Times it."""
    made = timed(device, host_us, device_us, waits)
    return lambda: made.time("kernel", CALLS)


@pytest.mark.parametrize(("host_us", "device_us"), [(20.0, 50.0), (300.0, 5.0), (1.0, 3000.0)])
def test_a_kernel_that_waits_waits_for_its_own_work_alone(device: Device, host_us: float, device_us: float) -> None:
    time = timer(device, host_us, device_us, waits=True)
    for _ in range(3):
        # Both in turn; neither what was queued before it nor the filling of the cache is its own.
        assert time() == pytest.approx(host_us + QUEUE_US + device_us)


def test_that_it_waits_is_found_out_once(device: Device) -> None:
    time = timer(device, 20.0, 50.0, waits=True)
    time()
    time()
    assert device.slept > 16000.0, "it is given more and more of a lead before it is said to wait"
    flushes, slept = device.flushes, device.slept
    time()
    seen = device.flushes, device.slept
    assert seen == (flushes + CALLS, slept), "then each call has its cache filled, and nothing else is queued"


@pytest.mark.parametrize(
    ("host_us", "device_us", "took_us"),
    [(20.0, 50.0, 50.0), (20.0, 5.0, 22.0), (600.0, 5.0, 602.0), (600.0, 700.0, 700.0)],
)
def test_one_that_does_not_wait_takes_what_the_slower_side_takes(
    device: Device, host_us: float, device_us: float, took_us: float
) -> None:
    time = timer(device, host_us, device_us, waits=False)
    for _ in range(3):
        assert time() == pytest.approx(took_us)


def test_a_slow_host_is_given_more_lead_and_not_said_to_wait(device: Device) -> None:
    # Five calls of it take three milliseconds: longer than the first lead, and not longer than the next.
    time = timer(device, 600.0, 5.0, waits=False)
    time()
    before = device.slept
    time()
    assert device.slept - before >= CALLS * 600.0, "the device is kept busy for as long as the host takes"


@pytest.mark.parametrize(("host_us", "device_us"), [(20.0, 50.0), (600.0, 5.0)])
def test_what_it_took_the_host_and_the_device_is_told_apart(device: Device, host_us: float, device_us: float) -> None:
    made = timed(device, host_us, device_us, waits=False)
    assert made.parts("kernel") == []
    for _ in range(3):
        made.time("kernel", CALLS)
    parts = made.parts("kernel")
    assert parts is not None and len(parts) == 3
    assert all(part == pytest.approx((host_us + QUEUE_US, device_us)) for part in parts)


def test_one_that_waits_has_no_parts(device: Device) -> None:
    made = timed(device, 20.0, 50.0, waits=True)
    for _ in range(2):
        made.time("kernel", CALLS)
    assert made.parts("kernel") is None


def test_one_bad_sample_does_not_make_a_kernel_wait(device: Device) -> None:
    made = timed(device, 20.0, 50.0, waits=False)
    # Something else keeps the host from its work for as long as the device is at work: memory that it waits for, say.
    late, queue = 4 * CALLS, device.queue

    def slow(takes: float) -> None:
        nonlocal late
        queue(takes)
        if takes == 50.0 and late:
            late -= 1
            device.synchronize()

    device.queue = slow  # type: ignore[method-assign]
    first = made.time("kernel", CALLS)
    assert first == pytest.approx(20.0 + QUEUE_US + 50.0), "one after the other"
    for _ in range(3):
        assert made.time("kernel", CALLS) == pytest.approx(50.0)
    assert len(made.parts("kernel") or ()) == 3


def test_a_moment_in_which_the_host_is_kept_from_its_work_is_not_the_kernels_doing(device: Device) -> None:
    # While the device's clock is looked at, and in one call of each sample.
    queue, queued = device.queue, 0

    def slow(takes: float) -> None:
        nonlocal queued
        queued += 1
        device.host += 1e4 if queued == 5 else 300.0 if queued % CALLS == 0 else 0.0
        queue(takes)

    device.queue = slow  # type: ignore[method-assign]
    made = timed(device, 20.0, 50.0, waits=False)
    for _ in range(3):
        assert made.time("kernel", CALLS) == pytest.approx(50.0)
    parts = made.parts("kernel")
    assert parts is not None and all(part == pytest.approx((20.0 + QUEUE_US, 50.0)) for part in parts)


@pytest.mark.parametrize(
    ("device_us", "waits", "calls"),
    [(50.0, False, 4), (50.0, True, 4), (4000.0, False, 4), (6000.0, False, 3), (30_000.0, False, 2)],
)
def test_what_is_cold_in_the_host_after_another_kernel_is_not_the_kernels_doing(
    device: Device, device_us: float, waits: bool, calls: int
) -> None:
    called: list[str] = []

    def kernel(name: str) -> None:
        device.host += 20.0 if called[-1:] == [name] else 200.0
        called.append(name)
        device.queue(device_us)
        if waits:
            device.synchronize()

    subject: Any = Subject({name: partial(kernel, name) for name in ("one", "other")})
    made = timing.CudaTimer(subject, 0, "eager")
    times = []
    for _ in range(3):
        made.time("other", 1)
        called.clear()
        times.append(made.time("one", 1))
    # What takes very long is not made more often than it must be for the host's sake.
    assert called == calls * ["one"], "the last sample"
    host_us = 20.0 + QUEUE_US
    assert times[1:] == pytest.approx(2 * [host_us + device_us if waits else device_us])
    if not waits:
        assert [host for host, _ in made.parts("one") or ()] == pytest.approx(3 * [host_us])


def test_a_host_that_is_slow_for_a_while_is_not_the_kernels_doing(device: Device) -> None:
    made = timed(device, 40.0, 20.0, waits=False)
    paces = [1.7, 1.0, 1.6, 1.0, 1.3]
    times = []
    for device.slow in paces:
        times.append([made.time("kernel", CALLS) for _ in range(30)])
    # Nobody knows at first that it is slow; later, whatever it is, it is what it was at its best.
    assert times[0] == pytest.approx(30 * [1.7 * (40.0 + QUEUE_US)])
    for later in times[2:]:
        assert later == pytest.approx(30 * [40.0 + QUEUE_US])
    # The device's time is as it is.
    assert [took for _, took in made.parts("kernel") or ()] == pytest.approx(150 * [20.0])


def test_what_a_kernel_leaves_in_the_hosts_caches_is_not_the_hosts_pace(device: Device) -> None:
    # What the host does right after one of them takes it three times as long, once.
    cold, work = False, device.work

    def worked(takes: float) -> None:
        nonlocal cold
        cold, was_cold = False, cold
        work(3.0 * takes if was_cold else takes)

    def kernel(empties: bool) -> None:
        nonlocal cold
        device.work(40.0)
        device.queue(20.0)
        cold = empties

    device.work = worked  # type: ignore[method-assign]
    subject: Any = Subject({"light": partial(kernel, False), "heavy": partial(kernel, True)})
    made = timing.CudaTimer(subject, 0, "eager")
    times = [[made.time(name, CALLS) for name in ("light", "heavy")] for _ in range(40)]
    # The kernel itself begins with queueing an event, and is not cold.
    assert times == pytest.approx(np.full((40, 2), 40.0 + QUEUE_US))


def test_the_pace_is_that_of_something_done_over_and_over(device: Device) -> None:
    made: Any = timed(device, 40.0, 20.0, waits=False)
    # The first few find the caches as others left them.
    takes = iter([9.0, 4.0, 3.0, *9 * [2.0]])
    made._small = SimpleNamespace(zero_=lambda: device.work(next(takes)))
    assert made._now_us() == pytest.approx(2.0)


def test_a_host_that_is_lucky_once_does_not_set_the_pace() -> None:
    pace = timing.Pace()
    some = [3.0 if number % 3 == 0 else 6.0 for number in range(40)]
    assert [pace.share(us) for us in some] == 40 * [1.0]
    assert pace.share(9.0) == pytest.approx(6.0 / 9.0)
    # It may get faster for good.
    for _ in range(25):
        pace.share(4.0)
    assert pace.share(8.0) == 0.5
    assert pace.share(2.0) == 1.0, "faster than ever is what it is"


def test_what_waits_for_the_device_is_not_set_right_by_the_hosts_pace(device: Device) -> None:
    made = timed(device, 40.0, 500.0, waits=True)
    made.time("kernel", CALLS)
    quick = made.time("kernel", CALLS)
    device.slow = 2.0
    assert made.time("kernel", CALLS) == pytest.approx(quick + 40.0 + QUEUE_US)
