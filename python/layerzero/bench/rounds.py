"""Interleaved rounds: everything is timed in turn, many times, so that a noisy machine is noisy for all."""

from __future__ import annotations

import gc
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping

Call = Callable[[], object]


def _loop(call: Call, count: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of ``count`` calls."""
    repeat = range(count)
    begin = clock()
    for _ in repeat:
        call()
    return clock() - begin


def _threads(call: Call, count: int, threads: int) -> float:
    """Seconds of ``count`` calls in each of several threads that start together."""
    ready = threading.Barrier(threads + 1)

    def work() -> None:
        ready.wait()
        _loop(call, count)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    begin = time.perf_counter()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begin


def interleaved(
    calls: Mapping[str, Call],
    *,
    rounds: int,
    count: int,
    threads: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Microseconds per call of each, by round. ``clock``: of one thread, ``time.thread_time`` leaves out what others took.

    Every round has an order of its own, the same in every run: whoever always followed the same call would always find
    the caches as that one left them.
    """
    names = list(calls)
    orders = random.Random(0)
    for call in calls.values():
        _loop(call, count // 10 + 1)
    times: dict[str, list[float]] = {name: [] for name in names}
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in orders.sample(names, len(names)):
                call = calls[name]
                seconds = _loop(call, count, clock) if threads == 1 else _threads(call, count, threads)
                times[name].append(seconds / (count * threads) * 1e6)
    finally:
        if enabled:
            gc.enable()
    return times


def difference(times: Mapping[str, list[float]], a: str, b: str) -> float:
    """The median over rounds of ``a`` minus ``b``: both were timed a moment apart."""
    return statistics.median(x - y for x, y in zip(times[a], times[b], strict=True))
