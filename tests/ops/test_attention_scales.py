"""Causal attention by scales that are not positive: kernels that mask before they scale give NaN or nonsense there."""

from __future__ import annotations

import layerzero as lz
import pytest
import torch
from torch import Tensor

SCALES = (0.3, 0.0, -0.0, -0.4)
KERNELS = ("torch.sdpa.flash", "torch.sdpa.math", "torch.attention.unfused")


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """In float64, heads first, as many queries as keys."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    scores = scale * (q @ k.repeat_interleave(group, 1).transpose(-1, -2))
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(ahead, -torch.inf), -1) @ v.repeat_interleave(group, 1)


def operands(heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads * 10 + kv_heads)
    q, k, v = (torch.randn(2, n, 40, 16, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads))
    return q, k, v


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["standard", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_kernel_and_the_straight_path(
    dtype: torch.dtype, heads: tuple[int, int], layout: str, scale: float
) -> None:
    plain = operands(*heads, dtype)
    want = exact(*plain, scale)
    q, k, v = plain if layout == "BHSD" else (x.transpose(1, 2).contiguous() for x in plain)
    call = {"causal": True, "scale": scale, "layout": layout}
    got = {name: lz.run_kernel(name, q, k, v, **call) for name in KERNELS}
    # Once as any call, twice as one that is remembered.
    got |= {f"call {i}": lz.attention(q, k, v, **call) for i in range(3)}
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for name, result in got.items():
        result = result if layout == "BHSD" else result.transpose(1, 2)
        torch.testing.assert_close(result.double(), want, **close, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("scale", SCALES)
def test_gradients(scale: float) -> None:
    given = [x.requires_grad_() for x in operands(4, 4)]
    lz.attention(*given, causal=True, scale=scale, layout="BHSD").square().sum().backward()
    twins = [x.detach().double().requires_grad_() for x in given]
    exact(*twins, scale).square().sum().backward()
    for one, twin in zip(given, twins, strict=True):
        torch.testing.assert_close(one.grad.double(), twin.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", SCALES)
def test_pages(scale: float) -> None:
    q, k, v = (x[:1] for x in operands(4, 2))
    want = exact(q, k, v, scale)[0].transpose(0, 1)
    pages = [x[0].transpose(0, 1).reshape(5, 8, 2, 16).contiguous() for x in (k, v)]
    call = {
        "query": q[0].transpose(0, 1).contiguous(),
        "key_cache": pages[0],
        "value_cache": pages[1],
        "block_tables": torch.arange(5, dtype=torch.int32)[None],
        "context_lens": torch.tensor([40], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 40], dtype=torch.int32),
        "causal": True,
        "scale": scale,
    }
    for name in ("torch.paged.flash.prefill.gqa", "torch.paged.unfused.prefill.gqa"):
        got = lz.run_kernel(name, **call)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
