"""Operations that are written out in small functions: found, and the same as the operation computes.

Each module here is run for real, and its result compared with LayerZero's function on the arguments that were found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from layerzero.models import calls_of, traced
from torch import Tensor, nn


class Written(nn.Module):
    """A function as a module with a weight."""

    def __init__(self, body: Callable[..., Tensor], width: int | None = None) -> None:
        super().__init__()
        self.body = body
        self.weight = None if width is None else nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.body(*inputs) if self.weight is None else self.body(self.weight, *inputs)


@torch.no_grad()
def found(module: nn.Module, *inputs: Tensor) -> list[dict[str, Any]]:
    """The calls that are found, as they are written down."""
    return [json.loads(call.spec) for call in calls_of(module, *inputs)]


def llama_norm(weight: Tensor, x: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + 1e-5)).to(x.dtype)


def t5_norm(weight: Tensor, x: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5))


def gemma_norm(weight: Tensor, x: Tensor) -> Tensor:
    y = x.float()
    return ((y * torch.rsqrt((y * y).mean(dim=-1, keepdim=True) + 1e-5)) * (1.0 + weight.float())).type_as(x)


def divided_norm(weight: Tensor, x: Tensor) -> Tensor:
    return (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)) * weight


@pytest.mark.parametrize("norm", [llama_norm, t5_norm, gemma_norm, divided_norm])
@torch.no_grad()
def test_an_rms_norm_is_found_with_its_weight_and_epsilon(norm: Callable[..., Tensor]) -> None:
    module, x = Written(norm, 64), torch.randn(2, 5, 64)
    (call,) = found(module, x)
    assert call["op"] == "norm.rms" and call["params"] == {"eps": 1e-5}
    assert call["tensors"]["input"] == {"dtype": "float32", "shape": [2, 5, 64]}
    assert call["tensors"]["weight"]["shape"] == [64]
    assert module.weight is not None
    weight = 1 + module.weight if norm is gemma_norm else module.weight
    torch.testing.assert_close(lz.rms_norm(x, weight, call["params"]["eps"]), module(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_input_of_a_norm_is_what_it_was_before_its_dtype_changed() -> None:
    (call,) = found(Written(llama_norm, 64).bfloat16(), torch.randn(3, 64, dtype=torch.bfloat16))
    assert {tensor["dtype"] for tensor in call["tensors"].values()} == {"bfloat16"}


def test_a_norm_without_a_weight_has_none() -> None:
    (call,) = found(Written(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), torch.randn(4, 32))
    assert call["op"] == "norm.rms" and "weight" not in call["tensors"]


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6),
        lambda x: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6),
        lambda x: x * torch.rsqrt((2 * x).pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6),
        lambda x: 0.5 * x * (2.0 + torch.tanh(x)),
        lambda x: 0.5 * x * (1.0 + torch.tanh(torch.ones(4, 32))),
        lambda x: 0.5 * x * (1.0 + torch.tanh(x)),
        lambda x: 0.5 * x * (1.0 + torch.erf(x / 2)),
        lambda x: 0.5 * x * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.1 * x * x))),
    ],
)
def test_what_only_looks_like_one_is_not_found(body: Callable[..., Tensor]) -> None:
    assert found(Written(body), torch.rand(4, 32)) == []


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def by_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (torch.cat((t, t), -1)[None, None] for t in (cos, sin))
    return (x * cos) + (rotate_half(x) * sin)


def by_half_in_rows(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (torch.cat((t, t), -1)[None, :, None] for t in (cos, sin))
    return (x * cos) + (rotate_half(x) * sin)


def by_pair(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = torch.chunk(x, 2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)


def by_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.complex(cos, sin)[None, None]).flatten(3).type_as(x)


@pytest.mark.parametrize(
    ("rope", "layout", "interleaved"),
    [(by_half, "BHSD", False), (by_half_in_rows, "BSHD", False), (by_pair, "BHSD", False), (by_complex, "BHSD", True)],
)
@torch.no_grad()
def test_rotary_positions_are_found(rope: Callable[..., Tensor], layout: str, interleaved: bool) -> None:
    shape = (2, 3, 7, 16) if layout == "BHSD" else (2, 7, 3, 16)
    angles = torch.rand(7, 8)
    x, cos, sin = torch.randn(shape), angles.cos(), angles.sin()
    (call,) = found(Written(rope), x, cos, sin)
    assert call["op"] == "posenc.rope" and call["layout"] == layout
    assert call["tensors"]["cos"] == call["tensors"]["sin"] == {"dtype": "float32", "shape": [7, 8]}
    assert call.get("params", {}).get("interleaved", False) == interleaved
    ours = lz.rope(x, cos, sin, interleaved=interleaved, layout=layout)
    torch.testing.assert_close(ours, rope(x, cos, sin), rtol=1e-5, atol=1e-5)


def test_a_rotation_of_another_tensor_is_no_rope() -> None:
    def mixed(x: Tensor, y: Tensor, cos: Tensor) -> Tensor:
        return (x * cos) + (rotate_half(y) * cos)

    assert found(Written(mixed), torch.rand(1, 2, 4, 8), torch.rand(1, 2, 4, 8), torch.rand(1, 1, 4, 8)) == []


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def bloom_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def erf_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@pytest.mark.parametrize(("gelu", "kind"), [(tanh_gelu, "tanh"), (bloom_gelu, "tanh"), (erf_gelu, "none")])
@torch.no_grad()
def test_a_gelu_is_found(gelu: Callable[[Tensor], Tensor], kind: str) -> None:
    x = torch.randn(6, 32)
    (call,) = found(Written(gelu), x)
    assert call["op"] == "activation.gelu" and call.get("params", {}).get("approximate", "none") == kind
    torch.testing.assert_close(lz.gelu(x, approximate=kind), gelu(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", ["", "added", "filled"])
@torch.no_grad()
def test_attention_by_two_products_is_found(masked: str) -> None:
    q, k, v = (torch.randn(2, 3, 5, 16) for _ in range(3))
    keep = torch.ones(5, 5, dtype=torch.bool).tril()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * 0.3
        if masked == "added":
            scores = scores + torch.where(keep, 0.0, -1e9)
        if masked == "filled":
            scores = scores.masked_fill(~keep, float("-inf"))
        return F.dropout(F.softmax(scores, dim=-1), 0.1, training=False) @ v

    (call,) = found(Written(attention), q, k, v)
    assert call["op"] == "attention" and call["params"] == {"causal": False, "scale": 0.3}
    assert call["tensors"]["key"]["shape"] == [2, 3, 5, 16]
    mask = call["tensors"].get("attn_mask")
    assert mask == (
        None if not masked else {"dtype": "float32" if masked == "added" else "bool", "shape": [1, 1, 5, 5]}
    )
    ours = lz.attention(q, k, v, causal=False, scale=0.3, attn_mask=keep if masked else None, layout="BHSD")
    torch.testing.assert_close(ours, attention(q, k, v), rtol=1e-5, atol=1e-5)


def test_a_softmax_over_another_dimension_is_no_attention() -> None:
    def pooled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.transpose(-2, -1), dim=-2) @ v

    assert found(Written(pooled), *(torch.rand(2, 3, 5, 16) for _ in range(3))) == []


@torch.no_grad()
def test_products_with_a_matrix_are_linear_layers() -> None:
    x, w, b = torch.randn(6, 8), torch.randn(8, 4), torch.randn(4)
    for body in (lambda x: torch.addmm(b, x, w), lambda x: x @ w, lambda x: torch.mm(x, w), lambda x: x.matmul(w)):
        (call,) = found(Written(body), x)
        assert call["op"] == "mlp.linear" and call["tensors"]["weight"]["shape"] == [4, 8]
        bias = b if "bias" in call["tensors"] else None
        torch.testing.assert_close(lz.linear(x, w.t(), bias), body(x))
    assert found(Written(lambda x: torch.addmm(b, x, w, beta=2.0)), x) == []


class Block(nn.Module):
    """Norms that are written out, and a function that is none of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = Written(llama_norm, 16), nn.Linear(16, 64)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.up(self.norm(x))[:, None])[:, 0]


@torch.no_grad()
def test_the_share_of_a_model_is_what_its_calls_compute() -> None:
    rows = 5
    _, _, share = traced(Block(), (torch.randn(rows, 16),), {})
    linear, conv = 2 * rows * 16 * 64, 2 * rows * 64 * 3
    assert (share.covered_flops, share.flops) == (linear, linear + conv)
    assert share.of_flops == linear / (linear + conv)
    assert 0 < share.of_bytes < 1


@torch.no_grad()
def test_a_call_is_told_with_its_module_and_counted() -> None:
    model = nn.Sequential(*(Written(llama_norm, 16) for _ in range(3)))
    (call,) = calls_of(model, torch.randn(2, 16))
    assert (call.module, call.count, call.source) == ("*", 3, "rms_norm written out")
