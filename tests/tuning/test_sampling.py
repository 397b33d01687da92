"""Sampled calls are timed by events: with events that pass out of order, never, or raise."""

from __future__ import annotations

import threading
from typing import Any

from layerzero import device_times


class Events:
    """Events of a device that is made up: each passes when it is told to."""

    def __init__(self, attends: bool = True) -> None:
        self.recorded = 0
        self.reused: list[int] = []
        self.asked_by: set[str] = set()
        self.at_us: dict[int, float] = {}
        self.broken: set[int] = set()
        self._attends = attends

    def attend(self) -> bool:
        return self._attends

    def mark(self, device: int) -> int:
        if device < 0:
            raise RuntimeError("no such device")
        self.recorded += 1
        return self.recorded

    def passed(self, mark: int) -> bool:
        self.asked_by.add(threading.current_thread().name)
        if mark in self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return mark in self.at_us

    def between_us(self, begin: int, end: int) -> float:
        return self.at_us[end] - self.at_us[begin]

    def reuse(self, mark: int) -> None:
        self.reused.append(mark)


class Clock:
    """Seconds, as they are set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def followed(most: int = device_times.MOST) -> tuple[device_times.Follower, Events, Clock, list[Any]]:
    """Somebody who follows calls, one round at a time, with what was handed on."""
    events, clock = Events(), Clock()
    return device_times.Follower(events, most=most, clock=clock, polls=False), events, clock, []


def span(follower: device_times.Follower) -> tuple[Any, Any]:
    """A call between two marks."""
    return follower.mark(0), follower.mark(0)


def test_times_are_handed_on_as_events_pass_in_any_order() -> None:
    follower, events, _, told = followed()
    spans = [span(follower) for _ in range(3)]
    for at, one in enumerate(spans):
        assert follower.follow([one], lambda times, at=at: told.append((at, times)))  # type: ignore[misc]
    assert follower.poll() == 0 and told == [], "nothing has passed, and nobody waits"
    # The last one passes first; of the first only the beginning.
    events.at_us = {5: 100.0, 6: 107.5, 1: 50.0}
    assert follower.poll() == 1 and told == [(2, [7.5])]
    events.at_us |= {2: 53.0, 3: 60.0, 4: 61.0}
    assert follower.poll() == 2 and told[1:] == [(0, [3.0]), (1, [1.0])]
    assert follower.poll() == 0 and sorted(events.reused) == [1, 2, 3, 4, 5, 6]


def test_two_kernels_of_one_call_are_timed_together() -> None:
    follower, events, _, told = followed()
    served, other = span(follower), span(follower)
    assert follower.follow([served, other], told.append)
    events.at_us = {1: 0.0, 2: 10.0, 3: 20.0}
    assert follower.poll() == 0, "the other one is still under way"
    events.at_us[4] = 50.0
    assert follower.poll() == 1 and told == [[10.0, 30.0]]


def test_an_event_that_never_passes_is_given_up() -> None:
    follower, events, clock, told = followed(most=1)
    assert follower.follow([span(follower)], told.append)
    clock.now = device_times.PATIENCE_S - 1.0
    assert follower.poll() == 0
    assert follower.mark(0) is None and follower.dropped == 1, "the queue is full"
    clock.now = device_times.PATIENCE_S
    assert follower.poll() == 1 and told == [None]
    assert events.reused == [], "an event that may still pass is not used again"
    assert follower.mark(0) is not None, "there is room again"


def test_an_event_that_raises_costs_its_own_call_alone() -> None:
    follower, events, _, told = followed()
    first, second = span(follower), span(follower)
    follower.follow([first], lambda times: told.append(("first", times)))
    follower.follow([second], lambda times: told.append(("second", times)))
    events.broken, events.at_us = {1}, {3: 0.0, 4: 2.0}
    assert follower.poll() == 2 and told == [("first", None), ("second", [2.0])]


def test_who_is_told_may_raise() -> None:
    follower, events, _, told = followed()
    first, second = span(follower), span(follower)
    follower.follow([first], lambda _: 1 / 0)
    follower.follow([second], told.append)
    events.at_us = dict.fromkeys((1, 2, 3, 4), 0.0)
    assert follower.poll() == 2 and told == [[0.0]]


def test_a_full_queue_drops_and_a_mark_that_fails_is_none() -> None:
    follower, _, _, told = followed(most=2)
    spans = [span(follower) for _ in range(3)]
    assert [follower.follow([one], told.append) for one in spans] == [True, True, False]
    assert follower.dropped == 1
    assert follower.mark(-1) is None, "a call does not fail because it cannot be timed"
    assert not follower.follow([(None, 1)], told.append)


def test_a_thread_of_its_own_asks() -> None:
    events, passed = Events(), threading.Event()
    follower = device_times.Follower(events)
    one = span(follower)
    events.at_us = {1: 0.0, 2: 4.0}
    told: list[Any] = []

    def done(times: list[float] | None) -> None:
        told.append(times)
        passed.set()

    assert follower.follow([one], done)
    assert passed.wait(60.0) and told == [[4.0]]
    assert events.asked_by == {"layerzero-sampling"}
    follower.stop()
    assert follower.mark(0) is None and not follower.follow([one], told.append)


def test_where_asking_would_break_captures_nothing_is_timed() -> None:
    over = threading.Event()
    told: list[Any] = []
    follower = device_times.Follower(Events(attends=False))

    def done(times: list[float] | None) -> None:
        told.append(times)
        over.set()

    follower.follow([span(follower)], done)
    assert over.wait(60.0) and told == [None]
    assert follower.mark(0) is None
