"""8-bit formats in as few passes over the data as torch's functions allow, without a step that waits for the device.

Kernels of torch convert their operands as they load them, and results as they store them: a pass reads what is given and
writes what is wanted, with nothing of another width in between.
"""

import math

import torch
from torch import Tensor

from .._shared.blocks import rows_of
from .._shared.torch_functions import quantize as composed
from .._shared.traced_tensors import is_traced

_INTEGERS = 1.5 * 2.0**52
"""float64 numbers of this size are integers: adding it rounds half to even, and the lowest bits of the sum are the integer in
two's complement. Of infinity and of a NaN that a division makes they are zero."""

_SOMETHING = 1 << 30
"""In the lower half of a float64: the 22nd digit of the mantissa. A float32 has 23."""


def quantize(
    input: Tensor,
    scale: Tensor | None,
    dtype: str,
    granularity: str,
    group_size: int | None,
    zero_point: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds to 8 bits. Quotients are formed in float64: a tie is a tie only if it really is one."""
    given = scale is not None or zero_point or granularity == "blockwise"
    if given or input.dtype == torch.float64 or input.numel() == 0 or is_traced():
        return composed._quantize(input, scale, dtype, granularity, group_size, zero_point)
    target = composed._FORMATS[dtype]
    rows = rows_of(input.detach() if input.requires_grad else input).contiguous()
    # NaN does not count for a scale.
    numbers = rows.nan_to_num(0.0, math.inf, -math.inf)
    over = (0, 1) if granularity == "per_tensor" else -1
    largest = torch.linalg.vector_norm(numbers, math.inf, over, True, dtype=torch.float32)
    # By a number, torch divides as it multiplies by the inverse: in float64 that is exact enough for one rounding.
    scales = largest.double().div_(target.largest).float()
    if target.dtype == torch.int8:
        values = _integers(numbers, scales)
    else:
        values = _floats(rows, scales, target)
    return values.view(input.shape), scales, torch.zeros_like(scales, dtype=torch.int32)


def _integers(numbers: Tensor, scales: Tensor) -> Tensor:
    """Quotients as integers. A scale that has few digits leaves quotients beyond the range."""
    sums = torch.addcdiv(scales.new_full((1, 1), _INTEGERS, dtype=torch.float64), numbers, scales)
    return sums.view(torch.int16)[:, ::4].clamp(-128, 127).to(torch.int8)


def _floats(rows: Tensor, scales: Tensor, target: composed.Format) -> Tensor:
    """Quotients to the nearest 8-bit float. torch rounds to float32 on the way, which no tie may come of: what a quotient has
    beyond 20 digits of its mantissa only says on which side of a tie it is, and is replaced by a digit that float32 has."""
    nothing = scales == 0.0
    divisors = scales.double().masked_fill_(nothing, 1.0)
    # A scale of zero gives zeros without a sign.
    signless = torch.where(nothing, 0.0, -0.0)
    if target.dtype == torch.float8_e5m2:
        # Its largest number times a scale below bfloat16's normal numbers may round up there, and what is above it is infinite.
        quotients = torch.addcdiv(signless, rows, divisors).clamp_(-target.largest, target.largest)
    else:
        limits = torch.mul(scales, target.largest, out=torch.empty_like(scales, dtype=rows.dtype))
        quotients = torch.addcdiv(signless, rows.clamp(-limits, limits), divisors)
    rest = quotients.view(torch.int32)[:, ::2]
    torch.mul(rest != 0, _SOMETHING, out=rest)
    return quotients.to(target.dtype)


def dequantize(
    values: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: str,
    granularity: str,
    group_size: int | None,
) -> Tensor:
    """Back to floating point."""
    shape = composed._shape_of_scales(values, granularity, group_size)
    if shape is None or is_traced() or scales.requires_grad:
        return composed.dequantize(values, scales, zero_points, dtype, granularity, group_size)
    result = torch.empty(values.shape, dtype=composed._FLOATS[dtype], device=values.device)
    wide = result.dtype == torch.float64 or zero_points is not None
    units = values.reshape(-1, shape[1], values.shape[-1] // shape[1])
    factors = composed.per_group(scales, shape)[..., None]
    if wide:
        factors = factors.double()
    if values.dtype != torch.int8:
        # Of 8-bit floats torch's kernels convert nothing on the way.
        units = units.to(factors.dtype)
    if zero_points is not None:
        units = units - composed.per_group(zero_points, shape).double()[..., None]
    torch.mul(units, factors, out=result.view(units.shape))
    return result
