"""Attention of many queries in bfloat16 by AMX and by AVX-512 BF16, against float64."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from torch import Tensor

#: Around the edges of tiles: 16 and 32 queries, 16, 32 and 64 keys.
EDGES = st.sampled_from([2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129])
#: Elements of a head: 32 of a key and 16 of a value are one step.
WIDTHS = st.sampled_from([1, 16, 24, 32, 40, 64, 65, 128])


@pytest.fixture(params=[".avx512_bf16", ".amx"])
def isa(restored: None, request: pytest.FixtureRequest) -> str:
    """Each instruction set; those this CPU lacks are skipped."""
    listed = {kernel.kernel_id: kernel.available for kernel in lz.list_kernels()}
    if not listed[f"lz_cpu.attention.standard.prefill{request.param}"]:
        pytest.skip("this CPU lacks the instructions")
    found: str = request.param
    return found


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def attended(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None = None, softcap: float = 0.0
) -> Tensor:
    """Softmax of (heads, queries, keys) in float64; rows that may attend to nothing are zeros."""
    group = q.shape[-3] // k.shape[-3]
    keys, values = (one.double().repeat_interleave(group, -3) for one in (k, v))
    scores = q.double() @ keys.mT / q.shape[-1] ** 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores if bias is None else scores + bias.double()).masked_fill(~allowed, float("-inf"))
    return torch.softmax(scores, -1).nan_to_num(0.0) @ values


def near(got: Tensor, want: Tensor, v: Tensor) -> None:
    """A weight is off by 2^-9 of itself, and so is their sum; the result by 2^-9 of itself."""
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=8e-3, atol=float(v.abs().max()) * 2**-8)


def test_dense(isa: str) -> None:
    @examples(40)
    @given(
        sizes=st.tuples(EDGES, EDGES, WIDTHS, WIDTHS),
        heads=st.tuples(st.integers(1, 2), st.sampled_from([1, 3, 8])),
        kind=st.sampled_from(["causal", "window", "softcap", "bool", "float32", "bfloat16", "plain"]),
        layout=st.sampled_from(["BSHD", "BHSD"]),
        seed=st.integers(0, 2**16),
    )
    def run(sizes: tuple[int, int, int, int], heads: tuple[int, int], kind: str, layout: str, seed: int) -> None:
        queries, tokens, width, v_dim = sizes
        tokens = max(tokens, queries) if kind == "causal" else tokens
        kv_heads, group = heads
        q = drawn(seed, 2, kv_heads * group, queries, width)
        k, v = drawn(seed + 1, 2, kv_heads, tokens, width), drawn(seed + 2, 2, kv_heads, tokens, v_dim)
        ahead = torch.arange(tokens)[None] - torch.arange(queries)[:, None] - (tokens - queries)
        allowed, bias, how = torch.ones(queries, tokens, dtype=torch.bool), None, {"causal": kind == "causal"}
        options: dict[str, Any] = {}
        if kind == "causal":
            allowed = ahead <= 0
        elif kind == "window":
            left = seed % 70
            allowed, options = (ahead <= 3) & (-ahead <= left), {"window": (left, 3)}
        elif kind == "softcap":
            options = {"softcap": 3.0}
        elif kind == "bool":
            allowed = torch.rand(queries, tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
            options = {"attn_mask": allowed}
        elif kind != "plain":
            bias = drawn(seed + 3, queries, tokens).to(getattr(torch, kind))
            bias[seed % queries] = float("-inf")
            allowed, options = bias != float("-inf"), {"attn_mask": bias}
            bias = bias.masked_fill(~allowed, 0.0)
        op = "attention.standard.prefill" if group == 1 else "attention.gqa.prefill"
        lz.force_kernel(op, f"lz_cpu.{op}{isa}")
        turned = [one.transpose(1, 2) if layout == "BSHD" else one for one in (q, k, v)]
        got = lz.attention(*turned, **how, **options, layout=layout)
        want = attended(q, k, v, allowed, bias, options.get("softcap", 0.0))
        near(got.transpose(1, 2) if layout == "BSHD" else got, want, v)

    run()


def test_packed_sequences(isa: str) -> None:
    @examples(30)
    @given(
        lengths=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 70)), min_size=1, max_size=4),
        group=st.sampled_from([1, 4]),
        causal=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def run(lengths: list[tuple[int, int]], group: int, causal: bool, seed: int) -> None:
        pairs = [(queries, queries + more) for queries, more in lengths]
        rows, tokens = (torch.tensor([0, *of]).cumsum(0).int() for of in zip(*pairs, strict=True))
        q = drawn(seed, int(rows[-1]), 2 * group, 48)
        k, v = (drawn(seed + i, int(tokens[-1]), 2, 48) for i in (1, 2))
        op = "attention.standard.prefill.varlen" if group == 1 else "attention.gqa.prefill.varlen"
        lz.force_kernel(op, f"lz_cpu.{op}{isa}")
        longest = [max(of) for of in zip(*pairs, strict=True)]
        got = lz.varlen_attention(q, k, v, rows, tokens, *longest, causal=causal)
        for i, (queries, keys) in enumerate(pairs):
            own, near_by = slice(rows[i], rows[i + 1]), slice(tokens[i], tokens[i + 1])
            ahead = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
            turned = [one.transpose(0, 1) for one in (q[own], k[near_by], v[near_by])]
            near(got[own].transpose(0, 1), attended(*turned, (ahead <= 0) | (not causal)), v)

    run()
