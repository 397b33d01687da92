"""Conversion between floating point and quantized storage: 8-bit integers and floats."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import ELEMENTS, HALF, blocks, rows_of
from ..traced_tensors import is_traced


@dataclass(frozen=True)
class Format:
    dtype: torch.dtype
    lowest: float
    largest: float
    # Of a float format: bits of the mantissa, and the exponent of its smallest normal number.
    mantissa: int = 0
    exponent: int = 0


_FORMATS = {
    "int8": Format(torch.int8, -128.0, 127.0),
    "fp8_e4m3": Format(torch.float8_e4m3fn, -448.0, 448.0, 3, -6),
    "fp8_e5m2": Format(torch.float8_e5m2, -57344.0, 57344.0, 2, -14),
}
# Differences of 8-bit integers and integers up to this are float32 numbers.
_EXACT = 2**24 - 128
# How many elements share a scale where nothing is said.
_GROUP = 32
# Of float32: the least number with all its digits, and the largest.
_LEAST_NORMAL, _LARGEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
# The distance of float32 numbers just above 1.
_ULP = 2.0**-23
# Scales that are looked at one by one.
_FEW = 128
_FLOATS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def quantize(
    input: Tensor,
    scale: Tensor | None,
    dtype: str,
    granularity: str,
    group_size: int | None,
    zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds to 8 bits with scales. Quotients are formed in float64: a tie is a tie only if it really is one."""
    if scale is None and not zero_point and granularity != "blockwise" and input.is_cpu:
        found = _plainly(input.detach() if input.requires_grad else input, _FORMATS[dtype], granularity)
        if found is not None:
            return found
    return _quantize(input, scale, dtype, granularity, group_size, zero_point)


def _plainly(input: Tensor, target: Format, granularity: str) -> tuple[Tensor, Tensor, Tensor] | None:
    """What one writes for 8-bit numbers by the largest magnitude of a row, or of all rows. `None` where the data has to be looked
    at element by element: a scale is not finite, or so small that quotients are not bounded by the format's range."""
    if input.dtype == torch.float64 or input.numel() == 0 or is_traced():
        return None
    rows = input if input.dim() == 2 else rows_of(input)
    largest = rows.abs()
    largest = largest.amax().view(1, 1) if granularity == "per_tensor" else largest.amax(-1, keepdim=True)
    scales = (largest.float() if largest.dtype in HALF else largest) / target.largest
    if not _all_within(scales, _LEAST_NORMAL, _LARGEST):
        return None
    if target.dtype != torch.int8:
        values = _nearest_floats(rows.float() if rows.dtype in HALF else rows, scales, target)
    elif rows.numel() <= ELEMENTS:
        values = rows.double().div_(scales).round_().to(torch.int8)
    else:
        values = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
        for given, divisors, result in blocks(rows, _per_line(scales, rows), values, whole=1):
            result.copy_(given.double().div_(divisors).round_())
    return (
        (values if values.shape == input.shape else values.view(input.shape)),
        scales,
        torch.zeros_like(scales, dtype=torch.int32),
    )


def _nearest_floats(rows: Tensor, scales: Tensor, target: Format) -> Tensor:
    """Quotients to the nearest 8-bit float, half to even, as if they were exact.

    A quotient is rounded to float32 before it is rounded to the format, which matters only next to the middle between two numbers of
    the format: there the float32 numbers on its two sides round differently, and it is divided again in float64.
    """
    quotients = (rows / scales).clamp_(target.lowest, target.largest)
    values = quotients.to(target.dtype)
    below, above = (quotients * (1.0 - _ULP)).to(target.dtype), quotients.mul_(1.0 + _ULP).to(target.dtype)
    doubtful = below.view(torch.uint8) != above.view(torch.uint8)
    if doubtful.any():
        line, column = doubtful.nonzero(as_tuple=True)
        divisors = scales.expand(rows.shape[0], 1)[line, 0].double()
        units = (rows[line, column].double() / divisors).clamp_(target.lowest, target.largest)
        # What can be indexed are bytes.
        values.view(torch.uint8)[line, column] = _rounded(units, target).view(torch.uint8)
    return values


def _all_within(numbers: Tensor, least: float, largest: float) -> bool:
    """Whether all of them lie within bounds; a NaN does not."""
    if numbers.numel() <= _FEW:
        # Few numbers are looked at sooner one by one than by operators.
        return all(least <= number <= largest for (number,) in numbers.tolist())
    low, high = numbers.aminmax()
    return bool(least <= low.item() and high.item() <= largest)


@torch.no_grad()
def _quantize(
    input: Tensor,
    scale: Tensor | None,
    dtype: str,
    granularity: str,
    group_size: int | None,
    zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for every format, scale and number."""
    target = _FORMATS[dtype]
    # Rows of groups: every scale covers the last axis.
    groups = grouped(rows_of(input).double(), granularity, group_size)
    offsets = None
    if scale is not None:
        scales = per_group(scale, groups.shape).clone(memory_format=torch.contiguous_format)
    else:
        scales, offsets = spread(*extremes(groups), target, zero_point)
    units = groups / scales.double()[..., None]
    # A scale of zero leaves zeros, and the NaNs of formats that have them.
    units = torch.where((scales == 0.0)[..., None] & ~groups.isnan(), 0.0, units)
    if offsets is not None:
        units = torch.round(units) + offsets[..., None]
    values = _rounded(units.clamp(target.lowest, target.largest), target)
    zero_points = torch.zeros_like(scales, dtype=torch.int32) if offsets is None else offsets.to(torch.int32)
    return ungrouped(values, input, granularity), scales, zero_points


def spread(lowest: Tensor, largest: Tensor, target: Format, zero_point: bool) -> tuple[Tensor, Tensor | None]:
    """The scales under which numbers up to these fill the format, and what is added to units so that zero is exact."""
    if not zero_point:
        return (torch.maximum(lowest.abs(), largest.abs()) / target.largest).float(), None
    lowest, largest = lowest.clamp(max=0.0), largest.clamp(min=0.0)
    scales = ((largest - lowest) / (target.largest - target.lowest)).float()
    offsets = torch.round(target.lowest - lowest / scales.double())
    # Over a scale of zero, and minus infinity over infinity, there is no offset.
    return scales, offsets.masked_fill_((scales == 0.0) | offsets.isnan(), 0.0)


@torch.no_grad()
def quantize_blocked(
    input: Tensor,
    scale: Tensor | None,
    dtype: str,
    granularity: str,
    group_size: int | None,
    zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same to 8-bit integers, in float32 and piece by piece."""
    target, shape = _FORMATS[dtype], _shape_of_scales(input, granularity, group_size)
    if shape is None:
        return _quantize(input, scale, dtype, granularity, group_size, zero_point)
    lines, offsets = _lines(input, shape), None
    if scale is not None:
        scales = per_group(scale, shape).clone(memory_format=torch.contiguous_format)
    else:
        axis = (0, 1) if granularity == "per_tensor" else 1
        lowest, largest = (end.double().reshape(shape) for end in (lines.amin(axis), lines.amax(axis)))
        if not bool((lowest.isfinite() & largest.isfinite()).all()):
            return _quantize(input, scale, dtype, granularity, group_size, zero_point)
        scales, offsets = spread(lowest, largest, target, zero_point)
    # By infinity everything is zero units.
    divisors = _per_line(scales.masked_fill(scales == 0.0, torch.inf), lines)
    added = torch.zeros_like(divisors) if offsets is None else _per_line(offsets.float(), lines)
    values = torch.empty(input.shape, dtype=target.dtype, device=input.device)
    for given, divisor, offset, result in blocks(lines, divisors, added, values.view(lines.shape), whole=1):
        units = _rounded_units(given.float(), divisor)
        result.copy_(units.add_(offset).clamp_(target.lowest, target.largest).nan_to_num_(0.0))
    zero_points = torch.zeros_like(scales, dtype=torch.int32) if offsets is None else offsets.to(torch.int32)
    return values, scales, zero_points


def _rounded_units(lines: Tensor, divisor: Tensor) -> Tensor:
    """Quotients to the nearest integer, half to even, as if they were exact.

    Rounding one to float32 never carries it over the middle between two integers, only onto it: those are divided again
    in float64.
    """
    quotients = lines / divisor
    units = torch.round(quotients)
    off = quotients.sub_(units).abs_()
    # Infinite quotients and NaNs leave a NaN, and a maximum does not lose it.
    doubtful = (~(off.amax(1) < 0.5)).nonzero().flatten()
    if doubtful.numel():
        line, column = (~(off[doubtful] < 0.5)).nonzero(as_tuple=True)
        line = doubtful[line]
        units[line, column] = torch.round(lines[line, column].double() / divisor[line, 0].double()).float()
    return units


def _shape_of_scales(tensor: Tensor, granularity: str, group_size: int | None) -> tuple[int, int] | None:
    """How many scales there are, or `None` where no view of the tensor has one of them in each line."""
    rows, columns = tensor.numel() // max(tensor.shape[-1], 1), tensor.shape[-1]
    if tensor.numel() == 0:
        return None
    if granularity == "per_tensor":
        return 1, 1
    if granularity == "per_channel":
        return rows, 1
    group = group_size or _GROUP
    return None if columns % group else (rows, columns // group)


def _lines(tensor: Tensor, shape: tuple[int, int]) -> Tensor:
    """The elements as lines that each have one scale."""
    return tensor.reshape(-1, tensor.shape[-1] // shape[1])


def _per_line(scales: Tensor, lines: Tensor) -> Tensor:
    return scales.reshape(-1, 1).expand(lines.shape[0], 1)


def grouped(rows: Tensor, granularity: str, group_size: int | None) -> Tensor:
    """The elements as rows of scales, scales, elements that share it; the last group is filled up with NaN."""
    if granularity == "per_tensor":
        return rows.reshape(1, 1, -1)
    if granularity == "per_channel":
        return rows[:, None]
    group = group_size or _GROUP
    count = -(-rows.shape[1] // group)
    padded = torch.nn.functional.pad(rows, (0, count * group - rows.shape[1]), value=torch.nan)
    return padded.reshape(rows.shape[0], count, group)


def ungrouped(values: Tensor, input: Tensor, granularity: str) -> Tensor:
    if granularity == "blockwise":
        values = values.flatten(1)[:, : input.shape[-1]]
    return values.reshape(input.shape)


def per_group(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Given scales (one per group, one per row of them, or one) as one per group."""
    if scale.dim() == 1 and scale.shape[0] != 1:
        scale = scale[:, None]
    return scale.expand(shape[:2])


def extremes(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest number of each group; zero where it holds none. NaN does not count."""
    if groups.shape[2] == 0:
        nothing = groups.new_zeros(groups.shape[:2])
        return nothing, nothing
    nan = groups.isnan()
    lowest = groups.masked_fill(nan, torch.inf).amin(-1)
    largest = groups.masked_fill(nan, -torch.inf).amax(-1)
    empty = lowest > largest
    return lowest.masked_fill(empty, 0.0), largest.masked_fill(empty, 0.0)


def _rounded(units: Tensor, target: Format) -> Tensor:
    """Numbers within the format's range, rounded to it once, half to even."""
    if target.dtype == torch.int8:
        return torch.round(units).nan_to_num(0.0).to(torch.int8)
    # torch would round to float32 first, and a second time from there.
    exponent = (torch.frexp(units).exponent - 1).clamp(min=target.exponent) - target.mantissa
    steps = _powers_of_two(exponent, units.dtype)
    return (torch.round(units / steps) * steps).to(target.dtype)


def _powers_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2**exponent. In float64 that is the exponent plus 1023 in bits 52 to 62, which every device can write;
    `torch.ldexp` is not to be had from all backends of torch."""
    if dtype != torch.float64:
        return torch.ldexp(torch.ones(exponent.shape, dtype=dtype, device=exponent.device), exponent)
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def dequantize(
    values: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: str,
    granularity: str,
    group_size: int | None,
) -> Tensor:
    """Back to floating point."""
    result = _FLOATS[dtype]
    if (
        zero_points is None
        and result == torch.float32
        and granularity != "blockwise"
        and scales.dim() == values.dim() == 2
    ):
        # What one writes: one scale for each row, or for all of them.
        return values.to(torch.float32) * scales
    work = torch.float64 if result == torch.float64 or zero_points is not None else torch.float32
    groups = grouped(rows_of(values).to(work), granularity, group_size)
    if zero_points is not None:
        groups = groups - per_group(zero_points, groups.shape).to(work)[..., None]
    groups = groups * per_group(scales, groups.shape).to(work)[..., None]
    return ungrouped(groups.to(result), values, granularity)


def dequantize_blocked(
    values: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: str,
    granularity: str,
    group_size: int | None,
) -> Tensor:
    """The same in float32 and piece by piece, where that is exact up to the product."""
    shape = _shape_of_scales(values, granularity, group_size)
    if shape is None:
        return dequantize(values, scales, zero_points, dtype, granularity, group_size)
    lines = _lines(values, shape)
    factors, offsets = _per_line(per_group(scales, shape), lines), None
    if zero_points is not None and bool(zero_points.any()):
        lowest, largest = int(zero_points.amin()), int(zero_points.amax())
        if values.dtype != torch.int8 or max(-lowest, largest) > _EXACT:
            return dequantize(values, scales, zero_points, dtype, granularity, group_size)
        offsets = _per_line(per_group(zero_points, shape), lines).float()
    output = torch.empty(values.shape, dtype=_FLOATS[dtype], device=values.device)
    taken = [] if offsets is None else [offsets]
    for units, factor, result, *offset in blocks(lines, factors, output.view(lines.shape), *taken, whole=1):
        wide = units.float()
        result.copy_((wide.sub_(offset[0]) if offset else wide).mul_(factor))
    return output
