"""Packed sequences, logarithms, sinks and merged states on a GPU: every kernel that takes a call, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import loading
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CLOSE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5}


@pytest.fixture(autouse=True)
def unproven() -> Any:
    """Kernels that were never run may be used: this is where they are run."""
    before = loading.setting("backends.unproven")
    lz.configure(backends__unproven=["flash_attn", "flash_attn_3", "flash_attn_4_pages", "flashinfer_prefill"])
    yield
    lz.configure(backends__unproven=before or None)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows, heads, element in float64; and the logarithms."""
    group, rows, keys = q.shape[1] // k.shape[1], q.shape[0], k.shape[0]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[2] ** -0.5
    if causal:
        behind = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        scores = scores.masked_fill(~behind, -torch.inf)
    lse = scores.logsumexp(-1)
    joined = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None])
    weights = (scores - joined[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse.transpose(0, 1)


def held(function: str, want: tuple[Tensor, ...], dtype: torch.dtype, *args: Any, **kwargs: Any) -> set[str]:
    """The kernels that take the call; each gives what is wanted."""
    ran = set()
    for kernel in lz.list_kernels(lz.which(function, *args, **kwargs).op):
        if kernel.available and lz.validate(kernel.kernel_id, *args, **kwargs)[0]:
            got = lz.run_kernel(kernel.kernel_id, *args, **kwargs)
            for one, wanted in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
                torch.testing.assert_close(
                    one.double(), wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype], msg=lambda m, k=kernel: f"{k}: {m}"
                )
            ran.add(kernel.kernel_id)
    return ran


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences(dtype: torch.dtype, causal: bool) -> None:
    torch.manual_seed(0)
    rows, keys = [0, 70, 70, 201, 202], [0, 70, 75, 206, 500]
    q, k, v = (torch.randn(n, h, 64, device="cuda").to(dtype) for n, h in ((202, 8), (500, 2), (500, 2)))
    bounds = [torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in (rows, keys)]
    sinks = torch.randn(8, device="cuda")
    for options in ({}, {"sinks": sinks}):
        parts = [
            attend(q[a:b], k[c:d], v[c:d], causal, options.get("sinks"))
            for (a, b), (c, d) in zip(itertools.pairwise(rows), itertools.pairwise(keys), strict=True)
        ]
        out, lse = (torch.cat([part[i] for part in parts]) for i in range(2))
        assert held("varlen_attention", (out,), dtype, q, k, v, *bounds, causal=causal, **options)
    assert held(
        "varlen_attention_lse", (attended(q, k, v, rows, keys, causal), lse), dtype, q, k, v, *bounds, causal=causal
    )


def attended(q: Tensor, k: Tensor, v: Tensor, rows: list[int], keys: list[int], causal: bool) -> Tensor:
    pairs = zip(itertools.pairwise(rows), itertools.pairwise(keys), strict=True)
    return torch.cat([attend(q[a:b], k[c:d], v[c:d], causal)[0] for (a, b), (c, d) in pairs])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("causal", [True, False])
def test_dense_attention_and_merged_states(dtype: torch.dtype, causal: bool) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, n, h, 128, device="cuda").to(dtype) for n, h in ((130, 8), (300, 2), (300, 2)))
    sinks = torch.randn(8, device="cuda")
    out, lse = attend(q[0], k[0], v[0], causal)
    assert held("attention_lse", (out[None], lse[None]), dtype, q, k, v, causal, layout="BSHD")
    joined = attend(q[0], k[0], v[0], causal, sinks)[0]
    assert held("attention", (joined[None],), dtype, q, k, v, causal, sinks=sinks, layout="BSHD")
    parts = [attend(q[0], k[0, part], v[0, part], False) for part in (slice(0, 90), slice(90, 300))]
    states = [t.to(dtype) if i % 2 == 0 else t.float() for i, t in enumerate(itertools.chain(*parts))]
    assert held("merge_states", attend(q[0], k[0], v[0], False), dtype, *(t.contiguous() for t in states))


@pytest.mark.parametrize("dtype", CLOSE)
def test_pages(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    lengths, counts = [40, 7, 100], [3, 1, 30]
    ends = [0, *itertools.accumulate(counts)]
    q = torch.randn(sum(counts), 8, 64, device="cuda").to(dtype)
    caches = [torch.randn(30, 16, 2, 64, device="cuda").to(dtype) for _ in range(2)]
    tables = torch.randperm(30, device="cuda")[:21].view(3, 7).int()
    tensors = (tables, torch.tensor(lengths, dtype=torch.int32, device="cuda"))
    bounds, sinks = torch.tensor(ends, dtype=torch.int32, device="cuda"), torch.randn(8, device="cuda")
    tokens = [[c[tables[i].long()].flatten(0, 1)[:n] for c in caches] for i, n in enumerate(lengths)]
    for joined in (None, sinks):
        parts = [attend(q[a:b], *tokens[i], True, joined) for i, (a, b) in enumerate(itertools.pairwise(ends))]
        out, lse = (torch.cat([part[i] for part in parts]) for i in range(2))
        if joined is None:
            assert held("paged_attention_lse", (out, lse), dtype, q, *caches, *tensors, cu_seqlens_q=bounds)
        else:
            assert held("paged_attention", (out,), dtype, q, *caches, *tensors, cu_seqlens_q=bounds, sinks=sinks)


@pytest.mark.parametrize("dtype", CLOSE)
def test_several_queries_over_latent_pages(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    lengths, ends = [40, 7, 100], [0, 3, 4, 8]
    nope, pe = (torch.randn(8, 16, n, device="cuda").to(dtype) for n in (512, 64))
    ckv, kpe = (torch.randn(30, 16, n, device="cuda").to(dtype) for n in (512, 64))
    tables = torch.randperm(30, device="cuda")[:21].view(3, 7).int()
    scale, parts = 0.05, []
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        latent, turned = (c[tables[i].long()].flatten(0, 1)[: lengths[i]] for c in (ckv, kpe))
        query = torch.cat((nope[a:b], pe[a:b]), -1).double() * (scale * (512 + 64) ** 0.5)
        parts.append(attend(query, torch.cat((latent, turned), -1)[:, None], latent[:, None], True)[0])
    bounds, context = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (ends, lengths))
    options = {"block_tables": tables, "context_lens": context, "qo_indptr": bounds}
    assert held("mla_attention", (torch.cat(parts),), dtype, nope, pe, ckv, kpe, scale, **options)
