"""Measuring in the background: what is called is measured, never on the thread of a caller, within its limits."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import _native, auto_tuning
from layerzero.auto_tuning import auto_tune_status

pytestmark = pytest.mark.usefixtures("restored")

#: The sizes of the calls that are made here.
OWN = [[2, width] for width in (41, 43, 47, 53, 59, 67, 71)]
#: How long anything that is waited for may take, in seconds.
PATIENCE = 60


@pytest.fixture(autouse=True)
def fresh_tuner(restored: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A database of its own, and a tuner that did nothing yet."""
    monkeypatch.setattr(auto_tuning, "_tuner", auto_tuning._Tuner())
    manifest = _native.manifest

    def made_here() -> str:
        """Calls of this file: tests before it made thousands of others."""
        entries = [e for e in json.loads(manifest()) if e["call"]["op"] == "activation.gelu"]
        return json.dumps([e for e in entries if e["call"]["tensors"]["input"]["shape"] in OWN])

    monkeypatch.setattr(_native, "manifest", made_here)
    lz.configure(perfdb={"path": str(tmp_path / "perfdb.sqlite")})
    yield
    auto_tuning.stop()
    # What was measured here decides nothing in the tests after it.
    lz.configure(perfdb={"path": str(tmp_path / "none" / "perfdb.sqlite")})
    _native.learn()


def call(width: int) -> None:
    """A kind of call that was not made before."""
    lz.gelu(torch.ones(2, width))


def measured_widths(status: auto_tuning.AutoTuneStatus) -> list[int]:
    calls = [told.call["tensors"] for told in status.measured if told.call["op"] == "activation.gelu"]
    return [tensors["input"]["shape"][-1] for tensors in calls]


def on(**more: Any) -> None:
    """Switched on, with no rest between two calls."""
    lz.configure(perfdb={"auto_tune": True, "auto_tune_share": 100, "tune_samples": 1, **more})


def test_off_by_default() -> None:
    call(41)
    assert auto_tuning._tuner._thread is None
    assert auto_tune_status() == auto_tuning.AutoTuneStatus()


def test_what_is_called_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    measure = _native.measure

    def noted(*arguments: Any) -> str:
        threads.add(threading.current_thread().name)
        return measure(*arguments)

    monkeypatch.setattr(_native, "measure", noted)
    on()
    call(43)
    status = auto_tune_status(wait=PATIENCE)
    assert 43 in measured_widths(status) and not status.waiting
    assert threads == {"layerzero-tune"}, "never on the thread of a caller"
    # What was found out is in force, and kept.
    assert lz.health().perfdb["known"] > 0
    report = lz.explain("gelu", torch.ones(2, 43))
    assert any(candidate.time_basis == "measured" for candidate in report.candidates)
    # It is not measured again.
    spent = status.spent_s
    call(43)
    assert auto_tune_status(wait=PATIENCE).spent_s == spent


def test_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_tuning, "SLICE_S", 5.0)
    on(auto_tune_budget_s=1)
    auto_tuning._tuner.status.spent_s = 1.0
    call(47)
    status = auto_tune_status(wait=PATIENCE)
    assert status.measured == [] and status.spent_s == 1.0


def test_a_share_of_the_time_is_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = auto_tuning._tuner
    rests: list[float] = []
    pause = tuner._pause

    def noted(seconds: float) -> bool:
        if seconds != auto_tuning.IDLE_S:
            rests.append(seconds)
            seconds = 0.0
        return pause(seconds)

    monkeypatch.setattr(tuner, "_pause", noted)
    on(auto_tune_share=5)
    call(53)
    status = auto_tune_status(wait=PATIENCE)
    assert sum(rests) == pytest.approx(19 * status.spent_s, rel=1e-6)


def test_a_caller_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls while something is measured has the measuring stop; it is taken up again later."""
    measure, came = _native.measure, threading.Event()

    def interrupted(*arguments: Any) -> str:
        request, seconds, _, *rest, stop = arguments
        if came.is_set() or "[2,59]" not in request.replace(" ", ""):
            # Another test's call, or the second attempt.
            return measure(*arguments)
        came.set()
        asked: list[bool] = []

        def called_at_the_third_sample() -> bool:
            if len(asked) == 3:
                call(59)
            asked.append(stop())
            return asked[-1]

        # More rounds than fit into the budget: only the call ends it.
        report = measure(request, seconds, 10_000, *rest, called_at_the_third_sample)
        assert asked == [False] * 3 + [True]
        return report

    monkeypatch.setattr(_native, "measure", interrupted)
    on()
    call(59)
    status = auto_tune_status(wait=PATIENCE)
    assert status.interrupted == 1
    assert 59 in measured_widths(status)


def test_what_takes_most_time_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(rows: int, count: int) -> dict[str, Any]:
        call = {"op": "activation.gelu", "tensors": {"input": {"dtype": "float32", "shape": [rows, 1024]}}}
        return {"call": call, "device": "cpu", "count": count}

    def first(*entries: dict[str, Any]) -> int:
        monkeypatch.setattr(_native, "manifest", lambda: json.dumps(entries))
        found = auto_tuning._tuner._most_important()
        assert found is not None
        rows: int = json.loads(found[0])["tensors"]["input"]["shape"][0]
        return rows

    assert first(entry(1, 10), entry(100_000, 10)) == 100_000, "the same number of calls, the larger"
    assert first(entry(1, 10_000_000), entry(100_000, 1)) == 1, "often enough, the smaller"
    auto_tuning._tuner._begun = {(json.dumps(entry(1, 0)["call"]), "cpu"): auto_tuning.ATTEMPTS}
    assert first(entry(1, 10_000_000), entry(100_000, 1)) == 100_000, "what is always interrupted comes last"


def test_what_cannot_be_measured_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> str:
        raise RuntimeError("no clock")

    monkeypatch.setattr(_native, "measure", broken)
    on()
    call(67)
    status = auto_tune_status(wait=PATIENCE)
    assert any(told.why == "RuntimeError: no clock" for told in status.impossible)
    call(67)


def test_what_has_drifted_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, health = _native.measure, _native.health
    forced: list[bool] = []

    def noted(request: str, seconds: float, samples: int, force: bool, *rest: Any) -> str:
        forced.append(force)
        return measure(request, seconds, samples, force, *rest)

    def drifted() -> tuple[str, str, bool]:
        document = json.loads(health()[0])
        call = {"op": "activation.gelu", "tensors": {"input": {"dtype": "float32", "shape": [2, 71]}}}
        document["drifted"] = [] if any(forced) else [{"call": call, "device": 0}]
        return json.dumps(document), "", True

    monkeypatch.setattr(_native, "measure", noted)
    monkeypatch.setattr(_native, "health", drifted)
    on()
    call(71)
    status = auto_tune_status(wait=PATIENCE)
    assert forced[0] and 71 in measured_widths(status)
