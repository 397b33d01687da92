"""Rollouts: a shadow never affects an answer, a canary serves its share, and both go when they are no good."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
from faults.states import breaker, events, fresh, last_event
from processes import SUPPORT, forked
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
GIVEN: dict[str, Any] = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}


def right(x: Tensor) -> Tensor:
    """What rms_norm gives."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Kernels:
    """A kernel that serves and one that is tried; both note what they do."""

    def __init__(self) -> None:
        self.served: list[Tensor] = []
        self.tried = 0
        self.trying: Callable[[Tensor], Any] = right

        @lz.register_kernel(kernel_id="steady.norm", priority=90, **GIVEN)
        def steady(input: Tensor, eps: float) -> Tensor:
            self.served.append(right(input))
            return self.served[-1]

        @lz.register_kernel(kernel_id="fresh.norm", priority=99, **GIVEN)
        def candidate(input: Tensor, eps: float) -> Any:
            self.tried += 1
            return self.trying(input)

    def calls(self, count: int, x: Tensor = X) -> None:
        """Calls that the steady one serves: its very object is the answer."""
        for _ in range(count):
            result = lz.rms_norm(x)
            assert result is self.served[-1] and torch.equal(result, right(x))


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    """Both kernels, for a test."""
    fresh()
    yield Kernels()
    lz.unregister_kernel("steady.norm")
    lz.unregister_kernel("fresh.norm")
    fresh()


def roll_out(mode: str, **more: Any) -> None:
    """Tries the candidate in a rollout."""
    rollout = {"name": "trial", "operation": "rms_norm", "candidate": "fresh.norm", "mode": mode, "fraction": 1.0}
    # Every call is looked at. Time is another matter: these kernels take none.
    limits = {"min_samples": 5, "max_slowdown": 1000}
    fresh(rollouts=[{**rollout, **limits, **more}], health__sample_every=1, degradation__enabled=False)


def status() -> dict[str, Any]:
    """How the rollout stands."""
    (found,) = lz.health().rollouts
    return found


# --- shadow -----------------------------------------------------------------------------------------------------------


def test_a_shadow_that_agrees_is_healthy_and_serves_nobody(kernels: Kernels) -> None:
    assert torch.equal(lz.rms_norm(X), right(X)) and kernels.tried == 1, "without a rollout it would serve"
    roll_out("shadow")
    kernels.calls(12)
    assert kernels.tried >= 10 and len(kernels.served) == 12
    found = status()
    assert found["verdict"] == {"state": "healthy"} and found["mismatches"] == found["errors"] == 0
    assert found["samples"] == found["compared"] == kernels.tried - 1 and lz.health().well
    assert "rollout trial: fresh.norm runs beside 100% of norm.rms; healthy" in str(lz.health())
    candidates = {c.kernel_id: c for c in lz.explain("rms_norm", X).candidates}
    assert not candidates["fresh.norm"].accepted and "rollout 'trial'" in candidates["fresh.norm"].reasons[0].message


@pytest.mark.parametrize("fraction", [0.5, 0.25, 0.1])
def test_a_shadow_runs_beside_its_share_of_the_calls(kernels: Kernels, fraction: float) -> None:
    roll_out("shadow", fraction=fraction)
    kernels.calls(201)
    assert abs(kernels.tried - 200 * fraction) <= 1


def _raise(error: BaseException) -> Callable[[Tensor], Any]:
    def kernel(input: Tensor) -> Any:
        raise error

    return kernel


NO_GOOD: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "raises": (_raise(RuntimeError("no")), "error_rate"),
    "out of memory": (_raise(MemoryError("no")), "error_rate"),
    "loses the device": (_raise(RuntimeError("CUDA error: an illegal memory access was encountered")), "error_rate"),
    "none": (lambda input: None, "error_rate"),
    "text": (lambda input: "right", "error_rate"),
    "shape": (lambda input: right(input)[:1], "mismatch_rate"),
    "dtype": (lambda input: right(input).double(), "mismatch_rate"),
    "device": (lambda input: right(input).to("meta"), "mismatch_rate"),
    "two": (lambda input: (right(input), right(input)), "mismatch_rate"),
    "wrong": (lambda input: right(input) + 0.1, "mismatch_rate"),
    "NaN": (lambda input: right(input) * float("nan"), "mismatch_rate"),
    "infinite": (lambda input: right(input) + float("inf"), "mismatch_rate"),
}


@pytest.mark.parametrize("how", NO_GOOD)
def test_a_shadow_that_is_no_good_goes_and_nobody_notices(kernels: Kernels, how: str) -> None:
    kernels.trying, cause = NO_GOOD[how]
    roll_out("shadow")
    since = last_event()
    kernels.calls(20)
    assert kernels.tried == 5, "as many as it takes to be judged"
    found = status()
    assert found["verdict"]["state"] == "rolled_back" and found["verdict"]["why"]["cause"] == cause
    names = [e["event"] for e in events(since)]
    assert names.count("rolled_back") == 1 and not lz.health().well
    assert names.count("shadow_mismatch") == (5 if cause == "mismatch_rate" else 0)
    # Nobody who serves has failed.
    assert lz.health().kernels["steady.norm"]["failures"] == 0 and "kernel_failed" not in names
    assert "backend_disabled" not in names


def test_a_shadow_cannot_touch_what_it_is_given(kernels: Kernels) -> None:
    def greedy(input: Tensor) -> Tensor:
        result = right(input)
        input.fill_(7.0)
        return result

    kernels.trying = greedy
    roll_out("shadow")
    x = X.clone()
    kernels.calls(8, x)
    assert kernels.tried > 0 and torch.equal(x, X), "the caller's tensor was written to"


def test_a_shadow_of_what_updates_in_place_works_on_copies() -> None:
    seen: list[int] = []

    def bad(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        seen.append(1)
        key_cache.fill_(7.0)

    lz.register_kernel(
        operation="kv_cache.append", kernel_id="fresh.append", platform="cpu", supported_dtypes=["float32"], priority=99
    )(bad)
    try:
        rollout = {"name": "cache", "operation": "kv_append", "candidate": "fresh.append", "mode": "shadow"}
        fresh(rollouts=[{**rollout, "fraction": 1.0, "min_samples": 3}], health__sample_every=1)
        keys, values = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
        for n in range(8):
            caches = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
            lz.kv_append(keys, values, *caches, torch.tensor([5, 2]))
            assert torch.equal(caches[0].view(-1, 2, 8)[[5, 2]], keys), n
            assert torch.equal(caches[1].view(-1, 2, 8)[[5, 2]], values)
            assert caches[0].count_nonzero() == keys.numel()
        assert len(seen) == 3 and status()["verdict"]["why"]["cause"] == "mismatch_rate"
    finally:
        lz.unregister_kernel("fresh.append")
        fresh()


def test_a_shadow_runs_beside_calls_that_are_not_straight() -> None:
    """Quantization and sampling have results that are made in Python; their kernels are tried all the same."""
    ran: list[int] = []

    def candidate(input: Tensor, dtype: str) -> Any:
        ran.append(1)
        raise RuntimeError("no")

    lz.register_kernel(
        operation="quantize", kernel_id="fresh.quantize", platform="cpu", supported_dtypes=["float32"], priority=99
    )(candidate)
    try:
        rollout = {"name": "codes", "operation": "quantize", "candidate": "fresh.quantize", "mode": "shadow"}
        fresh(rollouts=[{**rollout, "fraction": 1.0, "min_samples": 3}], health__sample_every=1)
        wanted = lz.run_kernel("torch.quantize", X, "int8")
        for _ in range(8):
            assert torch.equal(lz.quantize(X, "int8").values, wanted.values)
        assert len(ran) == 3 and status()["verdict"]["state"] == "rolled_back"
    finally:
        lz.unregister_kernel("fresh.quantize")
        fresh()


def test_an_interrupt_while_a_shadow_runs_reaches_the_caller(kernels: Kernels) -> None:
    kernels.trying = _raise(KeyboardInterrupt())
    roll_out("shadow")
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            lz.rms_norm(X)
    assert status()["errors"] == 0


def test_a_slow_shadow_is_found_slow(kernels: Kernels) -> None:
    def slow(input: Tensor) -> Tensor:
        time.sleep(0.005)
        return right(input)

    kernels.trying = slow
    roll_out("shadow", max_slowdown=2.0, min_samples=10)
    kernels.calls(14)
    found = status()
    assert found["verdict"]["why"]["cause"] == "slowdown" and found["verdict"]["why"]["median"] > 2.0
    assert kernels.tried == 10


def test_one_that_was_rolled_back_is_rearmed_by_hand(kernels: Kernels) -> None:
    kernels.trying = lambda input: input * 0.0
    roll_out("shadow")
    kernels.calls(20)
    assert status()["verdict"]["state"] == "rolled_back" and kernels.tried == 5
    # Not by what else is configured, nor by reading the files again.
    lz.configure(memory_headroom_mb=3)
    lz.reload()
    kernels.calls(5)
    assert kernels.tried == 5
    kernels.trying, since = right, last_event()
    lz.restart_rollout("trial")
    assert status()["verdict"]["state"] == "running" and status()["samples"] == 0
    kernels.calls(20)
    assert status()["verdict"]["state"] == "healthy" and lz.health().well
    assert [e["event"] for e in events(since)] == ["rearmed"]
    with pytest.raises(lz.ConfigurationError, match="there are: trial"):
        lz.restart_rollout("trail")


# --- canary -----------------------------------------------------------------------------------------------------------


def test_a_canary_that_is_good_serves(kernels: Kernels) -> None:
    roll_out("canary")
    for _ in range(12):
        assert torch.equal(lz.rms_norm(X), right(X))
    assert kernels.tried == 12 and status()["verdict"]["state"] == "healthy"
    report = lz.explain("rms_norm", X)
    assert report.chosen == "fresh.norm" and report.to_dict()["rollout"] == "trial"
    assert "given by rollout 'trial'" in str(report)
    # It was compared with the one it stands in for.
    assert status()["compared"] > 0 and len(kernels.served) == status()["compared"]


def test_a_canary_that_fails_goes_and_every_call_is_answered(kernels: Kernels) -> None:
    kernels.trying = _raise(RuntimeError("no"))
    roll_out("canary")
    for _ in range(20):
        assert torch.equal(lz.rms_norm(X), right(X))
    assert kernels.tried == 5 and status()["verdict"]["why"]["cause"] == "error_rate"
    assert lz.which("rms_norm", X).kernel_id == "steady.norm"
    kernels.trying = right
    lz.restart_rollout("trial")
    fresh(rollouts=None)


@pytest.mark.parametrize("how", ["wrong", "NaN"])
def test_a_canary_whose_answers_differ_goes(kernels: Kernels, how: str) -> None:
    kernels.trying = NO_GOOD[how][0]
    roll_out("canary")
    for _ in range(20):
        lz.rms_norm(X)
    assert status()["verdict"]["why"]["cause"] == "mismatch_rate"
    tried = kernels.tried
    kernels.calls(5)
    assert kernels.tried == tried


def test_a_slow_canary_goes(kernels: Kernels) -> None:
    def slow(input: Tensor) -> Tensor:
        time.sleep(0.005)
        return right(input)

    kernels.trying = slow
    roll_out("canary", max_slowdown=2.0, min_samples=10)
    for _ in range(20):
        assert torch.equal(lz.rms_norm(X), right(X))
    assert status()["verdict"]["why"]["cause"] == "slowdown"


def test_a_canary_with_a_breaker_that_opens_first(kernels: Kernels) -> None:
    kernels.trying = _raise(RuntimeError("no"))
    roll_out("canary", min_samples=50)
    lz.configure(breaker__failure_threshold=3)
    for _ in range(20):
        assert torch.equal(lz.rms_norm(X), right(X))
    assert kernels.tried == 3 and breaker("fresh", "norm.rms")["state"] == "open"
    assert status()["verdict"]["state"] == "running"


SHARE = """
    import sys
    sys.path[:0] = {tests!r}
    import warnings
    warnings.simplefilter("ignore")
    import layerzero as lz
    from test_control_rollout import Kernels, roll_out, keys
    made = Kernels()
    taken = {{}}
    for fraction, seed in ((0.1, 0), (0.5, 0), (0.5, 1), (1.0, 0)):
        roll_out("canary", fraction=fraction, seed=seed)
        taken[f"{{fraction}} {{seed}}"] = [n for n, x in enumerate(keys()) if lz.which("rms_norm", x).kernel_id == "fresh.norm"]
    roll_out("canary", fraction=0.5)
    served = []
    for n, x in enumerate(keys()):
        made.tried = 0
        lz.rms_norm(x), lz.rms_norm(x)
        served += [n] * bool(made.tried)
    answer([taken, served])
"""


def keys() -> list[Tensor]:
    """Calls of many kinds."""
    return [torch.zeros(rows, hidden) for rows in (1, 4, 300) for hidden in range(8, 8 + 40)]


def test_the_same_calls_are_the_canarys_in_every_process() -> None:
    code = SHARE.format(tests=[str(SUPPORT), os.path.dirname(__file__)])
    (taken, served), (again, served_again) = forked(code), forked(code)
    assert taken == again and served == served_again == taken["0.5 0"]
    few, half, other, every = (set(found) for found in taken.values())
    assert few < half < every and len(every) == len(keys()), "whoever is taken at 10% is taken at 50% too"
    assert half != other, "another seed takes others"
    assert 0.3 < len(half) / len(every) < 0.7 and len(few) / len(every) < 0.3


@pytest.mark.parametrize("mode", ["shadow", "canary"])
def test_one_whose_answers_differ_is_out_of_the_operation(kernels: Kernels, mode: str) -> None:
    kernels.trying = lambda input: input * 0.0
    roll_out(mode)
    for _ in range(20):
        lz.rms_norm(X)
    assert status()["verdict"]["state"] == "rolled_back"
    (wrong,) = lz.health().wrong_results
    assert wrong["kernel"] == "fresh.norm" and "steady.norm" in wrong["error"]
    # Without the trial it would be the first to be chosen.
    lz.configure(rollouts=None)
    (candidate,) = [c for c in lz.explain("rms_norm", X).candidates if c.kernel_id == "fresh.norm"]
    assert [reason.code for reason in candidate.reasons] == ["NUMERICAL_MISMATCH"]
    assert torch.equal(lz.rms_norm(X), right(X))
