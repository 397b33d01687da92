"""Activations."""

from __future__ import annotations

from typing import Any

import pytest
import reference
from conftest import Expected, Family, agrees, run_stored
from hypothesis import given
from hypothesis import strategies as st
from strategies import FLOATS, Draw, Stored, array, draws, examples, put_nan, seldom, stored

STORED = (
    stored("silu_mul", "activation.silu_mul")
    + stored("gelu", "activation.gelu")
    + stored("softmax", "activation.softmax")
)


def expected(name: str, kwargs: dict[str, Any]) -> list[Expected]:
    """What a call gives."""
    if name == "gelu":
        answer = reference.gelu(array(kwargs["input"]), kwargs.get("approximate", "none"))
        return [Expected(answer.values, kwargs["input"].dtype, answer.growth)]
    if name == "softmax":
        answer = reference.softmax(array(kwargs["input"]))
        return [Expected(answer.values, kwargs["input"].dtype, answer.growth)]
    answer = reference.silu_mul(array(kwargs["gate"]), array(kwargs["up"]))
    return [Expected(answer.values, kwargs["gate"].dtype, answer.growth)]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    want = expected(case.function, case.kwargs)
    agrees(case, want)
    run_stored(family, case, want)


@st.composite
def points(draw: st.DrawFn, *names: str) -> dict[str, Any]:
    dtype = draw(st.sampled_from(FLOATS))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    if draw(seldom()):
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.sampled_from((0, 65, 1025)))
    d: Draw = draw(draws(2))
    bound = draw(st.sampled_from((3.0, 3.0, 12.0, 100.0)))
    kwargs: dict[str, Any] = {name: d.floats(*shape, dtype=dtype, bound=bound) for name in names}
    if draw(seldom()):
        spoiled = draw(st.sampled_from(names))
        kwargs[spoiled] = put_nan(kwargs[spoiled], d.rng)
    return kwargs


@examples(1025)
@given(kwargs=points("gate", "up"))
def test_silu_mul(kwargs: dict[str, Any], family: Family) -> None:
    family.check("silu_mul", kwargs, expected("silu_mul", kwargs))


@examples(1025)
@given(kwargs=points("input"), approximate=st.sampled_from((None, "none", "tanh", "tanh")))
def test_gelu(kwargs: dict[str, Any], approximate: str | None, family: Family) -> None:
    kwargs = kwargs if approximate is None else kwargs | {"approximate": approximate}
    family.check("gelu", kwargs, expected("gelu", kwargs))


@examples(1025)
@given(kwargs=points("input"))
def test_softmax(kwargs: dict[str, Any], family: Family) -> None:
    family.check("softmax", kwargs, expected("softmax", kwargs))
