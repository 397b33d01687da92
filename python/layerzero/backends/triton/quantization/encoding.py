# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Numbers of few bits: their codes, the scales they are in units of, and the way back.

Everything is in float32, whose products and quotients are rounded; what was lost to that is kept in the last bit (`odd`),
so that rounding to a format, which is coarser, goes where the exact number would go.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..numerals import is_nan

#: Scales are float32 numbers, powers of two (E8M0), or numbers of E4M3.
FLOAT32 = tl.constexpr(0)
POWERS = tl.constexpr(1)
E4M3 = tl.constexpr(2)


@dataclass(frozen=True)
class Format:
    """A format: bits, bits of its mantissa (0 of integers), the exponent of its smallest normal number, its largest number,
    what its scales are, how many elements share one where nothing is said, and how torch stores it."""

    bits: int
    mantissa: int
    exponent: int
    largest: float
    scales: int
    group: int
    stored: torch.dtype


FORMATS = {
    "int8": Format(8, 0, 0, 127.0, 0, 32, torch.int8),
    "int4": Format(4, 0, 0, 7.0, 0, 32, torch.uint8),
    "fp8_e4m3": Format(8, 3, -6, 448.0, 0, 32, torch.float8_e4m3fn),
    "fp8_e5m2": Format(8, 2, -14, 57344.0, 0, 32, torch.float8_e5m2),
    "mxfp4": Format(4, 1, 0, 6.0, 1, 32, torch.uint8),
    "nvfp4": Format(4, 1, 0, 6.0, 2, 16, torch.uint8),
}


@triton.jit
def odd(near, left):
    """A number with an odd last bit where something was left of it when it was rounded."""
    bits = near.to(tl.int32, bitcast=True)
    # Towards zero first: it is too large where what is left points the other way.
    large = (left < 0.0) != (bits < 0)
    return tl.where(tl.abs(left) > 0.0, (tl.where(large, bits - 1, bits) | 1).to(tl.float32, bitcast=True), near)


@triton.jit
def _halves(x):
    """A number as the sum of two of 12 bits: products of those with numbers of 12 bits are exact."""
    high = (x.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    return high, tl.where(high == x, 0.0, x - high)


@triton.jit
def _quotient(size, guess, high, low):
    """A quotient of 11 bits near a guess, odd where it is not exact: no number of fewer bits lies between it and the exact
    one. The divisor is `high + low`; what is left of the dividend has the right sign."""
    bits = (guess.to(tl.int32, bitcast=True) + 4096) & -8192
    near = bits.to(tl.float32, bitcast=True)
    left = (size - near * high) - near * low
    return (bits + (left > 0.0).to(tl.int32) - (left < 0.0).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _steps(size, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr):
    """The nearest number of a float format, half to even: its steps, and the number they are counted from.

    Added to a power of two so large that a step is its last bit, a number is rounded to steps.
    """
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, (127 + EXPONENT) << 23)
    base = exponent + ((23 - MANTISSA) << 23)
    total = size + base.to(tl.float32, bitcast=True)
    return total.to(tl.int32, bitcast=True) - base, exponent


@triton.jit
def encoded(
    x, scale, zero,
    GIVEN: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """The codes of rows `x / scale`, plus `zero` for integers. `GIVEN` if a scale may be any number."""
    scale, zero = scale[:, None], zero[:, None]
    # Where inverses and what is left of quotients are ordinary numbers.
    divisor = tl.abs(scale)
    lift = tl.where(divisor < 2.0**-60, 2.0**64, tl.where(divisor > 2.0**60, 2.0**-64, 1.0))
    divisor *= lift
    # By a scale of zero, and by infinity, everything is nothing.
    some = (divisor > 0.0) & (divisor < float("inf"))
    inverse = tl.where(some, 1.0 / divisor, tl.where(is_nan(divisor), divisor, 0.0))
    size = tl.abs(x) * lift
    guess = size * inverse
    units = guess
    if MANTISSA < 2:
        # The format has no NaN.
        units = tl.where(guess > 0.0, guess, 0.0)
    if GIVEN or SCALES != POWERS:
        high, low = _halves(divisor)
        units = _quotient(size, units, tl.where(some, high, 0.0), tl.where(some, low, 0.0))
    signs = x.to(tl.int32, bitcast=True)
    if GIVEN:
        signs ^= tl.where(is_nan(x), 0, scale.to(tl.int32, bitcast=True))
    else:
        signs &= tl.where(scale == 0.0, 0, -1)
    if MANTISSA == 0:
        bits = tl.minimum(units, 4194303.0).to(tl.int32, bitcast=True) | (signs & -(2**31))
        units = bits.to(tl.float32, bitcast=True)
        # The nearest integer, half to even, is in the last bits of the sum.
        whole = (units + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + zero
        code = tl.minimum(tl.maximum(whole, -(2 ** (BITS - 1))), 2 ** (BITS - 1) - 1) & (2**BITS - 1)
    else:
        steps, exponent = _steps(tl.minimum(units, LARGEST), MANTISSA, EXPONENT)
        code = steps + (exponent >> (23 - MANTISSA)) - ((127 + EXPONENT) << MANTISSA)
        code |= (signs >> (32 - BITS)) & (2 ** (BITS - 1))
    if GIVEN:
        # Of nothing there is no unit: infinity too is zero.
        code = tl.where((scale == 0.0) & ~is_nan(x), 0, code)
        guess = tl.where((scale == 0.0) & ~is_nan(x), 0.0, guess)
    if OFFSET or MANTISSA > 1:
        code = tl.where(is_nan(guess), 0 if OFFSET else 127, code)
    return code


@triton.jit
def scaled(
    lowest, largest,
    OFFSET: tl.constexpr, SCALES: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """The scale under which numbers from `lowest` to `largest` fill the format, and what zero becomes; without an offset,
    numbers up to `largest` either way."""
    zero = tl.zeros_like(largest).to(tl.int32)
    if OFFSET:
        low = lowest.to(tl.float64)
        scale = ((largest.to(tl.float64) - low) / (2.0**BITS - 1.0)).to(tl.float32)
        exact = -LARGEST - 1.0 - low / scale.to(tl.float64)
        # The nearest integer, half to even; for numbers below 2^51.
        near = ((exact + 6755399441055744.0) - 6755399441055744.0).to(tl.float32)
        zero = tl.where((scale == 0.0) | is_nan(near), 0.0, near).to(tl.int32)
    elif SCALES == POWERS:
        bits = largest.to(tl.int32, bitcast=True)
        # 4 = 2^2 is the largest power of two of the format.
        exponent = tl.where(largest == float("inf"), 127, tl.maximum((bits >> 23) - 129, -127))
        # 2^-127 is below the normal numbers of float32.
        power = tl.where(exponent == -127, 1 << 22, (exponent + 127) << 23)
        scale = tl.where(largest == 0.0, 0, power).to(tl.float32, bitcast=True)
    elif SCALES == E4M3:
        units = _quotient(largest, largest * (1.0 / LARGEST), LARGEST, 0.0)
        steps, exponent = _steps(tl.minimum(units, 448.0), 3, -6)
        # A step is 2^-3 of the power of two it belongs to.
        scale = steps.to(tl.float32) * (exponent - (3 << 23)).to(tl.float32, bitcast=True)
    else:
        scale = (largest.to(tl.float64) / LARGEST).to(tl.float32)
    return scale, zero


@triton.jit
def decoded(code, BITS: tl.constexpr, MANTISSA: tl.constexpr, FACTOR: tl.constexpr):
    """The numbers behind codes; `FACTOR` is 2 to the power of the difference between float32's bias and the format's."""
    if MANTISSA == 0:
        number = tl.where(code < 2 ** (BITS - 1), code, code - 2**BITS).to(tl.float32)
    else:
        size = code & (2 ** (BITS - 1) - 1)
        # Numbers below the smallest normal one come out right too: the exponent is put on by a product.
        number = (size << (23 - MANTISSA)).to(tl.float32, bitcast=True) * FACTOR
        if MANTISSA == 3:
            number = tl.where(size == 127, float("nan"), number)
        elif MANTISSA == 2:
            number = tl.where(size == 124, float("inf"), tl.where(size > 124, float("nan"), number))
        # By its bit: zero has a sign too.
        sign = (code >> (BITS - 1)) << 31
        number = (number.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return number


@triton.jit
def product(number, scale, NARROW: tl.constexpr):
    """A number of at most 12 bits times its scale, to be stored in float32, or in a narrower format."""
    near = number * scale
    if NARROW:
        high, low = _halves(scale)
        near = odd(near, number * low - (near - number * high))
    return near


@triton.jit
def offset_product(number, zero, scale, NARROW: tl.constexpr):
    """The same for a number from which an integer is taken first."""
    exact = (number.to(tl.float64) - zero.to(tl.float64)) * scale.to(tl.float64)
    near = exact.to(tl.float32)
    if NARROW:
        near = odd(near, exact - near.to(tl.float64))
    return near
