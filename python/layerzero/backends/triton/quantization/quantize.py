# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Rounding to 8 or 4 bits: to the last bit as if quotients were exact. Numbers are read once, but where one scale covers
more of them than a program holds."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Launch, planned, power
from .encoding import FORMATS, Format, encoded, scaled
from .groups import Groups, step

# How many elements a program and a thread have, about, and how many a program has at most at once: a group beyond that is
# read twice.
_TILE = 2048
_PER_THREAD = 16
_LARGEST_TILE = 16384
_PIECE = 8192
# How many programs look for the ends of a whole tensor.
_MEASURING = 1024


@triton.jit
def _packed(code, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes of 4 bits, two to a byte: the even element in the low half."""
    low, high = tl.split(tl.reshape(code, [ROWS, COLUMNS // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def _ends(x, OFFSET: tl.constexpr):
    """The smallest and the largest number of each row, and zero, or zero and the largest magnitude; NaN does not count."""
    if OFFSET:
        lowest, largest = tl.min(x, 1), tl.max(x, 1)
    else:
        largest = tl.max(tl.abs(x), 1)
        lowest = tl.zeros_like(largest)
    return tl.where(lowest < 0.0, lowest, 0.0), tl.where(largest > 0.0, largest, 0.0)


@triton.jit
def _groups(
    x_ptr, given_ptr, values_ptr, scales_ptr, zeros_ptr,
    groups, columns, group, across, apart,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr, FULL: tl.constexpr, RAGGED: tl.constexpr,
    PACKED: tl.constexpr, GIVEN: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, EXPONENT: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Groups of a row; `RAGGED` if the last of the `across` groups of a row is shorter, `FULL` if all fill the block."""
    number = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = (number < groups)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    if RAGGED:
        place = number % across * group
        start = (number // across * columns + place)[:, None]
        width = tl.minimum(columns - place, group)[:, None]
    else:
        start = (number * group)[:, None]
        width = group
    there = inside
    if not FULL:
        there = inside & (lane < width)
    x = tl.load(x_ptr + start + lane, mask=there, other=0.0).to(tl.float32)
    if GIVEN:
        scale = tl.load(given_ptr + number * apart, mask=number < groups, other=1.0)
        zero = tl.zeros_like(scale).to(tl.int32)
    else:
        lowest, largest = _ends(x, OFFSET)
        if not ONCE:
            for begin in range(BLOCK, group, BLOCK):
                more = inside & (lane + begin < width)
                x = tl.load(x_ptr + start + begin + lane, mask=more, other=0.0).to(tl.float32)
                low, high = _ends(x, OFFSET)
                lowest, largest = tl.minimum(lowest, low), tl.maximum(largest, high)
        scale, zero = scaled(lowest, largest, OFFSET, SCALES, BITS, LARGEST)
    tl.store(scales_ptr + number, scale, mask=number < groups)
    tl.store(zeros_ptr + number, zero, mask=number < groups)
    if ONCE:
        code = encoded(x, scale, zero, GIVEN, OFFSET, SCALES, BITS, MANTISSA, EXPONENT, LARGEST)
        if PACKED:
            half = tl.arange(0, BLOCK // 2)[None, :]
            there = inside
            if not FULL:
                there = inside & (half < width // 2)
            tl.store(values_ptr + start // 2 + half, _packed(code, GROUPS, BLOCK), mask=there)
        else:
            tl.store(values_ptr + start + lane, code.to(tl.uint8), mask=there)
    else:
        for begin in range(0, group, BLOCK):
            more = inside & (lane + begin < width)
            x = tl.load(x_ptr + start + begin + lane, mask=more, other=0.0).to(tl.float32)
            code = encoded(x, scale, zero, GIVEN, OFFSET, SCALES, BITS, MANTISSA, EXPONENT, LARGEST)
            if PACKED:
                half = tl.arange(0, BLOCK // 2)[None, :]
                more = inside & (half < (width - begin) // 2)
                tl.store(values_ptr + (start + begin) // 2 + half, _packed(code, GROUPS, BLOCK), mask=more)
            else:
                tl.store(values_ptr + start + begin + lane, code.to(tl.uint8), mask=more)


@triton.jit
def _tensor_ends(x_ptr, ends_ptr, count, pieces, rounds, BLOCK: tl.constexpr, OFFSET: tl.constexpr):
    """The smallest and the largest number of every so many pieces, and zero."""
    lane = tl.arange(0, BLOCK)[None, :]
    lowest = tl.zeros([1], tl.float32)
    largest = tl.zeros([1], tl.float32)
    for turn in range(rounds):
        at = (tl.program_id(0) + turn * pieces).to(tl.int64) * BLOCK + lane
        x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
        low, high = _ends(x, OFFSET)
        lowest, largest = tl.minimum(lowest, low), tl.maximum(largest, high)
    one = tl.arange(0, 1)
    tl.store(ends_ptr + tl.program_id(0) * 2 + one, lowest)
    tl.store(ends_ptr + tl.program_id(0) * 2 + 1 + one, largest)


@triton.jit
def _tensor(
    x_ptr, given_ptr, values_ptr, scales_ptr, zeros_ptr,
    count, pieces,
    BLOCK: tl.constexpr, ENDS: tl.constexpr, GIVEN: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Of one scale; `given_ptr` is where it is, or where the ends of the `pieces` are."""
    one = tl.arange(0, 1)
    if GIVEN:
        scale = tl.load(given_ptr + one)
        zero = tl.zeros_like(scale).to(tl.int32)
    else:
        piece = tl.arange(0, ENDS)[None, :]
        lowest = tl.load(given_ptr + piece * 2, mask=piece < pieces, other=0.0)
        largest = tl.load(given_ptr + piece * 2 + 1, mask=piece < pieces, other=0.0)
        scale, zero = scaled(tl.min(lowest, 1), tl.max(largest, 1), OFFSET, SCALES, BITS, LARGEST)
    if tl.program_id(0) == 0:
        tl.store(scales_ptr + one, scale)
        tl.store(zeros_ptr + one, zero)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    code = encoded(x, scale, zero, GIVEN, OFFSET, SCALES, BITS, MANTISSA, EXPONENT, LARGEST)
    if BITS == 4:
        half = tl.program_id(0).to(tl.int64) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(values_ptr + half, _packed(code, 1, BLOCK), mask=half < count // 2)
    else:
        tl.store(values_ptr + at, code.to(tl.uint8), mask=at < count)


@triton.jit
def _pairs(codes_ptr, values_ptr, count, BLOCK: tl.constexpr):
    """Codes that lie in a byte each, two to a byte."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)[None, :]
    half = tl.program_id(0).to(tl.int64) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    code = tl.load(codes_ptr + at, mask=at < count, other=0).to(tl.int32)
    tl.store(values_ptr + half, _packed(code, 1, BLOCK), mask=half < count // 2)


def _by_groups(
    groups: Groups, form: Format, scale: Tensor | None, zero_point: bool, device: torch.device
) -> tuple[Launch, Launch | None]:
    """What rounds the groups of rows, and what packs pairs that lie in two of them."""
    number, size = groups.rows * groups.across, groups.size
    block = min(power(size), _LARGEST_TILE)
    together = max(_TILE // block, 1)
    packs = form.bits == 4 and (size % 2 == 0 or groups.across == 1)
    layout = (block >= size, block == size and not groups.ragged, groups.ragged, packs)
    scalars = (number, groups.columns, size, groups.across, step(scale))
    constants = (together, block, *layout, *_kinds(form, scale, zero_point))
    warps = min(max(together * block // (32 * _PER_THREAD), 1), 16)
    convert = Launch(_groups, -(-number // together), device, scalars, constants, warps)
    if form.bits == 8 or packs:
        return convert, None
    count = groups.rows * groups.columns
    return convert, Launch(_pairs, -(-count // _PIECE), device, (count,), (_PIECE,), 8)


def _whole(
    count: int, form: Format, scale: Tensor | None, zero_point: bool, device: torch.device
) -> tuple[Launch, Launch | None, int]:
    """What rounds by one scale, and what looks for the ends first, with how many programs."""
    grid = -(-count // _PIECE)
    pieces = max(min(grid, _MEASURING), 1)
    constants = (_PIECE, power(pieces), *_kinds(form, scale, zero_point))
    convert = Launch(_tensor, max(grid, 1), device, (count, pieces), constants, 8)
    if scale is not None:
        return convert, None, 0
    rounds = -(-grid // pieces)
    return convert, Launch(_tensor_ends, pieces, device, (count, pieces, rounds), (_PIECE, zero_point), 8), pieces


def _kinds(form: Format, scale: Tensor | None, zero_point: bool) -> tuple[Any, ...]:
    """What kernels are compiled for: the last of their constants."""
    return scale is not None, zero_point, form.scales, form.bits, form.mantissa, form.exponent, form.largest


@planned
def quantize(
    input: Tensor, scale: Tensor | None, dtype: str, granularity: str, group_size: int | None, zero_point: bool
) -> Any:
    """Rounds to a format with scales."""
    form, device, tensors = FORMATS[dtype], input.device, (input, scale)
    groups = Groups.of(tuple(input.shape), granularity, group_size or form.group)
    if not (input.is_contiguous() and groups.have(scale)):
        rest = (dtype, granularity, group_size, zero_point)
        ready = quantize.direct(input.contiguous(), groups.each(scale), *rest)[0]  # type: ignore[attr-defined]
        return lambda input, scale: ready(input.contiguous(), groups.each(scale)), tensors
    pairs, measure, pieces = None, None, 0
    if granularity == "per_tensor":
        convert, measure, pieces = _whole(input.numel(), form, scale, zero_point, device)
    else:
        convert, pairs = _by_groups(groups, form, scale, zero_point, device)
    shape, stored = groups.shape, (*input.shape[:-1], input.shape[-1] * form.bits // 8)

    def call(input: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        values = torch.empty(stored, dtype=form.stored, device=device)
        scales = torch.empty(shape, dtype=torch.float32, device=device)
        zeros = torch.empty(shape, dtype=torch.int32, device=device)
        codes = values if form.stored == torch.uint8 else values.view(torch.uint8)
        if pairs is not None:
            alone = torch.empty(input.shape, dtype=torch.uint8, device=device)
            convert(input, scale, alone, scales, zeros)
            pairs(alone, codes)
        elif measure is not None:
            ends = torch.empty(pieces, 2, dtype=torch.float32, device=device)
            measure(input, ends)
            convert(input, ends, codes, scales, zeros)
        else:
            convert(input, scale, codes, scales, zeros)
        return values, scales, zeros

    return call, tensors


KERNELS: dict[str, Callable[..., Any]] = {"triton.quantize": quantize, "triton.quantize.packed": quantize}
