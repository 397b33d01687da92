"""Calls that follow from what an operation means, at the edges of its parameters: each works, and is right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import layerzero as lz
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from torch import Tensor


def by_hand(
    queries: Tensor, keys: Tensor, values: Tensor, allowed: np.ndarray[Any, Any], softcap: float = 0.0
) -> np.ndarray[Any, Any]:
    """Attention of (rows, heads, dim) over (keys, kv heads, dim) in float64, row by row."""
    q, k, v = (t.double().numpy() for t in (queries, keys, values))
    output, group = np.zeros(q.shape), q.shape[1] // k.shape[1]
    for row, head in itertools.product(range(q.shape[0]), range(q.shape[1])):
        seen = np.flatnonzero(allowed[row])
        if not len(seen):
            continue
        scores = k[seen, head // group] @ q[row, head] / math.sqrt(q.shape[2])
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        output[row, head] = weights @ v[seen, head // group] / weights.sum()
    return output


def every_kernel(operation: str, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """The result of the function, and of each kernel that takes the call."""
    yield "chosen", getattr(lz, operation)(*args, **kwargs)
    op = lz.which(operation, *args, **kwargs).op
    for kernel in lz.list_kernels(op):
        if kernel.available and lz.validate(kernel.kernel_id, *args, **kwargs)[0]:
            yield kernel.kernel_id, lz.run_kernel(kernel.kernel_id, *args, **kwargs)


@st.composite
def paged_calls(draw: st.DrawFn) -> dict[str, Any]:
    """A paged cache with sequences of several lengths, and how the queries may look."""
    block = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    kv_heads = draw(st.integers(1, 2))
    pages = [-(-length // block) for length in lengths]
    order = draw(st.permutations(range(sum(pages))))
    tables = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    taken = iter(order)
    for sequence, count in enumerate(pages):
        tables[sequence, :count] = torch.tensor([next(taken) for _ in range(count)])
    return {
        "block": block,
        "lengths": lengths,
        "tables": tables,
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 2)),
        "window": (draw(st.integers(-1, 5)), draw(st.integers(-1, 5))),
        "causal": draw(st.booleans()),
        "softcap": draw(st.sampled_from((0.0, 0.5, 1e30))),
        "seed": draw(st.integers(0, 99)),
    }


def contexts(case: dict[str, Any]) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """The caches, and each sequence's keys and values by themselves."""
    torch.manual_seed(case["seed"])
    shape = (int(case["tables"].max()) + 4, case["block"], case["kv_heads"], 8)
    caches = torch.randn(shape), torch.randn(shape)
    whole = [
        tuple(cache[table.long()].flatten(0, 1)[:length] for cache in caches)
        for table, length in zip(case["tables"], case["lengths"], strict=True)
    ]
    return *caches, whole  # type: ignore[return-value]


def reached(rows: int, keys: int, case: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Where the last `rows` positions of `keys` may look."""
    ahead = np.arange(keys)[None] - np.arange(keys - rows, keys)[:, None]
    left, right = case["window"]
    allowed = np.ones(ahead.shape, dtype=bool)
    if case["causal"]:
        allowed &= ahead <= 0
    if left >= 0:
        allowed &= -ahead <= left
    if right >= 0:
        allowed &= ahead <= right
    return allowed


@examples(200)
@given(paged_calls())
def test_paged_decode_with_any_window_and_causal_or_not(case: dict[str, Any]) -> None:
    key_cache, value_cache, whole = contexts(case)
    query = torch.randn(len(whole), case["heads"], 8)
    lengths = torch.tensor(case["lengths"], dtype=torch.int32)
    options = {name: case[name] for name in ("window", "causal", "softcap")}
    want = np.stack(
        [
            by_hand(query[i : i + 1], keys, values, reached(1, len(keys), case), case["softcap"])[0]
            for i, (keys, values) in enumerate(whole)
        ]
    )
    for name, got in every_kernel("paged_attention", query, key_cache, value_cache, case["tables"], lengths, **options):
        np.testing.assert_allclose(got.double().numpy(), want, rtol=1e-5, atol=1e-5, err_msg=name)


@examples(200)
@given(paged_calls(), st.data())
def test_paged_prefill_with_any_window(case: dict[str, Any], data: st.DataObject) -> None:
    key_cache, value_cache, whole = contexts(case)
    rows = [data.draw(st.integers(0, len(keys))) for keys, _ in whole]
    query = torch.randn(sum(rows), case["heads"], 8)
    ends = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    lengths = torch.tensor(case["lengths"], dtype=torch.int32)
    options = {name: case[name] for name in ("window", "causal", "softcap")} | {"cu_seqlens_q": ends}
    parts = [
        by_hand(query[start:end], keys, values, reached(end - start, len(keys), case), case["softcap"])
        for (start, end), (keys, values) in zip(itertools.pairwise(ends.tolist()), whole, strict=True)
    ]
    want = np.concatenate(parts)
    for name, got in every_kernel("paged_attention", query, key_cache, value_cache, case["tables"], lengths, **options):
        np.testing.assert_allclose(got.double().numpy(), want, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("window", [-2, (-2, 0), (0, -2)])
def test_a_window_that_makes_no_sense_is_refused_by_its_name(prefill: bool, window: Any) -> None:
    cache, ones = torch.randn(2, 4, 2, 8), torch.ones(1, dtype=torch.int32)
    options = {"cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32)} if prefill else {}
    with pytest.raises(lz.InvalidCallError, match="a side of 'window' is smaller than -1"):
        lz.paged_attention(torch.randn(1, 2, 8), cache, cache, ones[None] - 1, ones, window=window, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [1e29, 1e30])
def test_a_large_softcap_changes_nothing(dtype: torch.dtype, softcap: float) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, 16).to(dtype) for _ in range(3))
    want = by_hand(q[0], k[0], v[0], np.tril(np.ones((6, 6), dtype=bool)))
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(dtype, 1e-5)
    for name, got in every_kernel("attention", q, k, v, softcap=softcap, layout="BSHD"):
        np.testing.assert_allclose(got[0].double().numpy(), want, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("softcap", [-1.0, math.inf, 1.1e30])
def test_a_softcap_without_meaning_is_refused(softcap: float) -> None:
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(lz.InvalidCallError, match="softcap is negative or above 1e30"):
        lz.attention(x, x, x, softcap=softcap, layout="BSHD")


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel", "blockwise"])
def test_dequantize_takes_all_that_quantize_returns(dtype: str, granularity: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 64)
    values, scales, zeros = lz.quantize(x, dtype, granularity=granularity)
    assert not zeros.any()
    factor = scales.double().numpy()
    if granularity == "blockwise":
        factor = np.repeat(factor, 32, axis=1)
    want = values.double().numpy() * factor
    for name, got in every_kernel("dequantize", values, scales, zeros, granularity=granularity):
        np.testing.assert_allclose(got.double().numpy(), want, rtol=1e-6, atol=0.0, err_msg=name)
    if granularity == "per_tensor":
        # As people write it.
        np.testing.assert_allclose(lz.dequantize(*lz.quantize(x, dtype)).double().numpy(), want, rtol=1e-6)


def test_the_layout_of_listed_blocks_may_be_said() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 4, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    blocks = {
        "indptr": torch.tensor([0, 1, 3, 3], dtype=torch.int32),
        "indices": torch.tensor([1, 0, 1], dtype=torch.int32),
        "block_rows": 2,
        "block_cols": 4,
    }
    allowed = np.zeros((6, 8), dtype=bool)
    allowed[0:2, 4:8] = allowed[2:4, :] = True
    want = by_hand(q, k, v, allowed)
    for name, got in every_kernel("sparse_attention", q, k, v, **blocks, layout="NHD"):
        np.testing.assert_allclose(got.double().numpy(), want, rtol=1e-5, atol=1e-5, err_msg=name)
    with pytest.raises(lz.InvalidCallError, match="HND.*NHD"):
        lz.sparse_attention(q, k, v, **blocks, layout="HND")
