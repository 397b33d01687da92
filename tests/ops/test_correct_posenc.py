"""Positional encodings."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from conftest import Expected, Family, agrees, everyone, is_refused, run_stored
from hypothesis import given
from hypothesis import strategies as st
from strategies import FLOATS, Draw, Stored, array, draws, exact, examples, indices, put_nan, seldom, stored

STORED = stored("rope", "posenc.rope") + stored("alibi_bias", "posenc.alibi")


def expected(name: str, kwargs: dict[str, Any]) -> list[Expected]:
    """What a call gives."""
    if name == "alibi_bias":
        answer = reference.alibi_bias(array(kwargs["slopes"]), kwargs["seq_q"], kwargs["seq_k"])
        return [Expected(answer.values, kwargs["slopes"].dtype, answer.growth)]
    by_rank = "NHD" if kwargs["input"].dim() == 3 else "BSHD"
    answer = reference.rope(
        array(kwargs["input"]),
        array(kwargs["cos"]),
        array(kwargs["sin"]),
        interleaved=kwargs.get("interleaved", False),
        positions=exact(kwargs.get("positions")),
        layout=kwargs.get("layout", by_rank),
    )
    return [Expected(answer.values, kwargs["input"].dtype, answer.growth)]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    if case.expect is None:
        is_refused(case)
        return
    want = expected(case.function, case.kwargs)
    agrees(case, want)
    run_stored(family, case, want)


@st.composite
def ropes(draw: st.DrawFn) -> dict[str, Any]:
    dtype = draw(st.sampled_from(FLOATS))
    table_dtype = draw(st.sampled_from(FLOATS)) if draw(seldom(3)) else dtype
    layout = draw(st.sampled_from(("BSHD", "BHSD", "NHD")))
    batch, seq, heads = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    if draw(seldom(20)):
        batch, seq, heads = draw(st.sampled_from(((0, seq, heads), (batch, 0, heads), (batch, seq, 0))))
    head_dim = draw(st.sampled_from((1, 2, 4, 5, 8, 16, 33, 128)))
    widths = [n for n in (head_dim // 2, head_dim // 2, head_dim // 3) if n >= 0]
    rot = draw(st.sampled_from([*widths, head_dim] if head_dim % 2 == 0 else widths))
    d: Draw = draw(draws(4))
    shapes = {"BSHD": (batch, seq, heads), "BHSD": (batch, heads, seq), "NHD": (seq, heads)}
    length = seq + draw(st.integers(0, 3))
    kwargs: dict[str, Any] = {"input": d.floats(*shapes[layout], head_dim, dtype=dtype)}
    kwargs["interleaved"] = draw(st.booleans())
    if draw(st.booleans()):
        length = max(length, 1)
        shape: tuple[int, ...] = (seq,)
        if layout != "NHD":
            shape = draw(st.sampled_from(((seq,), (1, seq), (batch, seq))))
        kwargs["positions"] = d.ints(d.rng.integers(0, length, shape), draw(indices))
    kwargs["cos"] = d.floats(length, rot, dtype=table_dtype, bound=1.0)
    kwargs["sin"] = d.floats(length, rot, dtype=table_dtype, bound=1.0)
    if layout == "BHSD" or draw(st.booleans()):
        kwargs["layout"] = layout
    if draw(seldom()):
        kwargs["input"] = put_nan(kwargs["input"], d.rng)
    return kwargs


@st.composite
def biases(draw: st.DrawFn) -> dict[str, Any]:
    d: Draw = draw(draws(1))
    slopes = d.floats(draw(st.integers(0, 8)), dtype=draw(st.sampled_from(FLOATS)))
    if draw(seldom()):
        slopes = put_nan(slopes, d.rng)
    return {"slopes": slopes, "seq_q": draw(st.integers(0, 9)), "seq_k": draw(st.integers(0, 9))}


@examples(1550)
@given(kwargs=ropes())
def test_rope(kwargs: dict[str, Any], family: Family) -> None:
    family.check("rope", kwargs, expected("rope", kwargs))


@examples(500)
@given(kwargs=biases())
def test_alibi_bias(kwargs: dict[str, Any], family: Family) -> None:
    family.check("alibi_bias", kwargs, expected("alibi_bias", kwargs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1000, 1000), (3, 5000), (1000, 3)])
def test_distances_that_half_precision_does_not_have(seq_q: int, seq_k: int, dtype: torch.dtype) -> None:
    """Distances are exact: only the product with the slope is rounded."""
    slopes = torch.tensor([1.0, 2.0**-8], dtype=dtype)
    places = torch.arange(seq_k - seq_q, seq_k)[:, None] - torch.arange(seq_k)
    want = -slopes.double()[:, None, None] * places.abs().double()
    for kernel, got in everyone("alibi_bias", slopes=slopes, seq_q=seq_q, seq_k=seq_k):
        assert torch.equal(got, want.to(dtype)), kernel
