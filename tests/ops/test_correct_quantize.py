"""Conversion to low-precision storage and back. Scales and values are equal or wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import layerzero as lz
import numpy as np
import pytest
import torch
from conftest import Expected, Family, agrees, run_stored
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import (
    E2M1,
    FLOATS,
    FOUR_BIT,
    Array,
    Draw,
    Stored,
    array,
    draws,
    examples,
    packed,
    seldom,
    stored,
    unpacked,
)

STORED = stored("quantize", "quantize") + stored("dequantize", "dequantize")
BITS = {"int8": 8, "int4": 4}
STORAGE = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
FORMATS = (*STORAGE, *FOUR_BIT)
OWN_GROUP = {"mxfp4": 32, "nvfp4": 16}
RESULTS = {d: getattr(torch, d) for d in ("float32", "float16", "bfloat16", "float64")}


def _magnitudes(exponent_bits: int, mantissa_bits: int, last: int) -> Array:
    """Every magnitude of a small float format, in the order of its codes."""
    bias, found = 2 ** (exponent_bits - 1) - 1, []
    for code in range(last + 1):
        exponent, mantissa = code >> mantissa_bits, (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
        found.append(mantissa * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - bias))
    return np.array(found)


E4M3 = _magnitudes(4, 3, 0x7E)
GRIDS = {"fp8_e4m3": E4M3, "fp8_e5m2": _magnitudes(5, 2, 0x7B), "mxfp4": np.array(E2M1), "nvfp4": np.array(E2M1)}


def on_grid(values: Array, grid: Array) -> Array:
    """The nearest of the magnitudes; of two equally near the one with the even code; at most the largest."""
    size = np.minimum(np.abs(values), grid[-1])
    above = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    below = above - 1
    low, high = size - grid[below], grid[above] - size
    take_above = (high < low) | ((high == low) & (above % 2 == 0))
    return np.asarray(np.copysign(np.where(take_above, grid[above], grid[below]), values))


def stored_as(values: Array, form: str) -> Array:
    """Rounded half to even, saturating."""
    if form in BITS:
        top = 2.0 ** (BITS[form] - 1)
        return np.asarray(np.clip(np.round(values), -top, top - 1))
    return on_grid(values, GRIDS[form])


@dataclass(frozen=True)
class Cover:
    """Which scale covers which element."""

    granularity: str
    group: int

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """How many scales there are."""
        down = 1 if self.granularity == "per_tensor" else rows
        return down, -(-columns // self.group) if self.granularity == "blockwise" else 1

    def spread(self, scales: Array, rows: int, columns: int) -> Array:
        """The number that covers each element, from one per scale, per row of scales, or one for all."""
        shape = self.grid(rows, columns)
        if scales.ndim == 1 and scales.shape == shape[:1]:
            scales = scales[:, None]
        full = np.broadcast_to(scales, shape)
        down = np.zeros(rows, dtype=int) if self.granularity == "per_tensor" else np.arange(rows)
        across = np.arange(columns) // self.group if self.granularity == "blockwise" else np.zeros(columns, dtype=int)
        return np.asarray(full[down][:, across])

    def blocks(self, matrix: Array) -> list[tuple[tuple[int, int], Array]]:
        """The elements under each scale."""
        rows, columns = matrix.shape
        if self.granularity == "per_tensor":
            return [((0, 0), matrix.ravel())]
        width = self.group if self.granularity == "blockwise" else max(columns, 1)
        return [
            ((r, c), matrix[r, c * width : (c + 1) * width])
            for r in range(rows)
            for c in range(self.grid(rows, columns)[1])
        ]


def cover_of(kwargs: dict[str, Any], form: str) -> Cover:
    """As the arguments say."""
    given_size = kwargs.get("group_size")
    return Cover(kwargs.get("granularity", "per_tensor"), OWN_GROUP.get(form, 32) if given_size is None else given_size)


def scale_of(members: Array, form: str) -> float:
    """The scale of the elements it covers."""
    top = float(np.abs(members).max(initial=0.0))
    if top == 0.0:
        return 0.0
    if form == "mxfp4":
        return 2.0 ** (math.frexp(top)[1] - 1 - 2)
    largest = 2.0 ** (BITS[form] - 1) - 1 if form in BITS else float(GRIDS[form][-1])
    return float(on_grid(np.array(top / largest), E4M3)) if form == "nvfp4" else float(np.float32(top / largest))


def zero_of(members: Array, form: str) -> tuple[float, int, float]:
    """Scale and zero point, and how far the zero point is from a tie."""
    low, high = min(float(members.min(initial=0.0)), 0.0), max(float(members.max(initial=0.0)), 0.0)
    scale = float(np.float32((high - low) / (2 ** BITS[form] - 1)))
    if scale == 0.0:
        return 0.0, 0, 1.0
    exact_zero = -(2.0 ** (BITS[form] - 1)) - low / scale
    return scale, round(exact_zero), abs(exact_zero - math.floor(exact_zero) - 0.5)


def quantized(kwargs: dict[str, Any]) -> tuple[list[Expected], bool]:
    """What a call gives, and whether a value hangs on the last bit of a float32 division."""
    form, x = kwargs["dtype"], array(kwargs["input"])
    columns = x.shape[-1]
    matrix = x.reshape(math.prod(x.shape[:-1]), columns)
    cover = cover_of(kwargs, form)
    shape = cover.grid(*matrix.shape)
    scales, zeros, hangs = np.zeros(shape), np.zeros(shape), False
    if kwargs.get("scale") is not None:
        scales = array(kwargs["scale"])
    else:
        for at, members in cover.blocks(matrix):
            if kwargs.get("zero_point", False):
                scales[at], zeros[at], far = zero_of(members, form)
                hangs |= far < 1e-4
            else:
                scales[at] = scale_of(members, form)
    each, offset = cover.spread(scales, *matrix.shape), cover.spread(zeros, *matrix.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact_values = np.where(each == 0.0, 0.0, matrix / each)
    values = np.where(
        each == 0.0, 0.0, stored_as(np.round(exact_values) + offset if form in BITS else exact_values, form)
    )
    for nudge in (1.0 - 2.0**-22, 1.0 + 2.0**-22):
        moved = exact_values * nudge
        again = stored_as(np.round(moved) + offset if form in BITS else moved, form)
        hangs |= bool((np.where(each == 0.0, 0.0, again) != values).any())
    want = [as_stored(values.reshape(x.shape), form)]
    if kwargs.get("scale") is None:
        want += [Expected(scales, torch.float32, exact=True), Expected(zeros, torch.int32, exact=True)]
    return want, hangs


def as_stored(values: Array, form: str) -> Expected:
    """The tensor a format is stored in; two values to a byte for four-bit ones."""
    if form in STORAGE:
        return Expected(values, STORAGE[form], exact=True)
    return Expected(values, torch.uint8, exact=True, decode=lambda t: unpacked(t, form, values.shape[-1]))


def dequantized(kwargs: dict[str, Any]) -> list[Expected]:
    """What a call gives."""
    given_values, form = kwargs["values"], kwargs.get("format")
    if form in FOUR_BIT:
        columns = kwargs["columns"]
        values = unpacked(given_values, form, columns)
    else:
        values = array(given_values).astype(np.float64)
        form = {torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}[given_values.dtype]
    matrix = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
    cover = cover_of(kwargs, form)
    out = matrix
    if kwargs.get("zero_points") is not None:
        out = out - cover.spread(array(kwargs["zero_points"]), *matrix.shape)
    out = out * cover.spread(array(kwargs["scales"]), *matrix.shape)
    return [Expected(out.reshape(values.shape), RESULTS[kwargs.get("dtype", "float32")])]


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_stored(case: Stored, family: Family) -> None:
    assert case.expect is not None
    form = next((f for f in FOUR_BIT if case.name.startswith((f"quantize/{f}", f"dequantize/{f}"))), None)
    columns = next(iter(case.expect.values())).values.shape[-1]
    if form and columns % 2:
        pytest.skip("an odd number of columns has no four-bit tensor of its own: bytes hold two")
    if case.function == "quantize":
        want, _ = quantized(case.kwargs)
        kept = {n: e for n, e in case.expect.items() if n == "values" or case.kwargs.get("scale") is None}
        agrees(Stored(case.name, case.function, case.kwargs, kept), want)
        run_stored(family, case, want)
        return
    extra = {"format": form} if form else {}
    want = dequantized(case.kwargs | extra | {"columns": columns})
    agrees(case, want)
    run_stored(family, Stored(case.name, case.function, case.kwargs | extra, case.expect), want)


@st.composite
def grids(draw: st.DrawFn, form: str) -> tuple[list[int], dict[str, Any]]:
    """A shape, and what one scale covers of it."""
    kwargs: dict[str, Any] = {}
    granularity = (
        "blockwise" if form in OWN_GROUP else draw(st.sampled_from(("per_tensor", "per_channel", "blockwise")))
    )
    if granularity != "per_tensor" or draw(st.booleans()):
        kwargs["granularity"] = granularity
    if granularity == "blockwise" and draw(st.booleans()):
        kwargs["group_size"] = OWN_GROUP[form] if form in OWN_GROUP else draw(st.sampled_from((1, 4, 8, 16, 32)))
    columns = draw(st.sampled_from((2, 4, 8, 16, 34, 64, 1024) if form in FOUR_BIT else (1, 2, 3, 8, 17, 33, 64, 1025)))
    lead = draw(st.lists(st.integers(1, 3), max_size=2))
    if draw(seldom(20)):
        lead = [*lead, 0]
    return [*lead, columns], kwargs


@st.composite
def quantizations(draw: st.DrawFn) -> dict[str, Any]:
    form = draw(st.sampled_from(FORMATS))
    shape, kwargs = draw(grids(form))
    d: Draw = draw(draws(2))
    dtype = draw(st.sampled_from(FLOATS))
    bound = draw(st.sampled_from((0.02, 3.0, 3.0, 200.0)))
    kwargs |= {"dtype": form, "input": d.floats(*shape, dtype=dtype, bound=bound, coarse=draw(seldom(4)))}
    choice = draw(st.sampled_from(("own", "own", "given", "zero_point")))
    if choice == "zero_point" and form in BITS:
        kwargs["zero_point"] = True
    elif choice == "given":
        rows, columns = math.prod(shape[:-1]), shape[-1]
        full = cover_of(kwargs, form).grid(rows, columns)
        given_shape = draw(st.sampled_from((full, (1,), full[:1] if full[1] == 1 else full)))
        # Powers of two: quotients are exact, so ties are real ones and go to the even neighbour.
        powers = d.rng.integers(-4, 3, given_shape).astype(np.float64)
        kwargs["scale"] = d.lay(torch.from_numpy(2.0**powers).to(torch.float32))
    return kwargs


@examples(1150)
@given(kwargs=quantizations())
def test_quantize(kwargs: dict[str, Any], family: Family) -> None:
    want, hangs = quantized(kwargs)
    assume(not hangs or kwargs.get("scale") is not None)
    family.check("quantize", kwargs, want)


@st.composite
def dequantizations(draw: st.DrawFn) -> dict[str, Any]:
    form = draw(st.sampled_from(FORMATS))
    shape, kwargs = draw(grids(form))
    d: Draw = draw(draws(3))
    if form in BITS:
        values = d.rng.integers(-(2 ** (BITS[form] - 1)), 2 ** (BITS[form] - 1), shape).astype(np.float64)
    else:
        values = on_grid((2.0 * d.rng.random(shape) - 1.0) * min(float(GRIDS[form][-1]), 500.0), GRIDS[form])
    tensor = packed(values, form) if form in FOUR_BIT else torch.from_numpy(values).to(STORAGE[form])
    rows, columns = math.prod(shape[:-1]), shape[-1]
    full = cover_of(kwargs, form).grid(rows, columns)
    kwargs["values"] = d.lay(tensor)
    kwargs["scales"] = d.lay(torch.from_numpy(d.rng.uniform(0.01, 2.0, draw(st.sampled_from((full, (1,)))))).float())
    if form in BITS and draw(st.booleans()):
        zeros = d.rng.integers(-8, 8, draw(st.sampled_from((full, (1,)))))
        kwargs["zero_points"] = d.ints(zeros, torch.int32)
    if form in FOUR_BIT:
        kwargs["format"] = form
    if draw(st.booleans()):
        kwargs["dtype"] = draw(st.sampled_from(sorted(RESULTS)))
    return kwargs


@examples(900)
@given(kwargs=dequantizations())
def test_dequantize(kwargs: dict[str, Any], family: Family) -> None:
    columns = kwargs["values"].shape[-1] * (2 if kwargs.get("format") in FOUR_BIT else 1)
    family.check("dequantize", kwargs, dequantized(kwargs | {"columns": columns}))


@pytest.mark.parametrize("form", FOUR_BIT)
def test_an_odd_number_of_columns_cannot_be_packed(form: str) -> None:
    with pytest.raises(lz.InvalidCallError, match=f"WRONG_SHAPE.*{form}.*33"):
        lz.quantize(torch.ones(2, 33), form, granularity="blockwise")
