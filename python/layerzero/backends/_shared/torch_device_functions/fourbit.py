"""Rounding to 4 bits and back, composed of torch's own operations: two values to a byte, the first in the low half."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..blocks import rows_of
from ..torch_functions.quantize import Format, extremes, grouped, per_group, spread, ungrouped
from ..torch_functions.quantize import dequantize as from_units

# How many elements share a scale where nothing is said.
_GROUPS = {"int4": 32, "mxfp4": 32, "nvfp4": 16}
# Integers are stored as bytes here, until they are packed.
_INT4 = Format(torch.uint8, -8.0, 7.0)
# The largest numbers of E2M1 and of E4M3.
_LARGEST, _LARGEST_SCALE = 6.0, 448.0


@torch.no_grad()
def quantize(
    input: Tensor,
    scale: Tensor | None,
    dtype: str,
    granularity: str,
    group_size: int | None,
    zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds to 4 bits with scales. Quotients are formed in float64: a tie is a tie only if it really is one."""
    groups = grouped(rows_of(input).double(), granularity, group_size or _GROUPS[dtype])
    offsets = None
    if scale is not None:
        scales = per_group(scale, groups.shape).clone(memory_format=torch.contiguous_format)
    elif dtype == "int4":
        scales, offsets = spread(*extremes(groups), _INT4, zero_point)
        # Zero may have a sign.
        scales = scales.abs()
    else:
        lowest, largest = extremes(groups)
        scales = (_power if dtype == "mxfp4" else _e4m3)(torch.maximum(-lowest, largest).abs())
    units = groups / scales.double()[..., None]
    # A scale of zero leaves zeros.
    units = torch.where((scales == 0.0)[..., None] & ~groups.isnan(), 0.0, units)
    if dtype == "int4":
        if offsets is not None:
            offsets = offsets.nan_to_num(0.0)
            units = torch.round(units) + offsets[..., None]
        units = torch.round(units.clamp(_INT4.lowest, _INT4.largest))
        codes = units.nan_to_num(0.0).to(torch.int8).view(torch.uint8) & 15
    else:
        # There is no NaN: one leaves its sign.
        codes = _e2m1(torch.where(units.isnan(), torch.copysign(torch.zeros_like(units), groups), units))
    codes = ungrouped(codes, input, granularity)
    zero_points = torch.zeros_like(scales, dtype=torch.int32) if offsets is None else offsets.to(torch.int32)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales, zero_points


def _exponent(size: Tensor) -> Tensor:
    """The exponents of positive float64 numbers."""
    return (size.view(torch.int64) >> 52) - 1023


def _two_to(exponent: Tensor) -> Tensor:
    """Powers of two, as float64."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _power(largest: Tensor) -> Tensor:
    """Scales that are powers of two; 4 = 2^2 is the largest power of two of E2M1."""
    scales = _two_to((_exponent(largest) - 2).clamp(-127, 127))
    return torch.where(largest == 0.0, 0.0, scales).float()


def _e4m3(largest: Tensor) -> Tensor:
    """Scales that are numbers of E4M3."""
    size = (largest / _LARGEST).clamp(max=_LARGEST_SCALE)
    step = _two_to(_exponent(size).clamp(min=-6) - 3)
    return (torch.round(size / step) * step).float()


def _e2m1(units: Tensor) -> Tensor:
    """The codes of E2M1 for numbers."""
    size = units.abs().clamp(max=_LARGEST)
    exponent = _exponent(size).clamp(min=0)
    steps = torch.round(size * _two_to(1 - exponent)).to(torch.int64)
    return ((exponent << 1) + steps + (units.signbit().to(torch.int64) << 3)).to(torch.uint8)


def _of(form: str) -> Callable[..., Any]:
    def dequantize(
        values: Tensor,
        scales: Tensor,
        zero_points: Tensor | None,
        dtype: str,
        granularity: str,
        group_size: int | None,
    ) -> Tensor:
        """Back to floating point from packed values."""
        codes = torch.stack((values & 15, values >> 4), -1).flatten(-2)
        units = _numbers(codes, form)
        return from_units(units, scales, zero_points, dtype, granularity, group_size or _GROUPS[form])

    return dequantize


def _numbers(codes: Tensor, form: str) -> Tensor:
    """What codes stand for."""
    if form == "int4":
        # The sign is the upper bit of four.
        return (codes << 4).view(torch.int8) >> 4
    # Sign, exponent and mantissa where a float16 has them, and the exponents' difference made up for.
    wide = codes.to(torch.int16)
    return ((wide & 8) << 12 | (wide & 7) << 9).view(torch.float16).float() * 2.0**14


dequantize_int4, dequantize_mxfp4, dequantize_nvfp4 = (_of(form) for form in _GROUPS)
