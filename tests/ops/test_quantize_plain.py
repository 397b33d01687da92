"""8-bit integers by the largest magnitude of a row: every kernel against exact fractions, where float32 quotients go wrong and where
scales are no ordinary numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import everyone

NAN, INF = math.nan, math.inf
TINY = 2.0**-149


def exactly(rows: list[list[float]], per_tensor: bool) -> tuple[list[list[int]], list[float]]:
    """Values and scales by the definition. NaN does not count for a scale and is 0; Python rounds half to even."""
    covers = [[x for row in rows for x in row]] * len(rows) if per_tensor else rows
    values, scales = [], []
    for row, cover in zip(rows, covers, strict=True):
        scale = float(np.float32(max((abs(x) for x in cover if not math.isnan(x)), default=0.0) / 127.0))
        plain = [math.isfinite(x) and math.isfinite(scale) and scale != 0.0 for x in row]
        units = [round(Fraction(x) / Fraction(scale)) if ok else 0 for x, ok in zip(row, plain, strict=True)]
        values.append([max(-128, min(127, unit)) for unit in units])
        scales.append(scale)
    return values, scales[:1] if per_tensor else scales


def check(x: torch.Tensor, granularity: str) -> None:
    rows = x.reshape(-1, x.shape[-1])
    values, scales = exactly(rows.double().tolist(), granularity == "per_tensor")
    seen = set()
    for kernel, (got, found, zero_points) in everyone("quantize", input=x, dtype="int8", granularity=granularity):
        seen.add(kernel)
        assert got.shape == x.shape and got.dtype == torch.int8, kernel
        assert got.reshape(rows.shape).tolist() == values, kernel
        assert found.dtype == torch.float32 and found.tolist() == [[scale] for scale in scales], kernel
        assert zero_points.tolist() == [[0]] * len(scales) and zero_points.dtype == torch.int32, kernel
        assert not found.requires_grad
    assert {"torch.quantize", "torch.quantize.blocked"} <= seen or x.dtype == torch.float64


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
@pytest.mark.parametrize(
    "row",
    [
        [0.0, 0.0, -0.0],
        [NAN, 1.0, -2.0],
        [NAN, NAN, NAN],
        [INF, 1.0, NAN],
        [-INF, INF, 0.5],
        [TINY, -TINY, 0.0],
        [180 * TINY, -100 * TINY, 3 * TINY],
        [2.0**-120, 2.0**-121, -(2.0**-122)],
        [3.0e38, -1.0e38, 1.0],
        [127.0, 0.5, 1.5],
        [-127.0, -2.5, 126.5],
    ],
    ids=str,
)
def test_rows_that_are_no_ordinary_numbers(row: list[float], granularity: str) -> None:
    for dtype in (torch.float32, torch.float64):
        check(torch.tensor([row], dtype=dtype), granularity)
        # Among ordinary rows.
        check(torch.tensor([[1.0, -3.0, 0.2], row, [5.0, 4.0, 3.0]], dtype=dtype), granularity)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
def test_quotients_that_float32_rounds_to_a_tie(granularity: str, dtype: torch.dtype) -> None:
    """Numbers next to the middle between two units; one scale in some hundred makes float32 round one onto it."""
    make = np.random.default_rng(0)
    rows = []
    for top in make.uniform(0.5, 2.0, 150).astype(np.float32):
        scale = np.float32(float(top) / 127.0)
        middles = np.float32((make.integers(0, 126, 8) + 0.5) * float(scale))
        rows.append([top, *middles, *np.nextafter(middles, np.float32(0)), *np.nextafter(middles, np.float32(9))])
    check(torch.from_numpy(np.array(rows, dtype=np.float32)).to(dtype), granularity)


def test_float32_does_round_some_of_these_to_a_tie() -> None:
    """What the test before would miss otherwise."""
    make, found = np.random.default_rng(0), 0
    for top in make.uniform(0.5, 2.0, 150).astype(np.float32):
        scale = np.float32(float(top) / 127.0)
        for x in np.float32((make.integers(0, 126, 8) + 0.5) * float(scale)):
            exact, rounded = Fraction(float(x)) / Fraction(float(scale)), float(np.float32(x / scale))
            found += rounded % 1.0 == 0.5 and exact != Fraction(rounded)
    assert found > 0


@pytest.mark.parametrize("shape", [(7,), (2, 3, 5), (300, 2), (1, 1)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for granularity in ("per_channel", "per_tensor"):
        check(x, granularity)
        check(torch.stack([x, x], -1)[..., 0], granularity)


def test_large_tensors_are_cut_into_rows() -> None:
    x = torch.randn(5, 70_000, generator=torch.Generator().manual_seed(2))
    x[3] *= 100.0
    scales = (x.abs().amax(-1, keepdim=True).double() / 127.0).float()
    values = (x.double() / scales.double()).round().to(torch.int8)
    for kernel, (got, found, _) in everyone("quantize", input=x, dtype="int8", granularity="per_channel"):
        assert torch.equal(got, values) and torch.equal(found, scales), kernel


FLOATS = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}


def nearest_code(x: Fraction, codes: list[tuple[Fraction, int]]) -> int:
    """The nearest of a format's numbers that are not negative; of two as near the one whose code is even."""
    return min(codes, key=lambda one: (abs(one[0] - x), one[1] % 2))[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FLOATS)
def test_8_bit_floats_are_rounded_once(format: str, dtype: torch.dtype) -> None:
    """Numbers at, and next to, the middle between two numbers of the format, by exact fractions over all of its codes."""
    kind, largest = FLOATS[format]
    all_codes = torch.arange(0, 128, dtype=torch.uint8).view(kind).double().tolist()
    codes = [(Fraction(value), code) for code, value in enumerate(all_codes) if math.isfinite(value)]
    finite = sorted(value for value, _ in codes)
    make, rows = np.random.default_rng(3), []
    for top in make.uniform(0.5, 2.0, 60).astype(np.float32):
        scale = np.float32(np.float32(top) / np.float32(largest))
        chosen = make.integers(0, len(finite) - 1, 8)
        middles = np.float32([float((finite[i] + finite[i + 1]) / 2 * Fraction(float(scale))) for i in chosen])
        beside = [np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(9))]
        rows.append([top, *middles, *-middles, *beside[0], *beside[1]])
    x = torch.from_numpy(np.array(rows, dtype=np.float32)).to(dtype)
    seen = 0
    for kernel, (got, scales, _) in everyone("quantize", input=x, dtype=format, granularity="per_channel"):
        seen += 1
        for row, scale, values in zip(
            x.double().tolist(), scales[:, 0].tolist(), got.view(torch.uint8).tolist(), strict=True
        ):
            units = [Fraction(number) / Fraction(scale) for number in row]
            want = [nearest_code(abs(unit), codes) | (128 if unit < 0 else 0) for unit in units]
            assert values == want, kernel
    assert seen >= 2
