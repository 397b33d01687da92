"""What a timed call is said to take: the host's part or the device's, whichever is more."""

from __future__ import annotations

import time
from collections.abc import Iterator

import layerzero as lz
import pytest
import torch
from layerzero import _native
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
