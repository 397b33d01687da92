"""One query over a cache on the CPU: every optional input changes the result as its definition says, whichever kernel serves."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import pytest
import torch
from torch import Tensor

HEADS, WIDTH, TOKENS = 4, 16, 9
KINDS = (2, 4)
"""Key/value heads: shared, and one for each query head."""


def _exact(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """[heads, width] of one query over [tokens, kv heads, width], in float64."""
    group = q.shape[0] // k.shape[1]
    k, v = (one.double().repeat_interleave(group, 1) for one in (k, v))
    scores = torch.einsum("hd,thd->ht", q.double(), k) / WIDTH**0.5
    if mask is not None:
        scores = scores + mask.double()
    if sinks is not None:
        weights = torch.softmax(torch.cat((scores, sinks.double()[:, None]), 1), 1)[:, :-1]
    else:
        weights = torch.softmax(scores, 1)
    return torch.einsum("ht,thd->hd", weights, v)


@pytest.mark.parametrize("kv_heads", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", [{}, {"window": 100}, {"softcap": 1e4}])
def test_sinks_count(kv_heads: int, dtype: torch.dtype, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 1, HEADS, WIDTH).to(dtype)
    k, v = (torch.randn(1, TOKENS, kv_heads, WIDTH).to(dtype) for _ in range(2))
    sinks = torch.linspace(1.0, 5.0, HEADS)
    given = lz.attention(q, k, v, causal=False, sinks=sinks.to(dtype), layout="BSHD", **how)
    torch.testing.assert_close(given[0, 0].double(), _exact(q[0, 0], k[0], v[0], sinks), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("kv_heads", KINDS)
def test_sinks_count_over_pages(kv_heads: int) -> None:
    torch.manual_seed(1)
    q = torch.randn(1, HEADS, WIDTH)
    keys, values = (torch.randn(3, 4, kv_heads, WIDTH) for _ in range(2))
    tables, lens = torch.tensor([[2, 0, 1]]), torch.tensor([TOKENS])
    sinks = torch.linspace(1.0, 5.0, HEADS)
    given = lz.paged_attention(q, keys, values, tables, lens, sinks=sinks)
    k, v = (one[tables[0]].flatten(0, 1)[:TOKENS] for one in (keys, values))
    torch.testing.assert_close(given[0].double(), _exact(q[0], k, v, sinks), rtol=1e-5, atol=1e-5)


def test_an_added_mask_counts() -> None:
    torch.manual_seed(2)
    q = torch.randn(1, 1, HEADS, WIDTH)
    k, v = (torch.randn(1, TOKENS, 2, WIDTH) for _ in range(2))
    mask = torch.randn(HEADS, TOKENS)
    given = lz.attention(q, k, v, causal=False, attn_mask=mask[None, :, None], layout="BSHD")
    torch.testing.assert_close(given[0, 0].double(), _exact(q[0, 0], k[0], v[0], mask=mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float16])
def test_a_cache_of_another_dtype_is_served_without_a_failure(cache: torch.dtype, recwarn: Any) -> None:
    torch.manual_seed(3)
    q = torch.randn(1, HEADS, WIDTH)
    keys, values = (torch.randn(3, 4, 2, WIDTH).to(cache) for _ in range(2))
    given = lz.paged_attention(q, keys, values, torch.tensor([[2, 0, 1]]), torch.tensor([TOKENS]))
    k, v = (one[[2, 0, 1]].flatten(0, 1)[:TOKENS] for one in (keys, values))
    torch.testing.assert_close(given[0].double(), _exact(q[0], k, v), rtol=2e-2, atol=2e-2)
    assert not [one for one in recwarn if "failed" in str(one.message)]


@pytest.mark.parametrize("length", [-(2**63), -1, 13, 2**63 - 1])
def test_a_length_that_cannot_be_is_refused(length: int) -> None:
    keys = torch.randn(3, 4, 2, WIDTH)
    with pytest.raises(lz.LayerZeroError, match="context_lens"):
        lz.paged_attention(torch.randn(1, HEADS, WIDTH), keys, keys, torch.tensor([[2, 0, 1]]), torch.tensor([length]))


def test_sinks_in_float64_are_exact() -> None:
    torch.manual_seed(4)
    q = torch.randn(1, 20, HEADS, WIDTH, dtype=torch.float64)
    k, v = (torch.randn(1, 20, HEADS, WIDTH, dtype=torch.float64) for _ in range(2))
    sinks = torch.linspace(1.0, 5.0, HEADS, dtype=torch.float64)
    given = lz.attention(q, k, v, causal=False, sinks=sinks, layout="BSHD")
    for at in range(20):
        torch.testing.assert_close(given[0, at], _exact(q[0, at], k[0], v[0], sinks), rtol=1e-12, atol=1e-12)


def test_arguments_that_say_nothing_are_taken_with_logarithms_too() -> None:
    q = torch.randn(1, 8, HEADS, WIDTH)

    def call(q: Tensor) -> Any:
        return lz.attention(q, q, q, causal=True, attn_mask=None, dropout_p=0.0, return_lse=True, layout="BSHD")

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for one, other in zip(compiled(q), call(q), strict=True):
        torch.testing.assert_close(one, other)


def test_a_gradient_where_nothing_was_attended_to_is_a_number() -> None:
    lse = torch.full((1, 2, HEADS), -torch.inf, requires_grad=True)
    out = torch.zeros(1, 2, HEADS, WIDTH)
    merged, sums = lz.merge_states(out, lse, out, torch.full((1, 2, HEADS), -torch.inf))
    assert (merged == 0).all() and (sums == -torch.inf).all()
    (grad,) = torch.autograd.grad(merged.sum() + sums.exp().sum(), lse)
    assert grad.isfinite().all()
