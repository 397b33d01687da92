"""Calls whose types a checker must get right. `make lint` has mypy read this; nothing runs it."""

from __future__ import annotations

from typing import Any, assert_type

import layerzero as lz
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Producer:
    """A tensor of another library."""

    def __dlpack__(self, *, stream: object = None) -> object:
        return stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def tensors(x: Tensor, w: torch.nn.Parameter, generator: torch.Generator) -> None:
    """Tensors, and what is derived from them."""
    assert_type(lz.rms_norm(x), Tensor)
    assert_type(lz.rms_norm(x, w, 1e-5, out=x), Tensor)
    assert_type(lz.layer_norm(x, [4], w), Tensor)
    assert_type(lz.layer_norm(x, 4), Tensor)
    assert_type(lz.attention(x, x, x, True, 0.5, attn_mask=x, window=(1, 2), seed=3, layout="BSHD"), Tensor)
    assert_type(lz.attention(x, x, x, window=4), Tensor)
    assert_type(lz.fused_add_rms_norm(x, x, w), tuple[Tensor, Tensor])
    assert_type(lz.sample_topk(x, 3, generator=generator), Tensor)
    assert_type(lz.kv_append(x, x, x, x, x), None)


def arrays(a: NDArray[np.float32]) -> None:
    """Arrays."""
    assert_type(lz.rms_norm(a), NDArray[Any])
    assert_type(lz.fused_add_rms_norm(a, a), tuple[NDArray[Any], NDArray[Any]])
    lz.rms_norm(Producer())


def quantized(x: Tensor) -> None:
    """The result depends on whether the scales are given."""
    assert_type(lz.quantize(x, "int8"), lz.Quantized)
    assert_type(lz.quantize(x, "int8", None), lz.Quantized)
    assert_type(lz.quantize(x, "int8", x, granularity="per_channel"), Tensor)
    lz.dequantize(*lz.quantize(x, "int8"))


def inspected(x: Tensor) -> None:
    """Answers."""
    report = lz.explain("rms_norm", x)
    assert_type(report.candidates[0].reasons[0].code, str)
    valid, reasons = lz.validate("torch.rms_norm", x)
    assert_type(valid, bool)
    assert_type(reasons[0], lz.Reason)
    assert_type(lz.which("rms_norm", lz.TensorSpec((2, 4), torch.bfloat16)).kernel_id, str)
    assert_type(lz.list_kernels()[0], lz.KernelInfo)
    assert_type(lz.regret(lz.workload("rms_norm")).rows[0].over_best, float)
    lz.lock("rms_norm", "torch.rms_norm", optional=True)


@lz.register_kernel(operation="rms_norm", kernel_id="typed.norm", platform="cpu", supported_dtypes=[torch.float32])
def kernel(input: Tensor, eps: float) -> Tensor:
    """A decorated function keeps its type."""
    return input * eps


assert_type(kernel(torch.ones(2), 0.5), Tensor)


def wrong(x: Tensor) -> None:
    """What must not pass: under `warn_unused_ignores` each of these is an error once it does."""
    lz.rms_norm([1.0])  # type: ignore[type-var]
    lz.rms_norm(x, epsilon=1.0)  # type: ignore[call-arg]
    lz.rms_norm(x, None, 1e-6, x)  # type: ignore[call-arg]
    lz.attention(x, x)  # type: ignore[call-overload]
    lz.attention(x, x, x, causal="yes")  # type: ignore[call-overload]
    lz.sample_topk(x, 0.5)  # type: ignore[arg-type]
    lz.quantize(x, 8)  # type: ignore[call-overload]
