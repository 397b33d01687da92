"""How long sampled calls take a GPU: events around a call, and a thread that asks whether they have passed.

The thread of the caller records an event before the call and one after it, on the stream the call uses, and never waits:
recording is all it does. A thread of ours polls (`query`) and hands the times on. At most :data:`MOST` calls are followed
at a time; beyond that a call is not timed. Calls inside a capture are never timed.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from layerzero import _native
from layerzero.kernel_runs import OF_THIS_THREAD
from layerzero.lifecycle import start_thread

#: Calls that are followed at a time. Each holds two events, a compared one four.
MOST = 256
#: How long a call is followed before it is given up, in seconds: a device that hangs must not fill the queue for good.
PATIENCE_S = 60.0
#: How long the thread pauses before a round, in seconds: at first, and at most, doubling while nothing passes. Long, so that
#: a round asks about many calls: each takes the interpreter from the callers for a moment.
_PAUSES_S = (0.02, 0.1)

#: The microseconds of each span; ``None`` when they are not known.
Done = Callable[[list[float] | None], object]


class Events(Protocol):
    """What records marks on streams and tells the time between them."""

    def attend(self) -> bool:
        """Called once by the thread that polls, before it does; ``False`` when it must not."""

    def mark(self, device: int) -> Any:
        """Records a mark on the current stream of a device."""

    def passed(self, mark: Any) -> bool:
        """Whether the device has passed a mark. Does not wait."""

    def between_us(self, begin: Any, end: Any) -> float:
        """Microseconds between two marks that have passed."""

    def reuse(self, mark: Any) -> None:
        """Takes back a mark that nobody needs any more."""


class CudaEvents:
    """torch's events. Making one costs more than recording it, so that they are used again."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Any]] = defaultdict(list)

    def attend(self) -> bool:
        """Has the driver allow this thread to ask about events while another thread captures a graph: the default would
        break that capture."""
        return _native.exchange_capture_mode(OF_THIS_THREAD) is not None

    def mark(self, device: int) -> tuple[int, Any]:
        """Records an event on the current stream of a device."""
        import torch

        free = self._free[device]
        event = free.pop() if free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return device, event

    def passed(self, mark: tuple[int, Any]) -> bool:
        """Whether the device has passed it."""
        return bool(mark[1].query())

    def between_us(self, begin: tuple[int, Any], end: tuple[int, Any]) -> float:
        """Microseconds between two events."""
        return float(begin[1].elapsed_time(end[1])) * 1e3

    def reuse(self, mark: tuple[int, Any]) -> None:
        """Keeps an event for the next call."""
        self._free[mark[0]].append(mark[1])


class _Followed(NamedTuple):
    """A call under way."""

    spans: Sequence[tuple[Any, Any]]
    done: Done
    until: float


class Follower:
    """Follows calls until their marks have passed."""

    def __init__(
        self, events: Events, *, most: int = MOST, clock: Callable[[], float] = time.monotonic, polls: bool = True
    ) -> None:
        self._events, self._most, self._clock, self._polls = events, most, clock, polls
        self._waiting: list[_Followed] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._off = False
        #: Calls that were not timed because too many were under way.
        self.dropped = 0

    def mark(self, device: int) -> Any | None:
        """Records a mark on the current stream; ``None`` when no call can be followed now."""
        if self._off or len(self._waiting) >= self._most:
            self.dropped += not self._off
            return None
        try:
            return self._events.mark(device)
        except Exception:  # noqa: BLE001 - a call is not to fail because it cannot be timed
            return None

    def follow(self, spans: Sequence[tuple[Any, Any]], done: Done) -> bool:
        """Hands the time of each span to ``done`` once all have passed. ``False``, and nothing follows, when that cannot be."""
        if any(begin is None or end is None for begin, end in spans):
            return False
        with self._changed:
            if self._off or len(self._waiting) >= self._most or not self._attended():
                self.dropped += 1
                return False
            self._waiting.append(_Followed(spans, done, self._clock() + PATIENCE_S))
            if len(self._waiting) == 1:
                self._changed.notify_all()
        return True

    def poll(self) -> int:
        """One round: hands on what has passed, and gives how many calls that was."""
        over = 0
        for followed in list(self._waiting):
            times: list[float] | None = None
            try:
                passed = all(self._events.passed(mark) for span in followed.spans for mark in span)
                if passed:
                    times = [self._events.between_us(*span) for span in followed.spans]
                elif self._clock() < followed.until:
                    continue
            except Exception:  # noqa: BLE001 - what a broken device says of an event is no time
                passed = False
            over += 1
            with self._changed:
                self._waiting.remove(followed)
            if passed:
                for span in followed.spans:
                    for mark in span:
                        self._events.reuse(mark)
            try:
                followed.done(times)
            except Exception:  # noqa: BLE001, S110 - the next one is to be told
                pass
        return over

    def stop(self) -> None:
        """Ends the thread: the program is ending. What is under way is not timed."""
        with self._changed:
            self._off = True
            self._waiting.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _attended(self) -> bool:
        """Whether the thread is there, or could be started."""
        if self._thread is None and self._polls:
            self._thread = start_thread(self._run, "layerzero-sampling")
        return self._thread is not None or not self._polls

    def _run(self) -> None:
        if not self._events.attend():
            self._give_up()
            return
        pause = _PAUSES_S[0]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._off)
                self._changed.wait_for(lambda: self._off, pause)
                if self._off:
                    return
            pause = _PAUSES_S[0] if self.poll() else min(2 * pause, _PAUSES_S[1])

    def _give_up(self) -> None:
        """Nothing can be followed in this process."""
        with self._changed:
            self._off = True
            waiting, self._waiting = self._waiting, []
        for followed in waiting:
            followed.done(None)


_follower = Follower(CudaEvents())


def mark(device: int) -> Any | None:
    """As :meth:`Follower.mark`, for the native side."""
    return _follower.mark(device)


def follow(spans: Sequence[tuple[Any, Any]], done: Done) -> bool:
    """As :meth:`Follower.follow`, for the native side."""
    return _follower.follow(spans, done)


def stop() -> None:
    """Ends the thread: the program is ending."""
    _follower.stop()


def _forked() -> None:
    """In a child: the thread is the parent's, and its events are of a context that a child cannot use."""
    global _follower
    _follower = Follower(CudaEvents())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
