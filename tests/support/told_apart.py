"""Two kernels for the same calls, told apart by their results: who serves a call, here or in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import layerzero as lz
import torch
from torch import Tensor

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


def register() -> None:
    """Two kernels whose results tell them apart; the first is preferred, the second deterministic."""
    given = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}

    @lz.register_kernel(kernel_id="one.norm", priority=60, **given)
    def one(input: Tensor, eps: float) -> Tensor:
        return input + 1.0

    @lz.register_kernel(kernel_id="two.norm", priority=55, deterministic=True, **given)
    def two(input: Tensor, eps: float) -> Tensor:
        return input + 2.0


def unregister() -> None:
    """Takes them away."""
    for kernel in ("one.norm", "two.norm"):
        lz.unregister_kernel(kernel)


def served(x: Tensor = X) -> str:
    """Who serves a call, by what it gives."""
    result = lz.rms_norm(x)
    if torch.equal(result, x + 1.0):
        return "one"
    if torch.equal(result, x + 2.0):
        return "two"
    right = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(result.double(), right, rtol=1e-5, atol=1e-5)
    told = str(lz.which("rms_norm", x).kernel_id)
    assert told.startswith(("torch.", "lz_cpu.ref."))
    return told.partition(".")[0]


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What the work gives in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    (result,) = found
    return result
