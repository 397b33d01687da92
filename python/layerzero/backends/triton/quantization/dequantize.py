# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Back from 8 or 4 bits: products are rounded once, to the dtype of the result."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Launch, planned, power
from .encoding import FORMATS, decoded, offset_product, product
from .groups import Groups, step

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
# How many elements a program and a thread have.
_TILE = 2048
_PER_THREAD = 16


@triton.jit
def _decoded(
    values_ptr, scales_ptr, zeros_ptr, y_ptr,
    parts, pieces, columns, group, across, scale_step, zero_step,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, FULL: tl.constexpr, RAGGED: tl.constexpr,
    PAIRS: tl.constexpr, OFFSET: tl.constexpr, NARROW: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """Parts of groups, `pieces` of each where they are `SPLIT`; `PAIRS` if no byte is shared by two groups."""
    part = tl.program_id(0).to(tl.int64) * PARTS + tl.arange(0, PARTS)
    inside = (part < parts)[:, None]
    number, begin = part, tl.zeros([PARTS], tl.int64)
    if SPLIT:
        number, begin = part // pieces, part % pieces * BLOCK
    if RAGGED:
        place = number % across * group
        start = (number // across * columns + place + begin)[:, None]
        width = (tl.minimum(columns - place, group) - begin)[:, None]
    else:
        start = (number * group + begin)[:, None]
        width = (group - begin)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    there = inside
    if not FULL:
        there = inside & (lane < width)
    if PAIRS:
        half = tl.arange(0, BLOCK // 2)[None, :]
        both = inside
        if not FULL:
            both = inside & (half < width // 2)
        pair = tl.load(values_ptr + start // 2 + half, mask=both, other=0).to(tl.int32)
        code = tl.reshape(tl.join(pair & 15, pair >> 4), [PARTS, BLOCK])
    elif BITS == 4:
        at = start + lane
        pair = tl.load(values_ptr + at // 2, mask=there, other=0).to(tl.int32)
        code = (pair >> ((at % 2) * 4).to(tl.int32)) & 15
    else:
        code = tl.load(values_ptr + start + lane, mask=there, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + number * scale_step, mask=part < parts, other=0.0)[:, None]
    units = decoded(code, BITS, MANTISSA, FACTOR)
    if OFFSET:
        zero = tl.load(zeros_ptr + number * zero_step, mask=part < parts, other=0)[:, None]
        y = offset_product(units, zero, scale, NARROW)
    else:
        y = product(units, scale, NARROW)
    tl.store(y_ptr + start + lane, y.to(y_ptr.dtype.element_ty), mask=there)


def _plan(
    dtype: str,
    values: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    result: str,
    granularity: str,
    group_size: int | None,
) -> Any:
    """What dequantizes a format, and the tensors it is called with."""
    form, device, tensors = FORMATS[dtype], values.device, (values, scales, zero_points)
    shape = (*values.shape[:-1], values.shape[-1] * 8 // form.bits)
    groups = Groups.of(shape, granularity, group_size or form.group)
    if not (values.is_contiguous() and groups.have(scales) and groups.have(zero_points)):
        copies = (values.contiguous(), groups.each(scales), groups.each(zero_points))
        ready = _plan(dtype, *copies, result, granularity, group_size)[0]
        return lambda v, s, z: ready(v.contiguous(), groups.each(s), groups.each(z)), tensors
    size, block = groups.size, min(power(groups.size), _TILE)
    together, pieces = _TILE // block, -(-groups.size // block)
    parts = groups.rows * groups.across * pieces if groups.columns else 0
    layout = (pieces > 1, size % block == 0 and not groups.ragged, groups.ragged, form.bits == 4 and size % 2 == 0)
    factor = 2.0 ** (126 + form.exponent)
    kinds = (zero_points is not None, result != "float32", form.bits, form.mantissa, factor)
    scalars = (parts, pieces, groups.columns, size, groups.across, step(scales), step(zero_points))
    constants = (together, block, *layout, *kinds)
    launch = Launch(_decoded, -(-parts // together), device, scalars, constants, _TILE // (32 * _PER_THREAD))

    def call(values: Tensor, scales: Tensor, zero_points: Tensor | None) -> Tensor:
        output = torch.empty(shape, dtype=_FLOATS[result], device=device)
        # Packed values are described as if they lay row by row, which they may not.
        codes = values.contiguous() if form.bits == 4 else values.view(torch.uint8)
        launch(codes, scales, zero_points, output)
        return output

    return call, tensors


@planned
def dequantize(
    values: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: str, granularity: str, group_size: int | None
) -> Any:
    """Back to floating point from a format torch has a dtype for."""
    return _plan(_NAMES[values.dtype], values, scales, zero_points, dtype, granularity, group_size)


def _of(form: str) -> Callable[..., Any]:
    @planned
    def unpack(
        values: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: str, granularity: str, group_size: int | None
    ) -> Any:
        """Back to floating point from packed values."""
        return _plan(form, values, scales, zero_points, dtype, granularity, group_size)

    return unpack


KERNELS: dict[str, Callable[..., Any]] = {
    "triton.dequantize": dequantize,
    **{f"triton.dequantize.{form}": _of(form) for form in ("int4", "mxfp4", "nvfp4")},
}
