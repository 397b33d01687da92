# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Conversion between floating point and 8-bit storage.

Values are as if quotients were exact: one that rounding put onto the middle between two values is moved back to its side.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import Launch, planned, power
from .numerals import is_nan

_FORMATS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {kept: name for name, kept in _FORMATS.items()}
# Of a float format: bits of its mantissa, the exponent of its smallest normal number, and its largest number.
_SHAPES = {"int8": (0, 0, 127.0), "fp8_e4m3": (3, -6, 448.0), "fp8_e5m2": (2, -14, 57344.0)}
# How many elements share a scale where nothing is said.
_GROUP = 32
_PIECE = 4096
_TENSOR_PIECE = 8192


@triton.jit
def _to_odd(x, scale):
    """The quotient, with an odd last bit where it is not exact: however it is rounded next, it goes to the right side."""
    quotient = tl.div_rn(x, scale)
    left = x.to(tl.float64) - quotient.to(tl.float64) * scale.to(tl.float64)
    bits = quotient.to(tl.int32, bitcast=True)
    # Towards zero first: the quotient is too large where what is left points the other way.
    large = ((left < 0.0) & (x > 0.0)) | ((left > 0.0) & (x < 0.0))
    finite = (tl.abs(quotient) < float("inf")) & (quotient != 0.0)
    odd = (tl.where(large, bits - 1, bits) | 1).to(tl.float32, bitcast=True)
    return tl.where(finite & (left != 0.0), odd, quotient)


@triton.jit
def _nearest(x):
    """The nearest integer, half to even; for numbers below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _encoded(x, scale, zero, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr, LARGEST: tl.constexpr):
    """The bytes of `x / scale`, plus `zero` for integers."""
    units = _to_odd(x, tl.where(scale == 0.0, 1.0, scale))
    # A scale of zero leaves zeros, and NaNs.
    units = tl.where((scale == 0.0) & ~is_nan(x), 0.0, units)
    if MANTISSA == 0:
        whole = _nearest(tl.minimum(tl.maximum(units, -4194303.0), 4194303.0)).to(tl.float64) + zero
        whole = tl.minimum(tl.maximum(whole, -128.0), 127.0)
        return tl.where(is_nan(units), 0.0, whole).to(tl.int32)
    else:
        bits = units.to(tl.int32, bitcast=True)
        size = tl.minimum(tl.abs(units), LARGEST)
        exponent = tl.maximum(((size.to(tl.int32, bitcast=True) >> 23) & 255) - 127, EXPONENT)
        # One step of the format there is a power of two; its inverse too.
        steps = _nearest(size * ((127 - exponent + MANTISSA) << 23).to(tl.float32, bitcast=True))
        code = ((exponent - EXPONENT) << MANTISSA) + steps.to(tl.int32)
        code = tl.where(is_nan(units), 127, code)
        return code | ((bits >> 24) & 128)


@triton.jit
def _scaled(lowest, largest, LARGEST: tl.constexpr, OFFSET: tl.constexpr):
    """The scale under which numbers from `lowest` to `largest` fill the format, and what zero becomes."""
    lowest = lowest.to(tl.float64)
    largest = largest.to(tl.float64)
    if OFFSET:
        lowest = tl.minimum(lowest, 0.0)
        scale = ((tl.maximum(largest, 0.0) - lowest) / 255.0).to(tl.float32)
        zero = -128.0 - lowest / scale.to(tl.float64)
        # The nearest integer, half to even; for numbers below 2^51.
        zero = (zero + 6755399441055744.0) - 6755399441055744.0
        return scale, tl.where(scale == 0.0, 0.0, zero)
    else:
        scale = (tl.maximum(-lowest, largest) / LARGEST).to(tl.float32)
        return scale, lowest * 0.0


@triton.jit
def _number_or(x, there, otherwise):
    return tl.where(there & ~is_nan(x), x, otherwise)


@triton.jit
def _tensor_ends(x_ptr, ends_ptr, count, BLOCK: tl.constexpr):
    """The smallest and the largest number of a piece; NaN does not count."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(ends_ptr + tl.program_id(0) * 2, tl.min(_number_or(x, at < count, float("inf")), 0))
    tl.store(ends_ptr + tl.program_id(0) * 2 + 1, tl.max(_number_or(x, at < count, float("-inf")), 0))


@triton.jit
def _tensor(
    x_ptr, given_ptr, values_ptr, scales_ptr, zeros_ptr,
    count, pieces,
    BLOCK: tl.constexpr, ENDS: tl.constexpr, GIVEN: tl.constexpr, OFFSET: tl.constexpr, MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Of one scale; `given_ptr` is where it is, or where the ends of the pieces are."""
    if GIVEN:
        scale = tl.load(given_ptr)
        zero = tl.zeros([], tl.float64)
    else:
        lowest = tl.full([ENDS], float("inf"), tl.float32)
        largest = tl.full([ENDS], float("-inf"), tl.float32)
        for begin in range(0, pieces, ENDS):
            piece = begin + tl.arange(0, ENDS)
            lowest = tl.minimum(lowest, tl.load(given_ptr + piece * 2, mask=piece < pieces, other=float("inf")))
            largest = tl.maximum(largest, tl.load(given_ptr + piece * 2 + 1, mask=piece < pieces, other=float("-inf")))
        low, high = tl.min(lowest, 0), tl.max(largest, 0)
        # Nothing but NaN.
        empty = low > high
        scale, zero = _scaled(tl.where(empty, 0.0, low), tl.where(empty, 0.0, high), LARGEST, OFFSET)
    if tl.program_id(0) == 0:
        tl.store(scales_ptr, scale)
        tl.store(zeros_ptr, zero.to(tl.int32))
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    code = _encoded(x, tl.zeros([BLOCK], tl.float32) + scale, zero, MANTISSA, EXPONENT, LARGEST)
    tl.store(values_ptr + at, code.to(tl.uint8), mask=at < count)


@triton.jit
def _groups(
    x_ptr, given_ptr, values_ptr, scales_ptr, zeros_ptr,
    groups, columns, group, across, given_row, given_column,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, GIVEN: tl.constexpr, OFFSET: tl.constexpr, MANTISSA: tl.constexpr,
    EXPONENT: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Groups of a row, `across` of them; the last may be shorter. A group is read piece by piece, twice."""
    number = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    row, place = number // across, number % across
    start = (place * group)[:, None]
    end = tl.minimum(start + group, columns)
    x_ptr += (row * columns)[:, None]
    values_ptr += (row * columns)[:, None]
    inside = (number < groups)[:, None]
    if GIVEN:
        scale = tl.load(given_ptr + row * given_row + place * given_column, mask=number < groups, other=1.0)
        zero = tl.zeros([GROUPS], tl.float64)
    else:
        lowest = tl.full([GROUPS, BLOCK], float("inf"), tl.float32)
        largest = tl.full([GROUPS, BLOCK], float("-inf"), tl.float32)
        for begin in range(0, group, BLOCK):
            column = start + begin + tl.arange(0, BLOCK)[None, :]
            there = inside & (column < end)
            x = tl.load(x_ptr + column, mask=there, other=0.0).to(tl.float32)
            lowest = tl.minimum(lowest, _number_or(x, there, float("inf")))
            largest = tl.maximum(largest, _number_or(x, there, float("-inf")))
        low, high = tl.min(lowest, 1), tl.max(largest, 1)
        empty = low > high
        scale, zero = _scaled(tl.where(empty, 0.0, low), tl.where(empty, 0.0, high), LARGEST, OFFSET)
    tl.store(scales_ptr + number, scale, mask=number < groups)
    tl.store(zeros_ptr + number, zero.to(tl.int32), mask=number < groups)
    for begin in range(0, group, BLOCK):
        column = start + begin + tl.arange(0, BLOCK)[None, :]
        there = inside & (column < end)
        x = tl.load(x_ptr + column, mask=there, other=0.0).to(tl.float32)
        code = _encoded(x, scale[:, None], zero[:, None], MANTISSA, EXPONENT, LARGEST)
        tl.store(values_ptr + column, code.to(tl.uint8), mask=there)


@triton.jit
def _decoded(
    values_ptr, scales_ptr, zeros_ptr, y_ptr,
    columns, pieces, s_row, s_column, z_row, z_column,
    GROUP: tl.constexpr, OFFSET: tl.constexpr, MANTISSA: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of a row; each `GROUP` columns share a scale, or all where it is 0."""
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    at = row * columns + column
    if GROUP == 0:
        place = tl.zeros([BLOCK], tl.int32)
    else:
        place = column // GROUP
    scale = tl.load(scales_ptr + row * s_row + place * s_column, mask=there, other=0.0)
    code = tl.load(values_ptr + at, mask=there, other=0).to(tl.int32)
    if MANTISSA == 0:
        whole = tl.where(code < 128, code, code - 256)
        if OFFSET:
            zero = tl.load(zeros_ptr + row * z_row + place * z_column, mask=there, other=0).to(tl.int64)
            y = ((whole.to(tl.int64) - zero).to(tl.float64) * scale.to(tl.float64)).to(tl.float32)
        else:
            y = whole.to(tl.float32) * scale
    else:
        size = code & 127
        # Numbers below the smallest normal one come out right too: the exponent is put on by a product.
        number = (size << (23 - MANTISSA)).to(tl.float32, bitcast=True)
        number *= FACTOR
        if MANTISSA == 3:
            number = tl.where(size == 127, float("nan"), number)
        else:
            number = tl.where(size == 124, float("inf"), tl.where(size > 124, float("nan"), number))
        y = tl.where(code >= 128, -number, number) * scale
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=there)


def _layout(tensor: Tensor, granularity: str, group_size: int | None) -> tuple[int, int, int, int]:
    """Rows of scales, scales in a row, columns of a row, columns that share a scale."""
    columns = tensor.shape[-1]
    rows = math.prod(tensor.shape[:-1])
    if granularity == "per_tensor":
        return 1, 1, rows * columns, rows * columns
    if granularity == "per_channel":
        return rows, 1, columns, columns
    group = group_size or _GROUP
    return rows, -(-columns // group), columns, group


def _steps(scale: Tensor) -> tuple[int, int]:
    """How far apart given scales are: one per group, one per row of them, or one."""
    if scale.dim() == 1:
        return (0 if scale.shape[0] == 1 else scale.stride(0)), 0
    return (0 if scale.shape[0] == 1 else scale.stride(0)), (0 if scale.shape[1] == 1 else scale.stride(1))


@planned
def quantize(
    input: Tensor, scale: Tensor | None, dtype: str, granularity: str, group_size: int | None, zero_point: bool
) -> Any:
    """Rounds to 8 bits with scales."""
    if not input.is_contiguous():

        def copied(input: Tensor, scale: Tensor | None) -> Any:
            return quantize(input.contiguous(), scale, dtype, granularity, group_size, zero_point)

        return copied, (input, scale)
    rows, across, columns, group = _layout(input, granularity, group_size)
    device, shape, target = input.device, (rows, across), _FORMATS[dtype]
    kinds = (scale is not None, zero_point, *_SHAPES[dtype])
    measure, pieces = None, 0
    if granularity == "per_tensor":
        pieces = max(-(-group // _TENSOR_PIECE), 1)
        constants = (_TENSOR_PIECE, min(power(pieces), 1024), *kinds)
        convert = Launch(_tensor, pieces, device, (group, pieces), constants, 8)
        if scale is None:
            measure = Launch(_tensor_ends, pieces, device, (group,), (_TENSOR_PIECE,), 8)
    else:
        steps = (0, 0) if scale is None else _steps(scale)
        block = min(power(max(group, 1)), _PIECE)
        together = max(1024 // block, 1)
        scalars = (rows * across, columns, group, across, *steps)
        grid = -(-rows * across // together)
        convert = Launch(_groups, grid, device, scalars, (together, block, *kinds), max(together * block // 512, 1))

    def call(input: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        values = torch.empty(input.shape, dtype=target, device=device)
        scales = torch.empty(shape, dtype=torch.float32, device=device)
        zeros = torch.empty(shape, dtype=torch.int32, device=device)
        codes = values.view(torch.uint8)
        if measure is None:
            convert(input, scale, codes, scales, zeros)
        else:
            ends = torch.empty(pieces, 2, dtype=torch.float32, device=device)
            measure(input, ends)
            convert(input, ends, codes, scales, zeros)
        return values, scales, zeros

    return call, (input, scale)


@planned
def dequantize(
    values: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: str, granularity: str, group_size: int | None
) -> Any:
    """Back to floating point."""
    tensors = (values, scales, zero_points)
    if not values.is_contiguous():

        def copied(values: Tensor, scales: Tensor, zero_points: Tensor | None) -> Any:
            return dequantize(values.contiguous(), scales, zero_points, dtype, granularity, group_size)

        return copied, tensors
    group = _layout(values, granularity, group_size)[3]
    mantissa, exponent, _ = _SHAPES[_NAMES[values.dtype]]
    steps = _steps(scales)
    zero_steps = (0, 0) if zero_points is None else _steps(zero_points)
    device, columns, result = values.device, values.shape[-1], _FLOATS[dtype]
    block = min(power(max(columns, 1)), 2048)
    pieces = -(-columns // block)
    grid = values.numel() // columns * pieces if columns else 0
    constants = (group if granularity == "blockwise" else 0, zero_points is not None, mantissa, 2.0 ** (126 + exponent))
    scalars = (columns, pieces, *steps, *zero_steps)
    launch = Launch(_decoded, grid, device, scalars, (*constants, block), max(block // 512, 1))

    def call(values: Tensor, scales: Tensor, zero_points: Tensor | None) -> Tensor:
        output = torch.empty(values.shape, dtype=result, device=device)
        launch(values.view(torch.uint8), scales, zero_points, output)
        return output

    return call, tensors


KERNELS: dict[str, Callable[..., Any]] = {"triton.quantize": quantize, "triton.dequantize": dequantize}
