"""The factory of dense-attention kernels: what it gives to a library's call, and what comes back, against float64."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from layerzero.backends._shared.dense_attention import Call, dense
from layerzero.loading import parameters
from torch import Tensor


def softmax(query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool) -> Tensor:
    """Attention in float64, in the order batch, heads, sequence, element."""
    q, k, v = query.double(), key.double(), value.double()
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        reach = torch.ones(scores.shape[-2:]).tril(k.shape[2] - q.shape[2]).bool()
        scores = scores.masked_fill(~reach, -math.inf)
    return scores.softmax(-1) @ v


def library(call: Call) -> Tensor:
    """A library: it wants BSHD and a positive scale, and computes by itself."""
    assert call.scale is None or call.scale > 0.0
    assert all(tensor.stride(-1) == 1 for tensor in call.operands)
    q, k, v = (tensor.transpose(1, 2) for tensor in call.operands)
    return softmax(q, k, v, call.scale, call.causal).to(q.dtype).transpose(1, 2)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("scale", [None, 0.3, -0.7])
@pytest.mark.parametrize("causal", [False, True])
def test_the_result_is_right_in_the_callers_layout(layout: str, scale: float | None, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    given = [q, k, v] if layout == "BHSD" else [tensor.transpose(1, 2) for tensor in (q, k, v)]
    got = dense(library, "causal")(*given, causal, scale, layout)
    want = softmax(q, k, v, scale, causal)
    torch.testing.assert_close((got if layout == "BHSD" else got.transpose(1, 2)).double(), want, rtol=1e-5, atol=1e-6)


def test_a_kernel_takes_what_it_names_and_nothing_else() -> None:
    kernel = dense(library, "softcap", "causal")
    names = ["query", "key", "value", "causal", "scale", "softcap", "layout"]
    assert parameters(kernel) == names
    assert all(one.default is one.empty for one in inspect.signature(kernel).parameters.values())
    q = torch.randn(1, 4, 2, 8)
    by_place = kernel(q, q, q, True, None, 0.0, "BSHD")
    by_name = kernel(layout="BSHD", softcap=0.0, scale=None, causal=True, value=q, key=q, query=q)
    assert torch.equal(by_place, by_name)
    with pytest.raises(TypeError, match="dense attention has no bias"):
        dense(library, "bias")


def test_the_whole_call_has_the_arguments_as_they_are_given() -> None:
    seen = []

    def whole(call: Call) -> tuple[object, ...] | None:
        seen.append(call)
        return (library, (call.query,)) if call.is_plain() else None

    kernel = dense(library, "window_left", "window_right", whole=whole)
    q = torch.randn(1, 4, 2, 8)
    plan = kernel.direct  # type: ignore[attr-defined]
    function, (query,) = plan(q, q, q, -0.5, 3, -1, "BSHD") or (None, (None,))
    assert function is None and seen[0].window == (3, -1) and seen[0].scale == -0.5
    function, (query,) = plan(q, q, q, 0.5, 3, -1, "BSHD")
    assert function is library and query is q
    assert not hasattr(dense(library), "direct")


def test_operands_are_made_by_what_the_library_says() -> None:
    made: list[str] = []

    def operand(tensor: Tensor, layout: str) -> Tensor:
        made.append(layout)
        return tensor.transpose(1, 2).contiguous() if layout == "BHSD" else tensor

    q = torch.randn(1, 2, 4, 8)
    got = dense(library, operand=operand)(q, q, q, None, "BHSD")
    assert made == ["BHSD"] * 3
    torch.testing.assert_close(got.double(), softmax(q, q, q, None, False), rtol=1e-5, atol=1e-6)
