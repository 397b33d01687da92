"""Norms over the last dimension."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from conftest import Expected, Family, agrees, run_stored
from hypothesis import given
from hypothesis import strategies as st
from strategies import FLOATS, Draw, Stored, array, draws, exact, examples, put_nan, seldom, stored

STORED = (
    stored("rms_norm", "norm.rms")
    + stored("layer_norm", "norm.layer")
    + stored("fused_add_rms_norm", "norm.fused_add_rms")
)


def expected(name: str, kwargs: dict[str, Any]) -> list[Expected]:
    """What a call gives."""
    x, dtype = array(kwargs["input"]), kwargs["input"].dtype
    weight, bias = exact(kwargs.get("weight")), exact(kwargs.get("bias"))
    if name == "layer_norm":
        answers = [reference.layer_norm(x, weight, bias, kwargs.get("eps", 1e-5))]
    elif name == "rms_norm":
        answers = [reference.rms_norm(x, weight, kwargs.get("eps", 1e-6))]
    else:
        answers = [*reference.fused_add_rms_norm(x, array(kwargs["residual"]), weight, kwargs.get("eps", 1e-6))]
    return [Expected(a.values, dtype, a.growth) for a in answers]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    want = expected(case.function, case.kwargs)
    agrees(case, want)
    run_stored(family, case, want)


@st.composite
def rows(draw: st.DrawFn, name: str, wide: bool = False) -> dict[str, Any]:
    dtype = draw(st.sampled_from(FLOATS))
    lead = draw(st.lists(st.integers(1, 4), max_size=3))
    if draw(seldom(20)):
        lead = [*lead, 0]
    hidden = draw(
        st.sampled_from((1, 2, 3, 7, 8, 16, 33, 64, 65)) if not wide else st.sampled_from((128, 1000, 4096, 8193))
    )
    d: Draw = draw(draws(4))
    # Half precision overflows where squares are not summed in a wider one.
    bound = draw(st.sampled_from((1.5, 1.5, 1.5, 1000.0, 0.01)))
    kwargs: dict[str, Any] = {"input": d.floats(*lead, hidden, dtype=dtype, bound=bound)}
    if name == "fused_add_rms_norm":
        kwargs["residual"] = d.floats(*lead, hidden, dtype=dtype, bound=bound)
    for optional in ("weight", "bias") if name == "layer_norm" else ("weight",):
        if draw(st.booleans()):
            of = draw(st.sampled_from(FLOATS)) if draw(seldom(3)) else dtype
            kwargs[optional] = d.floats(hidden, dtype=of)
    if name == "layer_norm":
        kwargs["normalized_shape"] = draw(st.sampled_from((None, hidden, (hidden,), [hidden], torch.Size([hidden]))))
    if draw(st.booleans()):
        kwargs["eps"] = draw(st.sampled_from((1e-6, 1e-5, 1e-3, 0.1)))
    if draw(seldom()):
        kwargs["input"] = put_nan(kwargs["input"], d.rng)
    return kwargs


@examples(650)
@given(kwargs=rows("rms_norm"))
def test_rms_norm(kwargs: dict[str, Any], family: Family) -> None:
    family.check("rms_norm", kwargs, expected("rms_norm", kwargs))


@examples(650)
@given(kwargs=rows("layer_norm"))
def test_layer_norm(kwargs: dict[str, Any], family: Family) -> None:
    family.check("layer_norm", kwargs, expected("layer_norm", kwargs))


@examples(650)
@given(kwargs=rows("fused_add_rms_norm"))
def test_fused_add_rms_norm(kwargs: dict[str, Any], family: Family) -> None:
    family.check("fused_add_rms_norm", kwargs, expected("fused_add_rms_norm", kwargs))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "fused_add_rms_norm"])
@examples(30)
@given(data=st.data())
def test_wide_rows(name: str, data: st.DataObject, family: Family) -> None:
    kwargs = data.draw(rows(name, wide=True))
    family.check(name, kwargs, expected(name, kwargs))
