"""Block-sparse attention, with blocks of one size and of many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
import torch
from conftest import Expected, Family, agrees, is_refused, run_stored
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    FLOATS,
    Stored,
    array,
    draws,
    examples,
    head_counts,
    indices,
    put_nan,
    scales,
    seldom,
    stored,
)

STORED = stored("sparse_attention", "attention.sparse.block", "attention.sparse.variable_block")
QKV = ("query", "key", "value")


def expected(kwargs: dict[str, Any]) -> list[Expected]:
    """What a call gives, of either kind."""
    names = ("indptr", "indices") if "indptr" in kwargs else ("block_mask", "block_row_sizes", "block_col_sizes")
    tensors: dict[str, Any] = {n: array(kwargs[n]) for n in (*QKV, *names)}
    rest = {n: kwargs[n] for n in ("block_rows", "block_cols", "scale", "layout") if n in kwargs}
    of_one_size = "indptr" in kwargs
    answer = (reference.sparse_block if of_one_size else reference.sparse_variable_block)(**tensors, **rest)
    return [Expected(answer.values, kwargs["query"].dtype, answer.growth)]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    if case.expect is None:
        is_refused(case)
        return
    want = expected(case.kwargs)
    agrees(case, want)
    run_stored(family, case, want)


@st.composite
def of_one_size(draw: st.DrawFn) -> dict[str, Any]:
    dtype, index = draw(st.sampled_from(FLOATS)), draw(indices)
    heads, kv_heads = draw(head_counts())
    rows, cols = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    row_blocks, col_blocks = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    head_dim = draw(st.sampled_from((1, 4, 8, 16, 33)))
    d = draw(draws(5))
    listed = [d.rng.permutation(col_blocks)[: draw(st.integers(0, col_blocks))] for _ in range(row_blocks)]
    starts = np.concatenate([[0], np.cumsum([len(x) for x in listed])]).astype(np.int64)
    kwargs: dict[str, Any] = {
        "query": d.floats(row_blocks * rows, heads, head_dim, dtype=dtype),
        "key": d.floats(col_blocks * cols, kv_heads, head_dim, dtype=dtype),
        "value": d.floats(col_blocks * cols, kv_heads, head_dim, dtype=dtype),
        "indptr": d.ints_as_they_are(starts, index),
        "indices": d.ints_as_they_are(np.concatenate([*listed, []]).astype(np.int64), index),
        "block_rows": rows,
        "block_cols": cols,
        "scale": draw(scales),
    }
    if draw(seldom()):
        spoiled = draw(st.sampled_from(QKV))
        kwargs[spoiled] = put_nan(kwargs[spoiled], d.rng)
    return kwargs


def _cut(draw: st.DrawFn, total: int, parts: int) -> list[int]:
    """A list of sizes, some of them zero, that add up."""
    cuts = sorted(draw(st.integers(0, total)) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def of_many_sizes(draw: st.DrawFn) -> dict[str, Any]:
    dtype, index = draw(st.sampled_from(FLOATS)), draw(indices)
    heads, kv_heads = draw(head_counts())
    seq_q, seq_k = draw(st.integers(0, 7)), draw(st.integers(0, 8))
    row_blocks, col_blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from((1, 4, 8, 16, 33)))
    layout = draw(st.sampled_from(("HND", "NHD")))
    d = draw(draws(6))

    def shape(seq: int, count: int) -> tuple[int, ...]:
        return (count, seq, head_dim) if layout == "HND" else (seq, count, head_dim)

    mask = d.rng.random((kv_heads, row_blocks, col_blocks)) < draw(st.sampled_from((0.6, 0.6, 0.2, 1.0)))
    row_sizes = [_cut(draw, seq_q, row_blocks) for _ in range(kv_heads)]
    col_sizes = [_cut(draw, seq_k, col_blocks) for _ in range(kv_heads)]
    kwargs: dict[str, Any] = {
        "query": d.floats(*shape(seq_q, heads), dtype=dtype),
        "key": d.floats(*shape(seq_k, kv_heads), dtype=dtype),
        "value": d.floats(*shape(seq_k, kv_heads), dtype=dtype),
        "block_mask": d.lay(torch.from_numpy(mask)),
        "block_row_sizes": d.ints_as_they_are(np.array(row_sizes), index),
        "block_col_sizes": d.ints_as_they_are(np.array(col_sizes), index),
        "scale": draw(scales),
    }
    if layout == "NHD" or draw(st.booleans()):
        kwargs["layout"] = layout
    if draw(seldom()):
        spoiled = draw(st.sampled_from(QKV))
        kwargs[spoiled] = put_nan(kwargs[spoiled], d.rng)
    return kwargs


@examples(1025)
@given(kwargs=of_one_size())
def test_blocks_of_one_size(kwargs: dict[str, Any], family: Family) -> None:
    family.check("sparse_attention", kwargs, expected(kwargs))


@examples(1025)
@given(kwargs=of_many_sizes())
def test_blocks_of_many_sizes(kwargs: dict[str, Any], family: Family) -> None:
    family.check("sparse_attention", kwargs, expected(kwargs))
