"""Dense attention: standard, grouped, cross; prefill and decode."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import pytest
import reference
import torch
from conftest import Expected, Family, agrees, run_stored
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
    put_nan,
    scales,
    seldom,
    sizes,
    softcaps,
    stored,
)

DENSE = [f"attention.{kind}.{phase}" for kind in ("standard", "gqa") for phase in ("prefill", "decode")]
STORED = stored("attention", *DENSE) + stored("cross_attention", "attention.cross.prefill", "attention.cross.decode")


def window_of(given: Any) -> tuple[int, int]:
    """As the public function reads it: nothing, the left side, or both."""
    if given is None:
        return reference.UNBOUNDED
    return given if isinstance(given, tuple) else (given, -1)


def expected(name: str, kwargs: dict[str, Any]) -> list[Expected]:
    """What a call gives."""
    answer = reference.attention(
        *(array(kwargs[n]) for n in ("query", "key", "value")),
        causal=kwargs.get("causal", name == "attention"),
        scale=kwargs.get("scale"),
        attn_mask=exact(kwargs.get("attn_mask")),
        alibi_slopes=exact(kwargs.get("alibi_slopes")),
        window=window_of(kwargs.get("window")),
        softcap=kwargs.get("softcap", 0.0),
        layout=kwargs.get("layout", "BSHD"),
        sinks=exact(kwargs.get("sinks")),
    )
    return [Expected(answer.values, kwargs["query"].dtype, answer.growth, answer.may_be_nan)]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    want = expected(case.function, case.kwargs)
    agrees(case, want)
    run_stored(family, case, want)


def mask(draw: st.DrawFn, d: Draw, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """A mask of any dtype that broadcasts to [batch, heads, seq_q, seq_k]."""
    broadcast = [n if draw(st.booleans()) else 1 for n in shape[:3]]
    sizes_ = (*broadcast, shape[3]) if draw(st.booleans()) else (broadcast[2], shape[3])
    dtype = draw(st.sampled_from((torch.bool, torch.bool, *FLOATS)))
    if dtype == torch.bool:
        return d.lay(torch.from_numpy(d.rng.random(sizes_) < draw(st.sampled_from((0.7, 0.7, 0.2, 0.0)))))
    values = torch.from_numpy(d.rng.uniform(-2.0, 2.0, sizes_)).to(dtype)
    out = draw(st.sampled_from((None, float("-inf"), float("-inf"), -1e4)))
    if out is not None:
        values = values.masked_fill(torch.from_numpy(d.rng.random(sizes_) < 0.4), out)
    return d.lay(values)


@st.composite
def dense(draw: st.DrawFn, name: str, long: bool = False) -> dict[str, Any]:
    dtype = draw(st.sampled_from((*FLOATS[:3] * 3, FLOATS[3], *FP8)))
    heads, kv_heads = draw(head_counts())
    batch = draw(sizes(2)) if draw(seldom()) else draw(st.integers(1, 2))
    seq_q = draw(st.sampled_from((1, 1, 2, 3, 5, 8, 0)))
    seq_k = draw(st.one_of(st.integers(1, 9), st.sampled_from((16, 17, 31)))) if not draw(seldom()) else 0
    head_dim = draw(st.sampled_from((1, 3, 4, 8, 16, 32, 33)))
    if long:
        batch, seq_q = 1, draw(st.sampled_from((1, 33, 70)))
        seq_k, head_dim = draw(st.sampled_from((64, 129, 513))), draw(st.sampled_from((64, 80, 128, 256, 320)))
    if draw(seldom(3)):
        # A prompt without a past: kernels mask it by a flag where they are given a mask for others.
        seq_q = seq_k
    v_dim = draw(st.sampled_from((2, 8, 40))) if draw(seldom(6)) else head_dim
    d = draw(draws(5))
    layout = draw(st.sampled_from(("BSHD", "BHSD")))

    def shape(seq: int, count: int, dim: int) -> tuple[int, ...]:
        return (batch, seq, count, dim) if layout == "BSHD" else (batch, count, seq, dim)

    # Scores in the thousands: half precision overflows where they are not summed in a wider one.
    bound = draw(st.sampled_from((1.5, 1.5, 1.5, 60.0)))
    kwargs: dict[str, Any] = {
        "query": d.floats(*shape(seq_q, heads, head_dim), dtype=dtype, bound=bound),
        "key": d.floats(*shape(seq_k, kv_heads, head_dim), dtype=dtype, bound=bound),
        "value": d.floats(*shape(seq_k, kv_heads, v_dim), dtype=dtype),
    }
    if name == "attention":
        kwargs["causal"] = seq_q <= seq_k and draw(st.booleans())
        if draw(seldom(3)):
            size = st.sampled_from((-1, 0, 1, 2, 5))
            kwargs["window"] = draw(st.one_of(size.filter(lambda n: n >= 0), st.tuples(size, size)))
        if draw(seldom(4)):
            kwargs["alibi_slopes"] = d.floats(heads, dtype=draw(st.sampled_from(FLOATS)))
        if draw(seldom(4)):
            kwargs["sinks"] = d.floats(heads, dtype=draw(st.sampled_from(FLOATS)))
    if not kwargs.get("causal", False) and draw(st.booleans()):
        kwargs["attn_mask"] = mask(draw, d, (batch, heads, seq_q, seq_k))
    kwargs["scale"], kwargs["softcap"] = draw(scales), draw(softcaps)
    if bound < 2.0 and draw(seldom()):
        # Where all scores of a query are NaN, torch's kernel on the CPU gives zeros at fewer keys.
        spoiled = draw(st.sampled_from(("query", "key", "value"))) if seq_k >= 16 else "value"
        kwargs[spoiled] = put_nan(kwargs[spoiled], d.rng)
    return kwargs | {"layout": layout}


@examples(1500)
@given(kwargs=dense("attention"))
def test_attention(kwargs: dict[str, Any], family: Family) -> None:
    family.check("attention", kwargs, expected("attention", kwargs))


@pytest.mark.parametrize("name", ["attention", "cross_attention"])
@examples(60)
@given(data=st.data())
def test_long_sequences_and_wide_heads(name: str, data: st.DataObject, family: Family) -> None:
    """Past the tiles of the kernels, and their remainders."""
    kwargs = data.draw(dense(name, long=True))
    family.check(name, kwargs, expected(name, kwargs))


@examples(450)
@given(kwargs=dense("cross_attention"))
def test_cross_attention(kwargs: dict[str, Any], family: Family) -> None:
    family.check("cross_attention", kwargs, expected("cross_attention", kwargs))


@pytest.mark.parametrize("name", ["attention", "cross_attention"])
def test_dropout_drops_weights_and_keeps_the_expectation(name: str) -> None:
    """Equal weights over values of one: each result counts the weights that were kept, scaled up by 1 / (1 - p)."""
    keys, p, rows = 8, 0.25, 4000
    call = {
        "query": torch.zeros(1, rows, 1, 4),
        "key": torch.ones(1, keys, 1, 4),
        "value": torch.ones(1, keys, 1, 4),
        "layout": "BSHD",
        "dropout_p": p,
    }
    if name == "attention":
        call["causal"] = False
    run = getattr(lz, name)
    out = run(**call, seed=1)
    kept = out[0, :, 0, 0].double() * keys * (1.0 - p)
    assert (kept - kept.round()).abs().max() < 1e-4
    # The mean of 4,000 counts with a deviation of sqrt(8 p (1 - p)) each, within six deviations.
    assert abs(float(kept.mean()) - keys * (1.0 - p)) < 6.0 * (keys * p * (1.0 - p) / rows) ** 0.5
    assert torch.equal(out, run(**call, seed=1))
    assert not torch.equal(out, run(**call, seed=2))
    torch.manual_seed(3)
    drawn = run(**call)
    torch.manual_seed(3)
    assert torch.equal(drawn, run(**call))
    assert not torch.equal(drawn, run(**call))
