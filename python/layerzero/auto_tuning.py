"""Measuring in the background what a process calls: the setting ``perfdb.auto_tune``.

One daemon thread measures the calls this process makes that are not in the performance database yet, and measures a call
again when its live latency has drifted. It never runs on a caller's thread. It starts when no call was made for
:data:`IDLE_S` and stops before the next sample when a call is made. Two settings limit it: ``perfdb.auto_tune_budget_s``
seconds of measuring per process, and ``perfdb.auto_tune_share`` percent of the time. Results go into the database and into
the next decisions, as if you had called :func:`layerzero.tune`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from layerzero import _native, fingerprints
from layerzero.control import setting
from layerzero.documents import to_json
from layerzero.errors import LayerZeroError
from layerzero.events import log
from layerzero.kernel_runs import beside_captures
from layerzero.lifecycle import start_thread, waited_for
from layerzero.results import KeyedResult, Result, Rows, rows

#: Seconds without a call before a measurement starts.
IDLE_S = 0.1
#: Budget of one measurement of one call, in seconds.
SLICE_S = 2.0
#: Seconds between two checks for drifted latencies.
LOOK_S = 60.0
#: Attempts at a call before the other calls come first.
ATTEMPTS = 5
#: Lower bound of any latency, in microseconds: a tiny call costs its launch, not its memory traffic.
LEAST_US = 1.0
#: Bandwidth and rate assumed for a device whose own figures are unknown: 10 GB/s, 100 GFLOP/s. They only order the calls.
BYTES_PER_US, FLOPS_PER_US = 1e4, 1e5

_INFO = 20


@dataclass(frozen=True, slots=True, repr=False)
class AutoTunedCall(KeyedResult):
    """A call the auto-tuner looked at."""

    call: dict[str, Any]
    """The call, as it is written down."""
    device: str
    """Where it is made."""
    chosen: str | None = None
    """The kernel that serves it now."""
    why: str | None = None
    """Why it cannot be measured."""


@dataclass(frozen=True, slots=True, repr=False)
class AutoTuneStatus(Result):
    """What the auto-tuner did so far."""

    measured: Rows[AutoTunedCall] = field(default_factory=lambda: rows((), "calls"))
    """Calls that were measured, with the kernel that serves each."""
    impossible: Rows[AutoTunedCall] = field(default_factory=lambda: rows((), "calls"))
    """Calls that cannot be measured, each with why."""
    interrupted: int = 0
    """How often a caller came while a call was being measured."""
    spent_s: float = 0.0
    """Seconds spent measuring."""
    waiting: bool = False
    """Whether anything is still to be measured within the budget."""


@dataclass
class _Status:
    """The same while it goes on."""

    measured: list[AutoTunedCall] = field(default_factory=list)
    impossible: list[AutoTunedCall] = field(default_factory=list)
    interrupted: int = 0
    spent_s: float = 0.0
    waiting: bool = False

    def now(self) -> AutoTuneStatus:
        """What is so far."""
        measured, impossible = rows(self.measured, "calls"), rows(self.impossible, "calls")
        return AutoTuneStatus(measured, impossible, self.interrupted, self.spent_s, self.waiting)


#: A call as it is written down, and its device.
_Kind = tuple[str, str]


class _Tuner:
    """The thread, and what it did."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False
        #: Moves when a call of a new kind was decided.
        self._asked = 0
        self._seen = 0
        self._settled: set[_Kind] = set()
        self._begun: dict[_Kind, int] = {}
        #: Lower bounds of latencies, in microseconds.
        self._floors: dict[_Kind, float] = {}
        self.status = _Status()

    def wake(self) -> None:
        """A call of a new kind was decided."""
        with self._changed:
            self._asked += 1
            if self._stopped:
                return
            if self._thread is None:
                self._thread = start_thread(self._run, "layerzero-tune")
            self.status.waiting = self._thread is not None
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the thread. A measurement stops before its next sample."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def idle(self, timeout: float | None = None) -> bool:
        """Waits until everything that was called is measured, or nothing more may be; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.status.waiting, timeout)

    def _pause(self, seconds: float) -> bool:
        """Waits. Whether to go on after it."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, seconds)
            return not self._stopped

    def _wait_for_work(self) -> bool:
        with self._changed:
            if self._seen == self._asked:
                self.status.waiting = False
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopped or self._seen != self._asked, LOOK_S)
            self._seen = self._asked
            return not self._stopped

    def _run(self) -> None:
        while self._wait_for_work():
            while self._may_go_on():
                # Choosing is work too: it is done when nobody calls.
                if not self._wait_until_nobody_calls():
                    return
                drifted = self._drifted()
                kind = drifted or self._most_important()
                if kind is None:
                    break
                spent = self._measure(*kind, again=drifted is not None)
                # At a share of 5%, a second of measuring is followed by 19 of rest.
                if not self._pause(spent * (100 / setting("perfdb.auto_tune_share") - 1)):
                    return

    def _may_go_on(self) -> bool:
        """Whether it is still wanted and within the budget."""
        wanted = setting("perfdb.auto_tune") and setting("perfdb.enabled")
        return bool(wanted) and self.status.spent_s < setting("perfdb.auto_tune_budget_s")

    def _drifted(self) -> _Kind | None:
        """A call whose live latency has drifted from its measurement."""
        for entry in json.loads(_native.health()[0])["drifted"]:
            kind = (to_json(entry["call"]), _native.device_name(entry["device"]))
            if self._begun.get(kind, 0) < ATTEMPTS:
                return kind
        return None

    def _most_important(self) -> _Kind | None:
        """The unmeasured call with the largest total time, estimated as its count × the lower bound of its latency. Calls
        that were interrupted :data:`ATTEMPTS` times come last."""
        best: tuple[tuple[bool, float], _Kind] | None = None
        for entry in json.loads(_native.manifest()):
            kind = (to_json(entry["call"]), entry["device"])
            if kind in self._settled:
                continue
            if kind not in self._floors:
                self._floors[kind] = LEAST_US + _floor_us(*kind)
            weight = (self._begun.get(kind, 0) < ATTEMPTS, entry["count"] * self._floors[kind])
            if best is None or weight > best[0]:
                best = (weight, kind)
        return None if best is None else best[1]

    def _wait_until_nobody_calls(self) -> bool:
        """Waits until no call was made for a while. Whether to go on."""
        before = _native.calls_made()
        while self._pause(IDLE_S):
            now = _native.calls_made()
            if now == before:
                return True
            before = now
        return False

    def _measure(self, call: str, device: str, *, again: bool) -> float:
        """Measures a call, unless somebody calls meanwhile. Gives the seconds it took."""
        left = setting("perfdb.auto_tune_budget_s") - self.status.spent_s
        calls = _native.calls_made()
        came = False

        def stop() -> bool:
            nonlocal came
            came = came or _native.calls_made() != calls
            return came or self._stopped

        begun = time.perf_counter()
        try:
            report = _measured(call, device, min(SLICE_S, left), again, stop)
        except Exception as error:  # noqa: BLE001
            # Whatever it is, the next call is measured, and no caller has anything to do with it.
            report = {"tuned": [], "impossible": [[None, f"{type(error).__name__}: {error}"]], "known": 0}
        spent = time.perf_counter() - begun
        self.status.spent_s += spent
        self._settle((call, device), report, came)
        return spent

    def _settle(self, kind: _Kind, report: dict[str, Any], came: bool) -> None:
        call, device = kind
        self._begun[kind] = self._begun.get(kind, 0) + 1
        told = AutoTunedCall(json.loads(call), device)
        self.status.interrupted += came
        found = report["tuned"] or report["impossible"] or report["known"]
        if came or (not found and self._begun[kind] < ATTEMPTS):
            # What was found out so far is kept; the rest comes when there is time again.
            return
        self._settled.add(kind)
        for tuned in report["tuned"]:
            self.status.measured.append(replace(told, chosen=tuned["chosen"]))
            text = f"{tuned['label']} was measured in the background: {tuned['chosen']} serves it"
            said = {"call": told.call, "device": device, "chosen": tuned["chosen"]}
            log("auto_tuned", _INFO, text, to_json(said), setting("verbose"))
        for _, why in report["impossible"]:
            self.status.impossible.append(replace(told, why=why))


def _floor_us(call: str, device: str) -> float:
    """Lower bound of a call's latency in microseconds: max(bytes / bandwidth, operations / rate)."""
    try:
        report = json.loads(_native.explain_call(call, _native.device_number(device))[0])
    except (LayerZeroError, ValueError):
        return 0.0
    if report["floor_us"]:
        return float(report["floor_us"])
    return float(max(report["bytes"] / BYTES_PER_US, report["flops"] / FLOPS_PER_US))


@waited_for
def _measured(call: str, device: str, seconds: float, again: bool, stop: Callable[[], bool]) -> dict[str, Any]:
    number = _native.device_number(device)
    request = {"calls": [json.loads(call)], "device": number}
    samples = int(setting("perfdb.tune_samples"))
    with beside_captures(number):
        answer = _native.measure(to_json(request), max(seconds, 0.01), samples, again, 0, False, None, stop)
    fingerprints.measured()
    report: dict[str, Any] = json.loads(answer)
    return report


_tuner = _Tuner()


def wake() -> None:
    """A call of a new kind was decided."""
    _tuner.wake()


def stop() -> None:
    """Ends the thread: the program is ending."""
    _tuner.stop()


def auto_tune_status(wait: float | None = 0.0) -> AutoTuneStatus:
    """What ``perfdb.auto_tune`` did so far. ``wait``: how many seconds to wait for the calls made so far to be measured;
    ``None`` waits until they are, or until the budget is spent."""
    _tuner.idle(wait)
    return _tuner.status.now()


def _forked() -> None:
    """In a child: the thread is the parent's. The next call of a new kind starts one."""
    global _tuner
    _tuner = _Tuner()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
