"""Numbers: what a dtype can hold, and float64 functions that give the same bits on any machine.

Sums go through `math.fsum` and transcendental functions through `decimal`, because numpy's and
libm's last bit depends on the processor, and the files written from them must not.
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext

import ml_dtypes
import numpy as np

FLOATS = ["float64", "float32", "float16", "bfloat16"]
FP8 = ["float8_e4m3fn", "float8_e5m2"]
FLOATS_AND_FP8 = FLOATS + FP8
INTEGERS = {"int64": 64, "int32": 32, "int8": 8, "uint8": 8, "int4": 4, "bool": 1}


@dataclass(frozen=True)
class Format:
    """A binary float format: bits of significand (with the hidden one), smallest exponent, largest value."""

    significand: int
    smallest_exponent: int
    largest: float


FORMATS = {
    "float32": Format(24, -126, float(np.finfo(np.float32).max)),
    "float16": Format(11, -14, 65504.0),
    "bfloat16": Format(8, -126, (2 - 2.0**-7) * 2.0**127),
    "float8_e4m3fn": Format(4, -6, 448.0),
    "float8_e5m2": Format(3, -14, 57344.0),
    "mxfp4": Format(2, 0, 6.0),
    "nvfp4": Format(2, 0, 6.0),
}


def is_float(dtype: str) -> bool:
    return dtype not in INTEGERS


def rounded(dtype: str, value: float) -> float:
    """`value` as the float dtype stores it: half to even, saturating."""
    if dtype == "float64" or value == 0 or not math.isfinite(value):
        return value
    form = FORMATS[dtype]
    exponent = max(math.frexp(value)[1] - 1, form.smallest_exponent)
    unit = 2.0 ** (exponent - form.significand + 1)
    nearest = round(abs(value) / unit) * unit
    return math.copysign(min(nearest, form.largest), value)


def rounded_array(dtype: str, values: np.ndarray) -> np.ndarray:
    flat = [rounded(dtype, float(x)) for x in values.ravel()]
    return np.array(flat, dtype=np.float64).reshape(values.shape)


PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534")


def digits() -> AbstractContextManager[Context]:
    """Decimal arithmetic precise enough that rounding its result to float64 is rounding the true one."""
    return localcontext(prec=80)


def exp(x: float) -> float:
    if not math.isfinite(x):
        return math.exp(x)
    with digits():
        return float(Decimal(x).exp())


def tanh(x: float) -> float:
    if not math.isfinite(x) or abs(x) > 40:
        return x if math.isnan(x) else math.copysign(1.0, x)
    with digits():
        grown = (2 * Decimal(x)).exp()
        return float((grown - 1) / (grown + 1))


def normal_cdf(x: float) -> float:
    """(1 + erf(x / sqrt 2)) / 2, from the series of erf."""
    if math.isnan(x):
        return x
    if abs(x) > 9:
        return 0.0 if x < 0 else 1.0
    with digits():
        term = series = Decimal(x)
        n = 1
        while abs(term) > Decimal("1e-60"):
            n += 2
            term *= Decimal(x) ** 2 / n
            series += term
        density = (-(Decimal(x) ** 2) / 2).exp() / (2 * PI).sqrt()
        return float(Decimal("0.5") + density * series)


def total(values: Iterable[float]) -> float:
    """The sum, rounded once."""
    return math.fsum(values)


def dot(a: Iterable[float], b: Iterable[float]) -> float:
    return math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))


def check() -> None:
    rng = np.random.default_rng(1)
    spread = np.concatenate([rng.normal(size=2000) * 10.0**e for e in (-6, -2, 0, 1)])
    grid = np.arange(-400, 401) / 16
    for dtype, also in [
        ("float32", np.float32),
        ("float16", np.float16),
        ("bfloat16", ml_dtypes.bfloat16),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
        ("mxfp4", ml_dtypes.float4_e2m1fn),
    ]:
        values = np.clip(np.concatenate([spread, grid]), -FORMATS[dtype].largest, FORMATS[dtype].largest)
        assert np.array_equal(rounded_array(dtype, values), values.astype(also).astype(np.float64)), dtype
    assert rounded("mxfp4", 100.0) == 6.0 and rounded("float8_e4m3fn", -1e9) == -448.0
    for x in np.linspace(-8, 8, 97):
        assert math.isclose(exp(x), math.exp(x), rel_tol=1e-15)
        assert math.isclose(tanh(x), math.tanh(x), rel_tol=1e-15)
        assert math.isclose(normal_cdf(x), math.erfc(-x / math.sqrt(2)) / 2, rel_tol=1e-12)
