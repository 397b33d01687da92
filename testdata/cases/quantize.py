"""Conversion to and from low-precision formats."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .case import Case, Draw, Expected, Tensor, every_other, expanded, padded_rows, tensor, transposed
from .number import FLOATS, FORMATS, rounded

DTYPE = {
    "int8": "int8",
    "int4": "int4",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}
BITS = {"int8": 8, "int4": 4}
OWN_GROUP = {"mxfp4": 32, "nvfp4": 16}
QUANTIZE, DEQUANTIZE = "quantize", "dequantize"


@dataclass(frozen=True)
class Grid:
    """Which scale covers which element of a [rows, cols] matrix."""

    granularity: str = "per_tensor"
    group: int = 32

    def scales(self, rows: int, cols: int) -> tuple[int, int]:
        return (
            1 if self.granularity == "per_tensor" else rows,
            -(-cols // self.group) if self.granularity == "blockwise" else 1,
        )

    def scale_of(self, row: int, col: int) -> tuple[int, int]:
        return (
            0 if self.granularity == "per_tensor" else row,
            col // self.group if self.granularity == "blockwise" else 0,
        )

    def params(self) -> dict[str, Any]:
        given: dict[str, Any] = {} if self.granularity == "per_tensor" else {"granularity": self.granularity}
        return given | ({"group_size": self.group} if self.granularity == "blockwise" else {})


WHOLE = Grid()


def as_matrix(x: np.ndarray) -> np.ndarray:
    return x.reshape(int(np.prod(x.shape[:-1])), x.shape[-1])


def largest(form: str) -> float:
    return 2.0 ** (BITS[form] - 1) - 1 if form in BITS else FORMATS[DTYPE[form]].largest


def stored(form: str, value: float) -> float:
    """`value` as the format stores it: half to even, saturating."""
    if form in BITS:
        top = 2 ** (BITS[form] - 1)
        return float(min(max(round(value), -top), top - 1))
    return rounded(DTYPE[form], value)


def scale_for(form: str, values: list[float]) -> float:
    """The scale of the elements it covers."""
    top = max((abs(x) for x in values), default=0.0)
    if top == 0:
        return 0.0
    if form == "mxfp4":
        return 2.0 ** (math.frexp(top)[1] - 1 - 2)
    return rounded("float8_e4m3fn" if form == "nvfp4" else "float32", top / largest(form))


class NearTie(Exception):
    """The draw has a value that the last bit of a division could round either way."""


def quantize(
    x: np.ndarray, form: str, grid: Grid, given: np.ndarray | None = None, zero_point: bool = False, ties: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, scales and zero points; values that hang on the last bit are refused unless `ties`."""
    matrix = as_matrix(x)
    shape = grid.scales(*matrix.shape)
    covered: dict[tuple[int, int], list[float]] = {s: [] for s in np.ndindex(shape)}
    for row, col in np.ndindex(matrix.shape):
        covered[grid.scale_of(row, col)].append(float(matrix[row, col]))
    scales, zeros = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    for s, members in covered.items():
        if zero_point:
            low, high = min(0.0, *members), max(0.0, *members)
            scales[s] = rounded("float32", (high - low) / (2 ** BITS[form] - 1))
            exact = -(2.0 ** (BITS[form] - 1)) - low / scales[s]
            if abs(abs(exact - math.floor(exact)) - 0.5) < 1e-4:
                raise NearTie
            zeros[s] = round(exact)
        else:
            scales[s] = scale_for(form, members) if given is None else given[s]
    values = np.zeros(matrix.shape)
    for row, col in np.ndindex(matrix.shape):
        s = grid.scale_of(row, col)
        if scales[s] != 0:
            exact = float(matrix[row, col]) / float(scales[s])
            values[row, col] = stored(form, exact + int(zeros[s]))
            nudged = {stored(form, exact * (1 + e) + int(zeros[s])) for e in (-1e-6, 1e-6)}
            if not ties and nudged != {values[row, col]}:
                raise NearTie
    return values.reshape(x.shape), scales, zeros


def spread(given: Tensor, shape: tuple[int, int]) -> np.ndarray:
    """One number per scale, from one per scale, one per row of scales, or one for all."""
    assert given.shape in (shape, shape[:1], (1,))
    return np.broadcast_to(given.values[:, None] if given.shape == shape[:1] else given.values, shape)


def _quantized(
    form: str, x: Tensor, grid: Grid, given: Tensor | None = None, zero_point: bool = False, ties: bool = False
) -> dict[str, Expected]:
    shape = grid.scales(*as_matrix(x.values).shape)
    full = None if given is None else spread(given, shape)
    values, scales, zeros = quantize(x.values, form, grid, full, zero_point, ties)
    if form in BITS:
        values = values.astype(np.int64)
    return {
        "values": Expected(DTYPE[form], values, exact=True),
        "scales": Expected("float32", scales, exact=True),
        "zero_points": Expected("int32", zeros, exact=True),
    }


def _case(
    name: str,
    form: str,
    x: Tensor,
    grid: Grid = WHOLE,
    *,
    given: Tensor | None = None,
    zero_point: bool = False,
    ties: bool = False,
) -> Case:
    expect = _quantized(form, x, grid, given, zero_point, ties)
    params = {"dtype": form} | grid.params() | ({"zero_point": True} if zero_point else {})
    return Case(name, QUANTIZE, {"input": x} | ({"scale": given} if given else {}), expect, params)


def _drawn(
    name: str,
    form: str,
    dtype: str,
    shape: tuple[int, ...],
    grid: Grid = WHOLE,
    *,
    zero_point: bool = False,
    bound: float = 3.0,
    shift: float = 0.0,
    view: Any = None,
) -> Case:
    """A case of random values, the first draw of which none is near a tie."""
    for attempt in range(200):
        x = Draw(QUANTIZE, name, attempt).floats(dtype, *shape, bound=bound)
        x = tensor(dtype, x.values + shift)
        try:
            return _case(name, form, view(x) if view else x, grid, zero_point=zero_point)
        except NearTie:
            continue
    raise AssertionError(f"no draw of {name} is clear of ties")


def _grids(form: str) -> list[tuple[str, Grid, tuple[int, ...]]]:
    if form in OWN_GROUP:
        return [("blockwise", Grid("blockwise", OWN_GROUP[form]), (1, OWN_GROUP[form] + 5))]
    return [
        ("per_tensor", Grid(), (2, 5)),
        ("per_channel", Grid("per_channel"), (3, 4)),
        ("blockwise", Grid("blockwise", 4), (2, 10)),
    ]


TIES = {
    "int8": [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5, -128.5, -1000.0, 3e4, 0.0],
    "int4": [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5, 7.5, -8.5, -100.0, 3e4, 0.0],
    "fp8_e4m3": [
        17.0,
        19.0,
        -17.0,
        -19.0,
        0.0009765625,
        0.0029296875,
        0.00048828125,
        432.0,
        464.0,
        449.0,
        -2000.0,
        0.0,
    ],
    "fp8_e5m2": [9.0, 11.0, -9.0, -11.0, 2.0**-17, 3 * 2.0**-17, 2.0**-18, 53248.0, 57344.0, 61440.0, -60000.0, 0.0],
    "mxfp4": [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, -5.0, 7.0, -3e4],
    "nvfp4": [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, -5.0, 7.0, -3e4],
}


def _quantizes() -> Iterator[Case]:
    for form in DTYPE:
        for granularity, grid, shape in _grids(form):
            for dtype in FLOATS:
                yield _drawn(f"{form}_{granularity}_{dtype}", form, dtype, shape, grid)
        own = _grids(form)[-1][1]
        width = own.group
        yield _drawn(f"{form}_rank_1", form, "float32", (5,), own)
        yield _drawn(f"{form}_rank_3", form, "float32", (2, 2, 6), own)
        yield _drawn(f"{form}_gaps", form, "float32", (2, 6), own, view=every_other)
        yield _drawn(f"{form}_transposed", form, "bfloat16", (3, 4), own, view=lambda t: transposed(t, 0, 1))
        yield _case(f"{form}_zeros", form, tensor("float32", np.zeros((2, 6))), own)
        mixed = np.zeros((1, width + 3))
        mixed[0, width:] = [1.1, -2.0, 0.3]
        yield _case(f"{form}_a_group_of_zeros", form, tensor("float32", mixed), own)
        yield _case(f"{form}_no_rows", form, tensor("float32", np.zeros((0, 4))), own)
        yield _case(f"{form}_no_columns", form, tensor("float32", np.zeros((2, 0))), own)
        one = tensor("float32", [1.0])
        tied = tensor("float32", [TIES[form]])
        yield _case(f"{form}_ties_and_saturation", form, tied, own, given=one, ties=True)
        yield _case(
            f"{form}_ties_scaled",
            form,
            tensor("float32", tied.values * 0.25),
            own,
            given=tensor("float32", [0.25]),
            ties=True,
        )
        yield _case(f"{form}_given_zero", form, tensor("float32", [[1.0, -2.0]]), own, given=tensor("float32", [[0.0]]))
        if form in OWN_GROUP:
            yield _case(f"{form}_given_one_for_all", form, tied, own, given=one, ties=True)
            continue
        rows = tensor("float32", np.repeat(tied.values, 2, 0))
        yield _case(f"{form}_given_per_tensor", form, rows, given=one, ties=True)
        yield _case(
            f"{form}_given_per_channel", form, rows, Grid("per_channel"), given=tensor("float32", [0.5, 2.0]), ties=True
        )
        yield _case(f"{form}_given_one_for_all_channels", form, rows, Grid("per_channel"), given=one, ties=True)
        yield _case(
            f"{form}_given_blockwise",
            form,
            rows,
            Grid("blockwise", 5),
            ties=True,
            given=every_other(tensor("float32", [[0.5, 2.0, 1.0], [4.0, 0.25, 0.0]])),
        )
        yield _case(
            f"{form}_rows_of_zeros_per_channel",
            form,
            tensor("float32", [[0.0, 0.0], [1.0, -0.25]]),
            Grid("per_channel"),
        )
        yield _drawn(f"{form}_padded", form, "float16", (2, 5), Grid("per_channel"), view=padded_rows)
    yield from _zero_points()
    yield from _own_scales()
    yield _case(
        "given_expanded_view",
        "int8",
        tensor("float32", [[1.0, 2.0], [3.0, 4.0]]),
        Grid("per_channel"),
        given=expanded(tensor("float32", [[0.5]]), 0, 2),
    )


def _zero_points() -> Iterator[Case]:
    for form in BITS:
        for granularity, grid, shape in _grids(form):
            for dtype in FLOATS if granularity == "per_channel" else ["float32"]:
                yield _drawn(f"{form}_zero_point_{granularity}_{dtype}", form, dtype, shape, grid, zero_point=True)
        yield _drawn(f"{form}_zero_point_all_positive", form, "float32", (2, 6), zero_point=True, bound=1.0, shift=3.0)
        yield _drawn(f"{form}_zero_point_all_negative", form, "float32", (2, 6), zero_point=True, bound=1.0, shift=-5.0)


def _own_scales() -> Iterator[Case]:
    """The scale rules of the four-bit floats."""
    mx = Grid("blockwise", 32)
    # At a power of two, just below one, and where the largest value saturates (7.5 = 4 * 1.875 is beyond 6).
    for name, top in [
        ("power_of_two", 4.0),
        ("below_a_power_of_two", 3.9375),
        ("saturating", 7.5),
        ("small", 0.0234375),
        ("large", 20000.0),
    ]:
        members = [top, -top / 2, top / 8, 0.0, -top * 0.75, top / 16]
        yield _case(f"mxfp4_scale_{name}", "mxfp4", tensor("float32", [members]), mx, ties=True)
    nv = Grid("blockwise", 16)
    # 6 * 448 is the most a block can hold; below 6 * 2^-10 the scale rounds to zero.
    for name, top in [
        ("exact", 3.0),
        ("rounded", 1.3),
        ("saturating", 4000.0),
        ("subnormal", 6 * 5 * 2.0**-9),
        ("vanishing", 0.004),
        ("just_not_vanishing", 0.007),
    ]:
        members = [top, -top / 2, top / 7, 0.0, -top * 0.8, top / 15]
        yield _case(f"nvfp4_scale_{name}", "nvfp4", tensor("float32", [members]), nv, ties=name == "exact")


def dequantize(values: np.ndarray, grid: Grid, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    matrix = as_matrix(values)
    out = np.zeros(matrix.shape)
    for row, col in np.ndindex(matrix.shape):
        s = grid.scale_of(row, col)
        out[row, col] = (matrix[row, col] - (0 if zeros is None else zeros[s])) * scales[s]
    return out.reshape(values.shape)


def _back(
    name: str, values: Tensor, grid: Grid, scales: Tensor, zeros: Tensor | None = None, dtype: str | None = None
) -> Case:
    shape = grid.scales(*as_matrix(values.values).shape)

    out = dequantize(values.values, grid, spread(scales, shape), None if zeros is None else spread(zeros, shape))
    inputs = {"values": values, "scales": scales} | ({} if zeros is None else {"zero_points": zeros})
    params = ({} if dtype is None else {"dtype": dtype}) | grid.params()
    return Case(name, DEQUANTIZE, inputs, {"output": Expected(dtype or "float32", out)}, params)


def _codes(draw: Draw, form: str, *shape: int) -> Tensor:
    """Random values of a format, within its whole range (within 64 for the wide ones)."""
    if form in BITS:
        return draw.ints(form, -(2 ** (BITS[form] - 1)), 2 ** (BITS[form] - 1), *shape)
    return draw.floats(DTYPE[form], *shape, bound=min(largest(form), 64.0))


def _dequantizes() -> Iterator[Case]:
    for form in DTYPE:
        for granularity, grid, shape in _grids(form):
            for dtype in FLOATS:
                draw = Draw(DEQUANTIZE, form, granularity, dtype)
                rows, cols = grid.scales(*shape)
                scales = tensor("float32", abs(draw.floats("float32", rows, cols, bound=0.1).values) + 0.01)
                yield _back(f"{form}_{granularity}_{dtype}", _codes(draw, form, *shape), grid, scales, dtype=dtype)
        draw = Draw(DEQUANTIZE, form, "edges")
        grid = _grids(form)[-1][1]
        half = tensor("float32", [0.5])
        # One scale per row: a row is one group, also for the formats that are blockwise by definition.
        by_row = grid if form in OWN_GROUP else Grid("per_channel")
        yield _back(f"{form}_default_is_float32", _codes(draw, form, 2, 3), grid, half)
        yield _back(f"{form}_rank_1", _codes(draw, form, 3), grid, tensor("float32", [[0.25]]))
        yield _back(
            f"{form}_rank_3", _codes(draw, form, 2, 2, 3), grid, tensor("float32", [[0.5], [1.0], [2.0], [0.25]])
        )
        yield _back(f"{form}_one_scale_per_row", _codes(draw, form, 2, 3), by_row, tensor("float32", [0.5, 2.0]))
        yield _back(f"{form}_scale_zero", _codes(draw, form, 1, 3), grid, tensor("float32", [[0.0]]))
        yield _back(
            f"{form}_no_rows",
            tensor(DTYPE[form], np.zeros((0, 4))),
            by_row,
            tensor("float32", np.zeros((0, 1))),
        )
        yield _back(
            f"{form}_transposed",
            transposed(_codes(draw, form, 3, 4), 0, 1),
            by_row,
            every_other(tensor("float32", [[0.5], [1.5], [2.0]])),
        )
        if form in BITS:
            top = 2 ** (BITS[form] - 1)
            yield _back(f"{form}_extremes", tensor(form, [[-top, top - 1, 0, -1]]), Grid(), half)
            yield _back(f"{form}_zero_point_per_tensor", _codes(draw, form, 2, 3), Grid(), half, tensor("int32", [-3]))
            yield _back(
                f"{form}_zero_point_per_channel",
                _codes(draw, form, 2, 3),
                Grid("per_channel"),
                tensor("float32", [0.5, 0.125]),
                tensor("int32", [[4], [-100]]),
                "float16",
            )
            yield _back(
                f"{form}_zero_point_blockwise",
                _codes(draw, form, 2, 5),
                Grid("blockwise", 2),
                draw.floats("float32", 2, 3),
                draw.ints("int32", -9, 9, 2, 3),
                "float64",
            )
            yield _back(
                f"{form}_one_zero_point_for_all",
                _codes(draw, form, 2, 3),
                Grid("per_channel"),
                tensor("float32", [0.5, 0.125]),
                tensor("int32", [2]),
                "bfloat16",
            )
        if DTYPE[form] in FORMATS:
            # Every value of the four-bit formats, and the ends of the eight-bit ones.
            few = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -6.0]
            ends = few if form in OWN_GROUP else [largest(form), -largest(form), 2.0**-9, -1.75]
            yield _back(f"{form}_ends", tensor(DTYPE[form], [ends]), grid, half)


CASES = {QUANTIZE: _quantizes, DEQUANTIZE: _dequantizes}


def check() -> None:
    """Going there and back loses at most half a step, and ml_dtypes agrees with the rounding."""
    x = Draw("quantize").floats("float64", 4, 32).values
    for form in ("int8", "int4"):
        for zero_point in (False, True):
            values, scales, zeros = quantize(x, form, Grid("per_channel"), zero_point=zero_point, ties=True)
            back = dequantize(values, Grid("per_channel"), scales, zeros)
            assert (abs(back - x) <= scales * (1 if zero_point else 0.5) + 1e-6).all()
    for form, also in [
        ("fp8_e4m3", ml_dtypes.float8_e4m3fn),
        ("fp8_e5m2", ml_dtypes.float8_e5m2),
        ("nvfp4", ml_dtypes.float4_e2m1fn),
    ]:
        grid = Grid("blockwise", 16)
        values, scales, _ = quantize(x, form, grid, ties=True)
        ratio = np.clip(x / scales.repeat(16, 1), -largest(form), largest(form))
        assert np.array_equal(values, ratio.astype(also).astype(np.float64))
        if form == "nvfp4":
            tops = np.abs(x.reshape(4, 2, 16)).max(-1) / 6
            assert np.array_equal(scales, tops.astype(ml_dtypes.float8_e4m3fn).astype(np.float64))
    _, scales, _ = quantize(x, "mxfp4", Grid("blockwise", 32), ties=True)
    assert np.array_equal(scales[:, 0], 2.0 ** (np.floor(np.log2(np.abs(x).max(-1))) - 2))
