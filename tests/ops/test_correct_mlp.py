"""Matrix products and feed-forward blocks."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import pytest
import reference
import torch
from conftest import Expected, Family, agrees, run_stored
from hypothesis import given
from hypothesis import strategies as st
from strategies import FLOATS, Draw, Stored, array, draws, exact, examples, put_nan, seldom, stored

STORED = (
    stored("linear", "mlp.linear")
    + stored("fused_mlp", "mlp.fused")
    + stored("linear_packed", "mlp.linear.packed")
    + stored("linear_quantized", "mlp.linear.quantized")
)


def expected(name: str, kwargs: dict[str, Any]) -> list[Expected]:
    """What a call gives."""
    x = array(kwargs["input"])
    if name == "linear":
        answer = reference.linear(x, array(kwargs["weight"]), exact(kwargs.get("bias")))
    elif name == "linear_packed":
        rest = {key: kwargs[key] for key in ("out_features", "interleave", "activation") if key in kwargs}
        answer = reference.linear_packed(x, array(kwargs["weight"]), exact(kwargs.get("bias")), **rest)
    elif name == "linear_quantized":
        sizes = ("out_features", "interleave", "group_size", "activation")
        rest = {key: kwargs[key] for key in sizes if key in kwargs} | {"scales": array(kwargs["scales"])}
        answer = reference.linear_quantized(x, kwargs["weight"].numpy(), exact(kwargs.get("bias")), **rest)
    else:
        weights = (array(kwargs["up_weight"]), array(kwargs["down_weight"]), exact(kwargs.get("gate_weight")))
        answer = reference.fused_mlp(x, *weights, activation=kwargs.get("activation", "silu"))
    return [Expected(answer.values, kwargs["input"].dtype, answer.growth)]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    want = expected(case.function, case.kwargs)
    agrees(case, want)
    run_stored(family, case, want)


@st.composite
def leads(draw: st.DrawFn) -> list[int]:
    lead = draw(st.lists(st.integers(1, 4), max_size=3))
    return [*lead, 0] if draw(seldom(20)) else lead


@st.composite
def linears(draw: st.DrawFn, wide: bool = False) -> dict[str, Any]:
    dtype = draw(st.sampled_from(FLOATS))
    features = st.sampled_from((128, 300, 513) if wide else (1, 2, 3, 7, 8, 16, 33, 64))
    into, out = draw(features), draw(features)
    if draw(seldom(20)):
        into, out = draw(st.sampled_from(((0, out), (into, 0))))
    d: Draw = draw(draws(3))
    kwargs: dict[str, Any] = {
        "input": d.floats(*draw(leads()), into, dtype=dtype),
        "weight": d.floats(out, into, dtype=dtype),
    }
    if draw(st.booleans()):
        kwargs["bias"] = d.floats(out, dtype=dtype)
    if draw(seldom()):
        spoiled = draw(st.sampled_from(sorted(kwargs)))
        kwargs[spoiled] = put_nan(kwargs[spoiled], d.rng)
    return kwargs


@st.composite
def blocks(draw: st.DrawFn, wide: bool = False) -> dict[str, Any]:
    dtype = draw(st.sampled_from(FLOATS))
    hidden, middle = draw(st.sampled_from((1, 3, 8, 16, 33))), draw(st.sampled_from((1, 2, 8, 17, 32)))
    if wide:
        hidden, middle = draw(st.sampled_from(((128, 344), (257, 129))))
    if draw(seldom(20)):
        hidden, middle = draw(st.sampled_from(((0, middle), (hidden, 0))))
    d: Draw = draw(draws(4))
    # Weights as a model has them, so that the terms of the last sum add up to about one.
    up, down = 1.5 / max(hidden, 1) ** 0.5, 1.5 / max(middle, 1) ** 0.5
    kwargs: dict[str, Any] = {
        "input": d.floats(*draw(leads()), hidden, dtype=dtype),
        "up_weight": d.floats(middle, hidden, dtype=dtype, bound=up),
        "down_weight": d.floats(hidden, middle, dtype=dtype, bound=down),
    }
    if draw(st.booleans()):
        kwargs["gate_weight"] = d.floats(middle, hidden, dtype=dtype, bound=up)
    if draw(st.integers(0, 5)):
        kwargs["activation"] = draw(st.sampled_from(("silu", "gelu", "relu")))
    if draw(seldom()):
        kwargs["input"] = put_nan(kwargs["input"], d.rng)
    return kwargs


@examples(1050)
@given(kwargs=linears())
def test_linear(kwargs: dict[str, Any], family: Family) -> None:
    family.check("linear", kwargs, expected("linear", kwargs))


@examples(930)
@given(kwargs=blocks())
def test_fused_mlp(kwargs: dict[str, Any], family: Family) -> None:
    family.check("fused_mlp", kwargs, expected("fused_mlp", kwargs))


@st.composite
def packed(draw: st.DrawFn, wide: bool = False) -> dict[str, Any]:
    kwargs = draw(linears(wide))
    weight = kwargs["weight"]
    outs, ins = weight.shape
    interleave = draw(st.sampled_from((1, 2))) if weight.dtype == torch.bfloat16 else 1
    groups = ins if interleave == 1 else -(-ins // 32) * 16
    padded = weight.new_zeros(-(-outs // 32) * 32, groups * interleave)
    padded[:outs, :ins] = weight
    blocks = padded.view(-(-outs // 32), 32, groups, interleave).permute(0, 2, 1, 3).contiguous()
    activation = draw(st.sampled_from(("none", "relu", "gelu", "gelu_tanh", "silu")))
    return kwargs | {"weight": blocks, "out_features": outs, "interleave": interleave, "activation": activation}


@st.composite
def quantized(draw: st.DrawFn, wide: bool = False) -> dict[str, Any]:
    kwargs = draw(linears(wide))
    weight = torch.nan_to_num(kwargs["weight"].float())
    made = lz.pack(weight, dtype=draw(st.sampled_from(("int8", "int4"))), group=draw(st.sampled_from((None, 32, 128))))
    activation = draw(st.sampled_from(("none", "relu", "gelu", "gelu_tanh", "silu")))
    sizes = {"out_features": made.shape[0], "interleave": made.interleave, "group_size": made.group}
    return kwargs | {"weight": made.blocks, "scales": made.scales, "activation": activation} | sizes


@examples(400)
@given(kwargs=quantized())
def test_linear_quantized(kwargs: dict[str, Any], family: Family) -> None:
    family.check("linear_quantized", kwargs, expected("linear_quantized", kwargs))


@examples(40)
@given(kwargs=quantized(wide=True))
def test_wide_linear_quantized(kwargs: dict[str, Any], family: Family) -> None:
    family.check("linear_quantized", kwargs, expected("linear_quantized", kwargs))


@examples(400)
@given(kwargs=packed())
def test_linear_packed(kwargs: dict[str, Any], family: Family) -> None:
    family.check("linear_packed", kwargs, expected("linear_packed", kwargs))


@examples(40)
@given(kwargs=packed(wide=True))
def test_wide_linear_packed(kwargs: dict[str, Any], family: Family) -> None:
    family.check("linear_packed", kwargs, expected("linear_packed", kwargs))


@examples(40)
@given(kwargs=linears(wide=True))
def test_wide_linear(kwargs: dict[str, Any], family: Family) -> None:
    family.check("linear", kwargs, expected("linear", kwargs))


@examples(30)
@given(kwargs=blocks(wide=True))
def test_wide_fused_mlp(kwargs: dict[str, Any], family: Family) -> None:
    family.check("fused_mlp", kwargs, expected("fused_mlp", kwargs))
