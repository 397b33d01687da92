"""Attention over a paged cache: one query per sequence, and packed queries."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import numpy as np
import pytest
import reference
import torch
from conftest import Expected, Family, agrees, is_refused, run_stored
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    FLOATS,
    FP8,
    Draw,
    Stored,
    array,
    draws,
    exact,
    examples,
    head_counts,
    indices,
    numbers,
    put_nan,
    scales,
    seldom,
    softcaps,
    stored,
)

KINDS = [f"attention.{kind}.{phase}.paged" for kind in ("standard", "gqa") for phase in ("prefill", "decode")]
STORED = stored("paged_attention", *KINDS)


def expected(kwargs: dict[str, Any]) -> list[Expected]:
    """What a call gives."""
    tensors = ("query", "key_cache", "value_cache", "block_tables", "context_lens")
    answer = reference.paged_attention(
        *(array(kwargs[n]) for n in tensors),
        scale=kwargs.get("scale"),
        cu_seqlens_q=exact(kwargs.get("cu_seqlens_q")),
        causal=kwargs.get("causal", True),
        window_left=-1 if kwargs.get("window") is None else kwargs["window"],
        softcap=kwargs.get("softcap", 0.0),
        layout=kwargs.get("layout", "NHD"),
        sinks=None if kwargs.get("sinks") is None else array(kwargs["sinks"]),
    )
    return [Expected(answer.values, kwargs["query"].dtype, answer.growth)]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    if case.expect is None:
        is_refused(case)
        return
    want = expected(case.kwargs)
    agrees(case, want)
    run_stored(family, case, want)


def cache(d: Draw, tables: np.ndarray, lengths: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[pages, slots, heads, dim] with NaN wherever no sequence has a token."""
    values = numbers(d.rng, shape, torch.float64)
    used = np.zeros(shape[:2], dtype=bool)
    for table, length in zip(tables, lengths, strict=True):
        for j in range(length):
            used[int(table[j // shape[1]]), j % shape[1]] = True
    values[torch.from_numpy(~used)] = float("nan")
    return values.to(dtype)


@st.composite
def paged(draw: st.DrawFn, packed: bool, long: bool = False) -> dict[str, Any]:
    dtype = draw(st.sampled_from(FLOATS))
    cache_dtype = draw(st.sampled_from((*FLOATS, *FP8))) if draw(seldom(3)) else dtype
    heads, kv_heads = draw(head_counts())
    batch = draw(st.integers(1, 3)) if not draw(seldom()) else 0
    size = draw(st.sampled_from((1, 2, 3, 4, 8)))
    pages = draw(st.integers(1, 6))
    most = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from((1, 4, 8, 16, 33)))
    if long:
        size, pages, most, head_dim = draw(st.sampled_from(((16, 40, 12, 64), (32, 20, 9, 128), (256, 3, 2, 80))))
    layout = draw(st.sampled_from(("NHD", "HND")))
    index = draw(indices)
    d = draw(draws(6))
    shared = draw(st.integers(1, most * size)) if draw(seldom(3)) else 0
    lengths = [draw(st.integers(shared, most * size)) for _ in range(batch)]
    tables = d.rng.integers(0, pages, (batch, most))
    tables[:, : shared // size] = tables[:1, : shared // size]
    caches = []
    for _ in range(2):
        values = cache(d, tables, lengths, (pages, size, kv_heads, head_dim), cache_dtype)
        caches.append(d.lay(values if layout == "NHD" else values.transpose(1, 2), writable=True))
    for table, length in zip(tables, lengths, strict=True):
        # Page indices beyond the context are not read.
        table[-(-length // size) :] = draw(st.sampled_from((-1, 10**6, 0)))
    kwargs: dict[str, Any] = {
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_tables": d.ints_as_they_are(tables, index),
        "context_lens": d.ints_as_they_are(lengths, index),
        "scale": draw(scales),
        "softcap": draw(softcaps),
        "layout": layout,
    }
    if layout == "NHD" and draw(st.booleans()):
        del kwargs["layout"]
    if shared or draw(seldom(3)):
        kwargs["shared_prefix"] = shared
    if draw(seldom(3)):
        kwargs["window"] = draw(st.sampled_from((0, 1, 2, 7)))
    if draw(seldom(3)):
        kwargs["sinks"] = d.floats(heads, dtype=draw(st.sampled_from((torch.float32, dtype))))
    if packed:
        counts = [length if draw(seldom(4)) else draw(st.integers(0, 4)) for length in lengths]
        starts = np.concatenate([[0], np.cumsum(np.array(counts, dtype=np.int64))])
        kwargs["query"] = d.floats(int(starts[-1]), heads, head_dim, dtype=dtype)
        kwargs["cu_seqlens_q"] = d.ints_as_they_are(starts, index)
        kwargs["causal"] = draw(st.booleans())
    else:
        between = (1,) if draw(seldom(3)) else ()
        kwargs["query"] = d.floats(batch, *between, heads, head_dim, dtype=dtype)
    if draw(seldom()):
        kwargs["query"] = put_nan(kwargs["query"], d.rng)
    return kwargs


@examples(1000)
@given(kwargs=paged(packed=False))
def test_decode(kwargs: dict[str, Any], family: Family) -> None:
    family.check("paged_attention", kwargs, expected(kwargs))


@examples(1000)
@given(kwargs=paged(packed=True))
def test_prefill(kwargs: dict[str, Any], family: Family) -> None:
    family.check("paged_attention", kwargs, expected(kwargs))


@examples(80)
@given(kwargs=st.booleans().flatmap(lambda packed: paged(packed, long=True)))
def test_long_contexts(kwargs: dict[str, Any], family: Family) -> None:
    family.check("paged_attention", kwargs, expected(kwargs))


def test_no_more_is_shared_than_there_are_pages() -> None:
    query, cache = torch.randn(2, 4, 8), torch.randn(6, 4, 2, 8)
    tables, lengths = torch.tensor([[0, 1, 2], [0, 3, 4]]), torch.tensor([10, 12])
    plain = lz.paged_attention(query, cache, cache, tables, lengths)
    for shared in (0, 3, 4, 7, None):
        assert torch.equal(lz.paged_attention(query, cache, cache, tables, lengths, shared_prefix=shared), plain)
    with pytest.raises(lz.InvalidCallError, match=r"hold \(seq_k=12, shared_prefix=13\)") as raised:
        lz.paged_attention(query, cache, cache, tables, lengths, shared_prefix=13)
    assert raised.value.code == "CONSTRAINT_FAILED" and "max_blocks * block_size" in str(raised.value.hint)
    for bad, expected in ((-1, "is -1, expected zero or more"), (2.5, "is 2.5, expected an integer")):
        with pytest.raises(lz.errors.ArgumentTypeError, match=f"'shared_prefix' {expected}"):
            lz.paged_attention(query, cache, cache, tables, lengths, shared_prefix=bad)  # type: ignore[arg-type]


def test_a_kernel_that_asks_is_told_the_promise() -> None:
    query, cache = torch.randn(2, 4, 8), torch.randn(6, 4, 2, 8)
    tables, lengths = torch.tensor([[0, 1, 2], [0, 3, 4]]), torch.tensor([10, 12])
    told: list[int] = []

    @lz.register_kernel(
        operation="attention.gqa.decode.paged",
        kernel_id="mine.paged",
        platform="cpu",
        supported_dtypes=["float32"],
        layouts=["NHD"],
        priority=100,
        dims={"head_dim": {}, "shared_prefix": {"min": 4}},
        conditions=["shared_prefix % block_size == 0"],
        supports_gqa=True,
        supports_kv_cache_dtypes=["float32"],
        supports_kv_cache_layouts=["NHD"],
        supports_kv_strategies=["paged"],
    )
    def mine(query, key_cache, value_cache, block_tables, context_lens, shared_prefix):  # type: ignore[no-untyped-def]
        told.append(shared_prefix)
        return torch.zeros_like(query)

    try:
        for shared in (0, 3, 4, 5, 8):
            lz.paged_attention(query, cache, cache, tables, lengths, shared_prefix=shared)
    finally:
        lz.unregister_kernel("mine.paged")
    assert told == [4, 8]
