"""What a timed call is said to take: the host's part or the device's, whichever is more."""

from __future__ import annotations

import time
from collections.abc import Iterator

import layerzero as lz
import pytest
import torch
from layerzero import _native, device_times
from layerzero.tuning.timing import CudaTimer
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
HOST_US = 300.0


@pytest.fixture
def kernels() -> Iterator[dict[str, str]]:
    """Norms that take long on the host, long on the device, and one that waits for the device."""

    def register(name: str, prepare: object) -> str:
        @lz.register_kernel(
            operation="norm.rms", kernel_id=f"test.{name}", platform="cuda", supported_dtypes=["float32"]
        )
        def kernel(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
            prepare(input)  # type: ignore[operator]
            return torch.nn.functional.rms_norm(input, (input.shape[-1],), weight, eps)

        return f"test.{name}"

    def host(input: Tensor) -> None:
        until = time.perf_counter() + HOST_US * 1e-6
        while time.perf_counter() < until:
            pass

    def device(input: Tensor) -> None:
        large = torch.empty(1 << 28, dtype=torch.int8, device=input.device)
        for _ in range(4):
            large.zero_()

    def waits(input: Tensor) -> None:
        torch.cuda.synchronize()

    named = {"host": host, "device": device, "waits": waits}
    yield {name: register(name, prepare) for name, prepare in named.items()}
    for name in named:
        lz.unregister_kernel(f"test.{name}")


def test_the_slower_of_host_and_device_counts(kernels: dict[str, str]) -> None:
    subject = _native.Subject("rms_norm", {"input": torch.randn(64, 256, device="cuda")})
    eager, graph = CudaTimer(subject, 0, "eager"), CudaTimer(subject, 0, "graph")
    for name in kernels.values():
        subject.run(name)
    times = {name: [eager.time(kernel, 10) for _ in range(3)][-1] for name, kernel in kernels.items()}
    device_us = graph.time(kernels["device"], 10)
    assert times["host"] >= HOST_US
    assert times["device"] >= device_us / 2, "it is the device that counts"
    assert all(0 < us < float("inf") for us in times.values()), "one that waits for the device has a time, too"


#: How long what the device has done may take to be told, in seconds.
SOON = 30.0
#: What both kernels keep the device busy for, in cycles: some 50 and 150 microseconds.
STEADY, SLOW = 100_000, 300_000


@pytest.fixture
def norms() -> Iterator[None]:
    """A norm that serves and one that is tried: launched alike, and the second takes the device three times as long."""

    def register(kernel_id: str, priority: int, cycles: int) -> None:
        @lz.register_kernel(
            operation="norm.rms", kernel_id=kernel_id, platform="cuda", supported_dtypes=["float32"], priority=priority
        )
        def kernel(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            return torch.nn.functional.rms_norm(input, (input.shape[-1],), weight, eps)

    register("steady.norm", 90, STEADY)
    register("fresh.norm", 99, SLOW)
    yield
    lz.unregister_kernel("steady.norm")
    lz.unregister_kernel("fresh.norm")
    lz.reset()


def told(kernel: str, count: int) -> bool:
    """Whether so many calls of a kernel were timed, at last."""
    until = time.monotonic() + SOON
    while time.monotonic() < until:
        if lz.health().kernels[kernel]["latency_samples"] >= count:
            return True
        time.sleep(0.01)
    return False


def device_us(call: object) -> float:
    """By events that are waited for."""
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()  # type: ignore[operator]
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
    return sorted(times)[10]


def test_a_sampled_call_takes_what_the_device_takes(norms: None) -> None:
    x = torch.randn(64, 256, device="cuda")
    lz.configure(health={"sample_every": 1}, degradation={"enabled": False})
    lz.rms_norm(x)
    before = lz.health().kernels["fresh.norm"]["latency_samples"]
    for _ in range(50):
        lz.rms_norm(x)
    assert told("fresh.norm", before + 50)
    mean_us = lz.health().kernels["fresh.norm"]["mean_ns"] / 1e3
    known_us = device_us(lambda: lz.run_kernel("fresh.norm", x))
    assert 0.7 * known_us < mean_us < 1.5 * known_us


def test_a_canary_that_is_slow_on_the_device_is_rolled_back(norms: None) -> None:
    x = torch.randn(64, 256, device="cuda")
    rollout = {"name": "trial", "operation": "rms_norm", "candidate": "fresh.norm", "mode": "canary", "fraction": 1.0}
    limits = {"min_samples": 20, "max_slowdown": 1.5}
    lz.configure(rollouts=[{**rollout, **limits}], health={"sample_every": 1}, degradation={"enabled": False})
    until = time.monotonic() + SOON
    while time.monotonic() < until and lz.health().rollouts[0]["verdict"]["state"] != "rolled_back":
        lz.rms_norm(x)
    (found,) = lz.health().rollouts
    assert found["verdict"]["state"] == "rolled_back" and found["verdict"]["why"]["cause"] == "slowdown", found
    assert 2.0 < found["slowdown"] < 4.0
    assert lz.which("rms_norm", x).kernel_id == "steady.norm"


def test_a_capture_is_not_disturbed_by_what_is_timed(norms: None) -> None:
    """Events are asked about on a thread of ours while a graph is captured in the mode that forbids it to all threads."""
    x, y = torch.randn(64, 256, device="cuda"), torch.randn(64, 256, device="cuda")
    lz.configure(health={"sample_every": 1}, degradation={"enabled": False})
    lz.rms_norm(x)
    before = lz.health().kernels["fresh.norm"]["latency_samples"]
    for _ in range(100):
        lz.rms_norm(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = y + 1
        # Long enough for the thread to have asked many times: all of them are to pass in here.
        assert told("fresh.norm", before + 100)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(z, y + 1)
    assert device_times._follower.mark(0) is not None, "it goes on"
