"""What torch's own kernels for GPUs cost before anything is compiled or measured: the launches of a call, beside those of the code
one writes in torch. Each may have a few more, which are named: nothing waits for the device, so what could be wrong with the
data is dealt with on the way, whether or not it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import described
import pytest
import torch
import torch.nn.functional as F
from launches import launches
from torch import Tensor

KERNELS: dict[str, Callable[..., Any]] = described.adapter("torch_cuda").KERNELS
HALF = torch.bfloat16


class Beside(NamedTuple):
    """A call of a kernel and the code one writes in torch."""

    ours: Callable[[], Any]
    plain: Callable[[], Any]
    more: int
    """How many launches more than that it has."""


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).to(HALF)


def kv_append() -> Beside:
    """Beyond the two writes: what each token writes (compared pair by pair with the others: four), all rows one after another,
    those that are written, and negative slots as 0."""
    k, v, keys, values = randn(16, 2, 8), randn(16, 2, 8), randn(8, 4, 2, 8), randn(8, 4, 2, 8)
    slots = torch.randperm(32)[:16]
    flat = keys.view(-1, 2, 8), values.view(-1, 2, 8)

    def plain() -> None:
        flat[0][slots] = k
        flat[1][slots] = v

    return Beside(lambda: KERNELS["torch.cuda.kv_append"](k, v, keys, values, slots, "NHD"), plain, 7)


def mask(given: Tensor, more: int) -> Beside:
    q, k, v = (randn(2, 2, 32, 8) for _ in range(3))
    return Beside(
        lambda: KERNELS["torch.cuda.sdpa.literal"](q, k, v, given, False, None, 0.0, 0, "BHSD"),
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=given),
        more,
    )


def padding() -> Beside:
    """Whether a query reaches a key, and zeros where it does not."""
    return mask((torch.arange(32) < torch.tensor([[20], [32]]))[:, None, None], 2)


def bias() -> Beside:
    """The same of numbers, which are compared with minus infinity."""
    return mask(randn(1, 2, 32, 32), 3)


def quantize_int8() -> Beside:
    """The scale in float64 and back, the zero points, and the number that makes integers."""
    x = randn(32, 64)

    def plain() -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round().clamp(-127, 127).to(torch.int8), scale

    return Beside(
        lambda: KERNELS["torch.cuda.quantize"](x, None, "int8", "per_channel", None, False),
        plain,
        3,
    )


def quantize_fp8() -> Beside:
    """Two passes so that a quotient is rounded once. The others are over scales: in float64 and back, zeros among them, what
    numbers are limited to; and the zero points."""
    x = randn(32, 64)

    def plain() -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    return Beside(
        lambda: KERNELS["torch.cuda.quantize"](x, None, "fp8_e4m3", "per_channel", None, False),
        plain,
        11,
    )


def dequantize() -> Beside:
    """One pass where the code one writes has two."""
    values, scales = torch.randint(-127, 128, (32, 64), dtype=torch.int8), torch.rand(32, 1)
    narrow = scales.to(HALF)
    return Beside(
        lambda: KERNELS["torch.cuda.dequantize"](values, scales, None, "bfloat16", "per_channel", None),
        lambda: values.to(HALF) * narrow,
        -1,
    )


def _rope(batch: int, seq: int, at_positions: bool, interleaved: bool, name: str, more: int) -> Beside:
    x, cos, sin = randn(batch, seq, 4, 16), randn(64, 8), randn(64, 8)
    positions = torch.randint(0, 64, (batch, seq)) if at_positions else None
    rows = torch.arange(seq)[None] if positions is None else positions
    a, b = (
        (one.repeat_interleave(2, -1) if interleaved else torch.cat([one, one], -1))[rows][:, :, None]
        for one in (cos, sin)
    )

    def turned() -> Tensor:
        if interleaved:
            return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return torch.cat([-x[..., 8:], x[..., :8]], -1)

    return Beside(
        lambda: KERNELS[name](x, cos, sin, positions, interleaved, "BSHD"), lambda: x * a + turned() * b, more
    )


def rope() -> Beside:
    """One less than the code one writes."""
    return _rope(1, 32, False, False, "torch.cuda.rope", -1)


def rope_decode() -> Beside:
    """The tables at the positions of the tokens, which the code one writes has already."""
    return _rope(16, 1, True, False, "torch.cuda.rope", 1)


def rope_interleaved() -> Beside:
    """As `rope`."""
    return _rope(1, 32, False, True, "torch.cuda.rope", -1)


def paged(heads: int, name: str) -> Beside:
    """The mask, which the code one writes has already (two); in the place of what is not there, slots that are (six); zeros for
    contexts of nothing. Neither does it convert the table, which indexing does twice."""
    tables = torch.randperm(8, dtype=torch.int32).view(2, 4)
    lengths = torch.tensor([9, 16], dtype=torch.int32)
    used = (torch.arange(16) < lengths[:, None])[:, None, None]
    q, keys, values = randn(2, heads, 8), randn(8, 4, 2, 8), randn(8, 4, 2, 8)

    def plain() -> Tensor:
        k, v = (cache[tables.long()].flatten(1, 2).transpose(1, 2) for cache in (keys, values))
        gathered: Tensor = F.scaled_dot_product_attention(
            q[:, :, None], k, v, attn_mask=used, enable_gqa=heads != keys.shape[2]
        )
        return gathered[:, :, 0]

    return Beside(lambda: KERNELS[name](q, keys, values, tables, lengths, None, -1, "NHD"), plain, 6)


CALLS: dict[str, Callable[[], Beside]] = {
    "kv_append": kv_append,
    "padding": padding,
    "bias": bias,
    "quantize int8": quantize_int8,
    "quantize fp8_e4m3": quantize_fp8,
    "dequantize": dequantize,
    "rope": rope,
    "rope decode": rope_decode,
    "rope interleaved": rope_interleaved,
    "paged": lambda: paged(2, "torch.cuda.paged.sdpa.decode"),
    "paged grouped": lambda: paged(4, "torch.cuda.paged.sdpa.decode.gqa"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_costs_what_one_writes_and_no_more_than_is_said(name: str) -> None:
    ours, plain, more = CALLS[name]()
    got, written = launches(ours).names, launches(plain).names
    assert len(got) == len(written) + more, f"{got} beside {written}"
