"""Upkeep of a paged cache: what is written, and that nothing else is."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import numpy as np
import pytest
import reference
import torch
from conftest import Family, memory, twin
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    FLOATS,
    FP8,
    Array,
    Draw,
    Stored,
    array,
    draws,
    examples,
    indices,
    numbers,
    put_nan,
    seldom,
    stored,
)

STORED = stored("kv_append", "kv_cache.append") + stored("kv_compact", "kv_cache.compact")
CACHES = ("key_cache", "value_cache")


def rounded(values: Array, dtype: torch.dtype) -> Array:
    """As the dtype stores them, in one rounding: half to even."""
    if dtype == torch.float64:
        return values
    info = torch.finfo(dtype)
    _, exponent = np.frexp(np.maximum(np.abs(np.nan_to_num(values)), info.smallest_normal))
    unit = info.eps * 2.0 ** (exponent - 1.0)
    return np.asarray(np.round(values / unit) * unit)


def expected(name: str, kwargs: dict[str, Any]) -> dict[str, Array]:
    """Both caches after a call."""
    if name == "kv_compact":
        moves = [(int(a), int(b)) for a, b in kwargs["moves"].tolist()]
        return {n: reference.kv_compact(array(kwargs[n]), moves) for n in CACHES}
    slots = kwargs["slot_mapping"].tolist()
    layout = kwargs.get("layout", "NHD")
    return {
        n: reference.kv_append(
            array(kwargs[n]), rounded(array(kwargs[n.removesuffix("_cache")]), kwargs[n].dtype), slots, layout
        )
        for n in CACHES
    }


def refused_untouched(function: str, kwargs: dict[str, Any], match: str) -> None:
    """An error that names the argument, and not a byte of the caches is different after it."""
    fresh = {n: twin(v) if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()}
    with pytest.raises(lz.InvalidCallError, match=f"BAD_DATA.*({match})"):
        getattr(lz, function)(**fresh)
    for n in CACHES:
        assert memory(fresh[n]) == memory(kwargs[n]), n


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    if case.expect is None:
        refused_untouched(case.function, case.kwargs, "slot_mapping|moves")
        return
    want = expected(case.function, case.kwargs)
    for n in CACHES:
        np.testing.assert_array_equal(want[n], case.expect[n].values, err_msg=n)
    family.check_update(case.function, case.kwargs, want)
    family.cases -= 1


@st.composite
def caches(draw: st.DrawFn, dtype: torch.dtype, d: Draw) -> dict[str, Any]:
    pages, size = draw(st.integers(1, 5)), draw(st.sampled_from((1, 2, 4, 8)))
    heads, dim = draw(st.integers(1, 4)), draw(st.sampled_from((1, 3, 8, 16)))
    layout = draw(st.sampled_from(("NHD", "HND")))
    shape = (pages, size, heads, dim) if layout == "NHD" else (pages, heads, size, dim)
    kwargs: dict[str, Any] = {n: d.lay(numbers(d.rng, shape, dtype), writable=True) for n in CACHES}
    if layout == "HND" or draw(st.booleans()):
        kwargs["layout"] = layout
    return kwargs


def sizes_of(kwargs: dict[str, Any]) -> tuple[int, int, int, int]:
    """Pages, slots in one, heads, head dimension."""
    pages, a, b, dim = kwargs["key_cache"].shape
    return (pages, b, a, dim) if kwargs.get("layout") == "HND" else (pages, a, b, dim)


@st.composite
def appends(draw: st.DrawFn) -> dict[str, Any]:
    dtype = draw(st.sampled_from(FLOATS))
    d: Draw = draw(draws(5))
    kwargs = draw(caches(draw(st.sampled_from((*FLOATS, *FP8))) if draw(seldom(3)) else dtype, d))
    pages, size, heads, dim = sizes_of(kwargs)
    tokens = draw(st.integers(0, 6))
    slots = d.rng.integers(-2, pages * size, tokens)
    for n in ("key", "value"):
        kwargs[n] = d.floats(tokens, heads, dim, dtype=dtype)
    if draw(seldom()):
        kwargs["key"] = put_nan(kwargs["key"], d.rng)
    return kwargs | {"slot_mapping": d.ints(slots, draw(indices))}


@st.composite
def moves(draw: st.DrawFn) -> dict[str, Any]:
    d: Draw = draw(draws(3))
    kwargs = draw(caches(draw(st.sampled_from((*FLOATS, *FP8))), d))
    pages = sizes_of(kwargs)[0]
    if draw(seldom()):
        kwargs["key_cache"] = put_nan(kwargs["key_cache"], d.rng)
    return kwargs | {"moves": d.ints(d.rng.integers(0, pages, (draw(st.integers(0, 5)), 2)), draw(indices))}


@examples(1250)
@given(kwargs=appends())
def test_kv_append(kwargs: dict[str, Any], family: Family) -> None:
    family.check_update("kv_append", kwargs, expected("kv_append", kwargs))


@examples(800)
@given(kwargs=moves())
def test_kv_compact(kwargs: dict[str, Any], family: Family) -> None:
    family.check_update("kv_compact", kwargs, expected("kv_compact", kwargs))


@examples(100)
@given(kwargs=appends(), beyond=st.sampled_from((0, 1, 10**6)))
def test_a_slot_beyond_the_cache_is_an_error_and_nothing_is_written(kwargs: dict[str, Any], beyond: int) -> None:
    pages, size, _, _ = sizes_of(kwargs)
    slots = kwargs["slot_mapping"].clone(memory_format=torch.contiguous_format)
    if len(slots):
        slots[-1] = pages * size + beyond
        refused_untouched("kv_append", kwargs | {"slot_mapping": slots}, "slot_mapping")


@examples(100)
@given(kwargs=moves(), side=st.sampled_from((0, 1)), wrong=st.sampled_from((0, 1000, -1)))
def test_a_page_beyond_the_cache_is_an_error_and_nothing_is_written(
    kwargs: dict[str, Any], side: int, wrong: int
) -> None:
    pairs = kwargs["moves"].clone(memory_format=torch.contiguous_format)
    if len(pairs):
        pairs[-1, side] = wrong if wrong < 0 else sizes_of(kwargs)[0] + wrong
        refused_untouched("kv_compact", kwargs | {"moves": pairs}, "moves")
