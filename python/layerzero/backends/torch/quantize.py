"""Conversion between floating point and quantized storage: 8-bit integers and floats."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Format:
    dtype: torch.dtype
    lowest: float
    largest: float
    # Of a float format: bits of the mantissa, and the exponent of its smallest normal number.
    mantissa: int = 0
    exponent: int = 0


_FORMATS = {
    "int8": _Format(torch.int8, -128.0, 127.0),
    "fp8_e4m3": _Format(torch.float8_e4m3fn, -448.0, 448.0, 3, -6),
    "fp8_e5m2": _Format(torch.float8_e5m2, -57344.0, 57344.0, 2, -14),
}
_FLOATS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


@torch.no_grad()
def quantize(
    input: Tensor,
    scale: Tensor | None,
    dtype: str,
    granularity: str,
    group_size: int | None,
    zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds to 8 bits with scales. Quotients are formed in float64: a tie is a tie only if it really is one."""
    target = _FORMATS[dtype]
    # Rows of groups: every scale covers the last axis.
    groups = _grouped(_rows(input).double(), granularity, group_size)
    offsets = None
    if scale is not None:
        scales = _per_group(scale, groups).clone(memory_format=torch.contiguous_format)
    elif zero_point:
        lowest, largest = _extremes(groups)
        lowest, largest = lowest.clamp(max=0.0), largest.clamp(min=0.0)
        scales = ((largest - lowest) / (target.largest - target.lowest)).float()
        offsets = torch.round(target.lowest - lowest / scales.double())
        offsets = torch.where(scales == 0.0, 0.0, offsets)
    else:
        lowest, largest = _extremes(groups)
        scales = (torch.maximum(-lowest, largest) / target.largest).float()
    units = groups / scales.double()[..., None]
    # A scale of zero leaves zeros, and the NaNs of formats that have them.
    units = torch.where((scales == 0.0)[..., None] & ~groups.isnan(), 0.0, units)
    if offsets is not None:
        units = torch.round(units) + offsets[..., None]
    values = _rounded(units.clamp(target.lowest, target.largest), target)
    zero_points = torch.zeros_like(scales, dtype=torch.int32) if offsets is None else offsets.to(torch.int32)
    return _ungrouped(values, input, granularity), scales, zero_points


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _grouped(rows: Tensor, granularity: str, group_size: int | None) -> Tensor:
    """The elements as rows of scales, scales, elements that share it; the last group is filled up with NaN."""
    if granularity == "per_tensor":
        return rows.reshape(1, 1, -1)
    if granularity == "per_channel":
        return rows[:, None]
    group = group_size or 32
    count = -(-rows.shape[1] // group)
    padded = torch.nn.functional.pad(rows, (0, count * group - rows.shape[1]), value=torch.nan)
    return padded.reshape(rows.shape[0], count, group)


def _ungrouped(values: Tensor, input: Tensor, granularity: str) -> Tensor:
    if granularity == "blockwise":
        values = values.flatten(1)[:, : input.shape[-1]]
    return values.reshape(input.shape)


def _per_group(scale: Tensor, groups: Tensor) -> Tensor:
    """Given scales (one per group, one per row of them, or one) as one per group."""
    if scale.dim() == 1 and scale.shape[0] != 1:
        scale = scale[:, None]
    return scale.expand(groups.shape[:2])


def _extremes(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest number of each group; zero where it holds none. NaN does not count."""
    if groups.shape[2] == 0:
        nothing = groups.new_zeros(groups.shape[:2])
        return nothing, nothing
    nan = groups.isnan()
    lowest = groups.masked_fill(nan, torch.inf).amin(-1)
    largest = groups.masked_fill(nan, -torch.inf).amax(-1)
    empty = lowest > largest
    return lowest.masked_fill(empty, 0.0), largest.masked_fill(empty, 0.0)


def _rounded(units: Tensor, target: _Format) -> Tensor:
    """Numbers within the format's range, rounded to it once, half to even."""
    if target.dtype == torch.int8:
        return torch.round(units).nan_to_num(0.0).to(torch.int8)
    # torch would round to float32 first, and a second time from there.
    exponent = (torch.frexp(units).exponent - 1).clamp(min=target.exponent) - target.mantissa
    steps = torch.ldexp(torch.ones_like(units), exponent)
    return (torch.round(units / steps) * steps).to(target.dtype)


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
    work = torch.float64 if result == torch.float64 or zero_points is not None else torch.float32
    groups = _grouped(_rows(values).to(work), granularity, group_size)
    if zero_points is not None:
        groups = groups - _per_group(zero_points, groups).to(work)[..., None]
    groups = groups * _per_group(scales, groups).to(work)[..., None]
    return _ungrouped(groups.to(result), values, granularity)
