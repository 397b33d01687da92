"""Latent attention: contiguous, several sequences at once, and paged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from conftest import Expected, Family, agrees, is_refused, run_stored
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    FLOATS,
    FP8,
    Stored,
    array,
    draws,
    exact,
    examples,
    indices,
    numbers,
    put_nan,
    seldom,
    stored,
)

STORED = stored(
    "mla_attention",
    "attention.mla.prefill",
    "attention.mla.decode",
    "attention.mla.decode.paged",
    "attention.mla.prefill.paged",
)


def expected(kwargs: dict[str, Any]) -> list[Expected]:
    """What a call gives."""
    answer = reference.mla_attention(
        array(kwargs["q_nope"]),
        array(kwargs["q_pe"]),
        array(kwargs["ckv"]),
        array(kwargs["kpe"]),
        kwargs["scale"],
        causal=kwargs.get("causal", True),
        qo_indptr=exact(kwargs.get("qo_indptr")),
        kv_indptr=exact(kwargs.get("kv_indptr")),
        block_tables=exact(kwargs.get("block_tables")),
        context_lens=exact(kwargs.get("context_lens")),
    )
    return [Expected(answer.values, kwargs["q_nope"].dtype, answer.growth)]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    if case.expect is None:
        is_refused(case)
        return
    want = expected(case.kwargs)
    agrees(case, want)
    run_stored(family, case, want)


@st.composite
def sizes_and_dtypes(draw: st.DrawFn) -> dict[str, Any]:
    dtype = draw(st.sampled_from(FLOATS))
    return {
        "dtype": dtype,
        "cache": draw(st.sampled_from((*FLOATS, *FP8))) if draw(seldom(3)) else dtype,
        "heads": draw(st.integers(1, 4)),
        "ckv": draw(st.sampled_from((1, 4, 8, 16, 33, 512))),
        "kpe": draw(st.sampled_from((1, 2, 4, 8))),
        "scale": draw(st.sampled_from((0.05, 0.2, 0.5, 1.0))),
        "d": draw(draws(6)),
    }


@st.composite
def contiguous(draw: st.DrawFn) -> dict[str, Any]:
    s = draw(sizes_and_dtypes())
    d, heads = s["d"], s["heads"]
    sequences = draw(st.integers(1, 3)) if draw(st.booleans()) else 0
    queries = [draw(st.integers(0, 4)) for _ in range(max(sequences, 1))]
    keys = [draw(st.integers(0, 6)) for _ in range(max(sequences, 1))]
    if draw(seldom(3)):
        queries = [1] + [0] * (len(queries) - 1)
    middle = (1,) if draw(st.booleans()) else ()
    kwargs: dict[str, Any] = {
        "q_nope": d.floats(sum(queries), heads, s["ckv"], dtype=s["dtype"]),
        "q_pe": d.floats(sum(queries), heads, s["kpe"], dtype=s["dtype"]),
        "ckv": d.floats(sum(keys), *middle, s["ckv"], dtype=s["cache"]),
        "kpe": d.floats(sum(keys), *middle, s["kpe"], dtype=s["cache"]),
        "scale": s["scale"],
        "causal": draw(st.booleans()),
    }
    if sequences:
        index = draw(indices)
        for name, counts in (("qo_indptr", queries), ("kv_indptr", keys)):
            kwargs[name] = d.ints_as_they_are(np.concatenate([[0], np.cumsum(counts)]), index)
    if draw(seldom()):
        spoiled = draw(st.sampled_from(("q_nope", "q_pe", "ckv", "kpe")))
        kwargs[spoiled] = put_nan(kwargs[spoiled], d.rng)
    return kwargs


@st.composite
def paged(draw: st.DrawFn) -> dict[str, Any]:
    s = draw(sizes_and_dtypes())
    d, heads = s["d"], s["heads"]
    batch = draw(st.integers(1, 3)) if not draw(seldom()) else 0
    size, pages, most = draw(st.sampled_from((1, 2, 3, 8))), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    lengths = [draw(st.integers(0, most * size)) for _ in range(batch)]
    tables = d.rng.integers(0, pages, (batch, most))
    for table, length in zip(tables, lengths, strict=True):
        table[-(-length // size) :] = draw(st.sampled_from((-1, 10**6, 0)))
    index = draw(indices)
    packed: dict[str, Any] = {}
    rows = batch
    if draw(st.booleans()):
        counts = [draw(st.integers(0, 4)) for _ in range(batch)]
        rows = sum(counts) + draw(st.integers(0, 1))
        packed = {"qo_indptr": d.ints_as_they_are(np.cumsum([0, *counts]), index), "causal": draw(st.booleans())}
    return packed | {
        "q_nope": d.floats(rows, heads, s["ckv"], dtype=s["dtype"]),
        "q_pe": d.floats(rows, heads, s["kpe"], dtype=s["dtype"]),
        "ckv": d.lay(numbers(d.rng, (pages, size, s["ckv"]), s["cache"])),
        "kpe": d.lay(numbers(d.rng, (pages, size, s["kpe"]), s["cache"])),
        "scale": s["scale"],
        "block_tables": d.ints_as_they_are(tables, index),
        "context_lens": d.ints_as_they_are(lengths, index),
    }


@examples(1200)
@given(kwargs=contiguous())
def test_contiguous(kwargs: dict[str, Any], family: Family) -> None:
    family.check("mla_attention", kwargs, expected(kwargs))


@examples(850)
@given(kwargs=paged())
def test_paged(kwargs: dict[str, Any], family: Family) -> None:
    family.check("mla_attention", kwargs, expected(kwargs))
