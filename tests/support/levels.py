"""Levels of degradation: a kernel that fails, and thresholds that make its failures a level."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
from faults.states import fresh
from torch import Tensor

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
REFERENCE = "lz_cpu.ref.norm.rms"
GIVEN: dict[str, Any] = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}
# Every call falls back, so that the health is 50; which level that is, is configured.
LEVELS = {
    "full": (40, 30, 20, 10),
    "reduced": (80, 40, 30, 20),
    "cached": (80, 60, 40, 20),
    "rule_based": (90, 80, 60, 40),
    "minimal": (90, 80, 70, 60),
}


def normed(x: Tensor = X) -> Tensor:
    """What rms_norm gives."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def right(x: Tensor = X) -> None:
    """A call is answered as it should be."""
    torch.testing.assert_close(lz.rms_norm(x), normed(x), rtol=1e-5, atol=1e-5)


@pytest.fixture
def broken() -> Iterator[list[bool]]:
    """A kernel that is preferred and fails, until it is told not to."""
    well: list[bool] = []

    @lz.register_kernel(kernel_id="broken.norm", priority=99, **GIVEN)
    def kernel(input: Tensor, eps: float) -> Tensor:
        if not well:
            raise RuntimeError("broken")
        return normed(input)

    fresh()
    yield well
    lz.unregister_kernel("broken.norm")
    fresh()


def degrade(level: str, **more: Any) -> None:
    """Thresholds for which the health of 50 is that level."""
    names = ("reduced_health", "cached_health", "rule_based_health", "minimal_health")
    thresholds = dict(zip(names, LEVELS[level], strict=True))
    settings = {"min_calls": 5, "window_ms": 3_600_000, **thresholds, **more}
    fresh(degradation=settings, breaker__enabled=False, health__sample_every=1)
