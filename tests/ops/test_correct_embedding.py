"""Table lookup: bits are moved, so results are equal or wrong."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import pytest
import reference
import torch
from conftest import Expected, Family, agrees, is_refused, run_stored
from hypothesis import given
from hypothesis import strategies as st
from strategies import FLOATS, Draw, Stored, array, draws, examples, indices, put_nan, seldom, stored

STORED = stored("embedding", "embedding.lookup")


def expected(kwargs: dict[str, Any]) -> list[Expected]:
    """What a call gives."""
    answer = reference.embedding(array(kwargs["indices"]), array(kwargs["weight"]))
    return [Expected(answer.values, kwargs["weight"].dtype, exact=True)]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    if case.expect is None:
        is_refused(case)
        return
    want = expected(case.kwargs)
    agrees(case, want)
    run_stored(family, case, want)


@st.composite
def lookups(draw: st.DrawFn) -> dict[str, Any]:
    vocab, hidden = draw(st.integers(1, 40)), draw(st.sampled_from((1, 2, 3, 8, 16, 33, 64, 1025)))
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    if draw(seldom()):
        shape, hidden = draw(st.sampled_from((([*shape, 0], hidden), (shape, 0))))
    d: Draw = draw(draws(2))
    kwargs = {
        "indices": d.ints(d.rng.integers(0, vocab, shape), draw(indices)),
        "weight": d.floats(vocab, hidden, dtype=draw(st.sampled_from(FLOATS))),
    }
    if draw(seldom(4)):
        kwargs["weight"] = put_nan(kwargs["weight"], d.rng)
    return kwargs


@examples(2050)
@given(kwargs=lookups())
def test_embedding(kwargs: dict[str, Any], family: Family) -> None:
    family.check("embedding", kwargs, expected(kwargs))


@examples(200)
@given(kwargs=lookups(), beyond=st.sampled_from((0, 1, 1000, -1, -41)))
def test_an_index_outside_the_table_is_an_error(kwargs: dict[str, Any], beyond: int) -> None:
    wrong = kwargs["indices"].clone(memory_format=torch.contiguous_format)
    if wrong.numel() == 0:
        return
    wrong.view(-1)[-1] = beyond if beyond < 0 else kwargs["weight"].shape[0] + beyond
    with pytest.raises(lz.InvalidCallError, match="BAD_DATA.*indices"):
        lz.embedding(wrong, kwargs["weight"])
