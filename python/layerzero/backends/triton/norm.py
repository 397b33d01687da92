# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Norms over the last dimension: a row is read once, and what is computed is rounded once."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import Launch, empty_like, planned, power, rows_of, warps_for

# Rows up to this are held by a block of threads; longer ones are read twice.
_WHOLE = 32768
_PIECE = 8192
# Short rows share a block.
_SHARED = 1024


@triton.jit
def _offsets(row, inner, step, outer):
    """Where rows begin: `inner` of them lie `step` apart, such runs `outer` apart."""
    row = row.to(tl.int64)
    return row // inner * outer + row % inner * step


@triton.jit
def _rms(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr,
    rows, hidden, inner, step, outer, r_inner, r_step, r_outer, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = (row < rows)[:, None] & (column < hidden)[None, :]
    x = tl.load(x_ptr + _offsets(row, inner, step, outer)[:, None] + column[None, :], mask=there, other=0.0)
    x = x.to(tl.float32)
    result = row.to(tl.int64)[:, None] * hidden + column[None, :]
    if ADDS:
        added = _offsets(row, r_inner, r_step, r_outer)[:, None] + column[None, :]
        x += tl.load(residual_ptr + added, mask=there, other=0.0).to(tl.float32)
        tl.store(total_ptr + result, x.to(total_ptr.dtype.element_ty), mask=there)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / hidden + eps)[:, None]
    if WEIGHTED:
        y *= tl.load(weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + result, y.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def _rms_long(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr,
    rows, hidden, inner, step, outer, r_inner, r_step, r_outer, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    x_ptr += _offsets(row, inner, step, outer)
    result = row.to(tl.int64) * hidden
    if ADDS:
        residual_ptr += _offsets(row, r_inner, r_step, r_outer)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
        if ADDS:
            x += tl.load(residual_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
            tl.store(total_ptr + result + column, x.to(total_ptr.dtype.element_ty), mask=column < hidden)
        squares += x * x
    factor = tl.rsqrt(tl.sum(squares, 0) / hidden + eps)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
        if ADDS:
            x += tl.load(residual_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
        y = x * factor
        if WEIGHTED:
            y *= tl.load(weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
        tl.store(y_ptr + result + column, y.to(y_ptr.dtype.element_ty), mask=column < hidden)


@triton.jit
def _layer(
    x_ptr, weight_ptr, bias_ptr, y_ptr,
    rows, hidden, inner, step, outer, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = (row < rows)[:, None] & (column < hidden)[None, :]
    x = tl.load(x_ptr + _offsets(row, inner, step, outer)[:, None] + column[None, :], mask=there, other=0.0)
    x = x.to(tl.float32)
    x = tl.where(there, x - (tl.sum(x, 1) / hidden)[:, None], 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / hidden + eps)[:, None]
    if WEIGHTED:
        y *= tl.load(weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        y += tl.load(bias_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)[None, :]
    result = row.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(y_ptr + result, y.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def _layer_long(
    x_ptr, weight_ptr, bias_ptr, y_ptr,
    rows, hidden, inner, step, outer, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    x_ptr += _offsets(row, inner, step, outer)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        sums += tl.load(x_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    mean = tl.sum(sums, 0) / hidden
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
        x = tl.where(column < hidden, x - mean, 0.0)
        squares += x * x
    factor = tl.rsqrt(tl.sum(squares, 0) / hidden + eps)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        there = column < hidden
        y = (tl.load(x_ptr + column, mask=there, other=0.0).to(tl.float32) - mean) * factor
        if WEIGHTED:
            y *= tl.load(weight_ptr + column, mask=there, other=0.0).to(tl.float32)
        if BIASED:
            y += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)
        tl.store(y_ptr + row.to(tl.int64) * hidden + column, y.to(y_ptr.dtype.element_ty), mask=there)


def _launch(
    kernels: tuple[Any, Any], input: Tensor, scalars: tuple[Any, ...], flags: tuple[bool, ...]
) -> Callable[..., None]:
    """A launch of the kernel for rows of this length. How rows share blocks depends on their length alone, so that a row's
    result does not depend on the others."""
    hidden = input.shape[-1]
    rows = input.numel() // max(hidden, 1)
    whole = hidden <= _WHOLE
    block = power(hidden) if whole else _PIECE
    shared = max(_SHARED // block, 1) if whole else 1
    warps = 32 if block > 16384 else warps_for(shared * block, input.element_size())
    grid = -(-rows // shared) if input.numel() else 0
    constants = (shared, block, *flags)
    return Launch(kernels[0 if whole else 1], grid, input.device, (rows, hidden, *scalars), constants, warps)


@planned
def rms_norm(input: Tensor, weight: Tensor | None, eps: float) -> Any:
    """Root-mean-square norm."""
    rows = rows_of(input)
    if rows is None:
        return lambda input, weight: rms_norm(input.contiguous(), weight, eps), (input, weight)
    places = rows[1:]
    launch = _launch((_rms, _rms_long), input, (*places, *places, eps), (False, weight is not None))
    new = torch.empty_like if input.is_contiguous() else empty_like

    def call(input: Tensor, weight: Tensor | None) -> Tensor:
        output = new(input)
        launch(input, None, weight, output, None)
        return output

    return call, (input, weight)


@planned
def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> Any:
    """Adds the residual, then normalizes the sum before it is rounded."""
    rows, others = rows_of(input), rows_of(residual)
    if rows is None or others is None:

        def copied(input: Tensor, residual: Tensor, weight: Tensor | None) -> Any:
            return fused_add_rms_norm(input.contiguous(), residual.contiguous(), weight, eps)

        return copied, (input, residual, weight)
    scalars = (*rows[1:], *others[1:], eps)
    launch = _launch((_rms, _rms_long), input, scalars, (True, weight is not None))
    new = torch.empty_like if input.is_contiguous() else empty_like

    def call(input: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        output, total = new(input), new(input)
        launch(input, residual, weight, output, total)
        return output, total

    return call, (input, residual, weight)


@planned
def layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    """Layer norm."""
    rows = rows_of(input)
    if rows is None:
        return lambda input, weight, bias: layer_norm(input.contiguous(), weight, bias, eps), (input, weight, bias)
    launch = _launch((_layer, _layer_long), input, (*rows[1:], eps), (weight is not None, bias is not None))
    new = torch.empty_like if input.is_contiguous() else empty_like

    def call(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        output = new(input)
        launch(input, weight, bias, output)
        return output

    return call, (input, weight, bias)


KERNELS: dict[str, Callable[..., Any]] = {
    "triton.rms_norm": rms_norm,
    "triton.add_rms_norm": fused_add_rms_norm,
    "triton.layer_norm": layer_norm,
}
