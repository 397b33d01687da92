"""Calls that a GPU carries out are timed by its events: the host stands for the GPU, with events that are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from faults.states import fresh
from layerzero import _native, device_times
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
GIVEN: dict[str, Any] = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}


class Device:
    """A device that takes as long as kernels say, and whose events pass when it is told to go on."""

    def __init__(self) -> None:
        self.now_us, self.passes, self.per_mark_us = 0.0, False, 0.0

    def attend(self) -> bool:
        return True

    def mark(self, device: int) -> float:
        self.now_us += self.per_mark_us
        return self.now_us

    def passed(self, mark: float) -> bool:
        return self.passes

    def between_us(self, begin: float, end: float) -> float:
        return end - begin

    def reuse(self, mark: float) -> None:
        return


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The host as a GPU, with one call in one timed."""
    made = Device()
    monkeypatch.setattr(device_times, "_follower", device_times.Follower(made, polls=False))
    _native.time_host_by_events(True)
    fresh(health__sample_every=1, degradation__enabled=False)
    yield made
    _native.time_host_by_events(False)
    fresh()


@pytest.fixture
def register(device: Device) -> Iterator[Callable[[str, int, float], None]]:
    """Registers norms that take the device so long, and the host next to nothing."""
    made: list[str] = []

    def one(kernel_id: str, priority: int, takes_us: float) -> None:
        @lz.register_kernel(kernel_id=kernel_id, priority=priority, **GIVEN)
        def kernel(input: Tensor, eps: float) -> Tensor:
            device.now_us += takes_us
            return input * torch.rsqrt(input.square().mean(-1, keepdim=True) + 1e-6)

        made.append(kernel_id)

    yield one
    for kernel_id in made:
        lz.unregister_kernel(kernel_id)


def go_on(device: Device) -> int:
    """The device is done with everything; gives how many calls that was."""
    device.passes = True
    over = device_times._follower.poll()
    device.passes = False
    return over


def samples(kernel: str) -> tuple[int, int | None]:
    """How many calls of a kernel were timed, and their mean."""
    found = lz.health().kernels[kernel]
    return found["latency_samples"], found["mean_ns"]


def test_a_sampled_call_takes_what_the_device_takes(
    device: Device, register: Callable[[str, int, float], None]
) -> None:
    register("timed.one", 95, 50.0)
    # The first call of a kind, and of a process, is not straight and not timed.
    for _ in range(3):
        lz.rms_norm(X)
    go_on(device)
    before, _ = samples("timed.one")
    for _ in range(20):
        lz.rms_norm(X)
    assert samples("timed.one")[0] == before, "nobody waited, so nothing is known yet"
    assert go_on(device) == 20 and samples("timed.one") == (before + 20, 50_000)
    assert device_times._follower.dropped == 0


def test_beyond_the_queue_calls_are_made_and_not_timed(
    device: Device, register: Callable[[str, int, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_times, "_follower", device_times.Follower(device, most=4, polls=False))
    register("timed.two", 95, 50.0)
    for _ in range(20):
        assert lz.rms_norm(X).isfinite().all()
    assert go_on(device) == 4 and samples("timed.two") == (4, 50_000)
    assert lz.health().kernels["timed.two"]["calls"] == 20


def rollout(mode: str) -> dict[str, Any]:
    limits = {"min_samples": 5, "max_slowdown": 1.25}
    return {
        "name": "trial",
        "operation": "rms_norm",
        "candidate": "fresh.norm",
        "mode": mode,
        "fraction": 1.0,
        **limits,
    }


@pytest.mark.parametrize(("mode", "takes_us", "verdict"), [
    ("canary", 30.0, "rolled_back"),
    ("canary", 10.0, "healthy"),
    ("shadow", 30.0, "rolled_back"),
    ("shadow", 8.0, "healthy"),
])  # fmt: skip
def test_a_candidate_is_judged_by_what_the_device_takes(
    device: Device, register: Callable[[str, int, float], None], mode: str, takes_us: float, verdict: str
) -> None:
    register("steady.norm", 90, 10.0)
    register("fresh.norm", 99, takes_us)
    fresh(rollouts=[rollout(mode)], health__sample_every=1, degradation__enabled=False)
    for _ in range(40):
        lz.rms_norm(X)
    (found,) = lz.health().rollouts
    assert found["verdict"] == {"state": "healthy"} and found["slowdown"] is None, "launching them takes the same"
    seen = found["samples"]
    go_on(device)
    (found,) = lz.health().rollouts
    assert found["verdict"]["state"] == verdict and found["samples"] == seen
    assert found["slowdown"] == pytest.approx(takes_us / 10.0)
    if verdict == "rolled_back":
        assert found["verdict"]["why"]["cause"] == "slowdown"
        assert lz.which("rms_norm", X).kernel_id == "steady.norm"


def test_what_takes_longer_than_was_measured_is_told(device: Device, tmp_path: Path) -> None:
    x, weight = torch.randn(64, 256), torch.ones(256)
    fresh(perfdb__path=str(tmp_path / "perfdb.sqlite"), health__sample_every=1, degradation__enabled=False)
    lz.tune("rms_norm", dtype=torch.float32, shapes=[(64, 256)], budget="5s", progress=False)
    chosen = lz.which("rms_norm", x, weight).kernel_id
    device.per_mark_us = 1e6
    for _ in range(50):
        lz.rms_norm(x, weight)
    assert lz.health().drifted == []
    go_on(device)
    (drifted,) = lz.health().drifted
    assert drifted["kernel"] == chosen and drifted["live_us"] == 1e6 and drifted["call"]["op"] == "norm.rms"
    candidates = {c.kernel_id: c.live_us for c in lz.explain("rms_norm", x, weight).candidates}
    assert candidates.pop(chosen) == 1e6 and set(candidates.values()) == {None}
    (check,) = [check for check in lz.readiness_check().checks if check.name == "drift"]
    assert check.status == "warn" and chosen in check.detail
