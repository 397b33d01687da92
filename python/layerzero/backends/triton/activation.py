# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Activations: every element is read once and written once."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import Launch, empty_like, planned, power, rows_of

_BLOCK = 2048


@triton.jit
def _silu_mul_flat(gate_ptr, up_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    y = gate * (1.0 / (1.0 + tl.exp(-gate))) * up
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def _silu_mul_rows(
    gate_ptr, up_ptr, y_ptr,
    width, inner, step, outer, u_inner, u_step, u_outer, pieces,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    gate_at = row // inner * outer + row % inner * step + column
    up_at = row // u_inner * u_outer + row % u_inner * u_step + column
    gate = tl.load(gate_ptr + gate_at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + up_at, mask=there, other=0.0).to(tl.float32)
    y = gate * (1.0 / (1.0 + tl.exp(-gate))) * up
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def _gelu(x_ptr, y_ptr, count, TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    if TANH:
        # (1 + tanh(y)) / 2 = sigmoid(2 y)
        twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = x * (1.0 / (1.0 + tl.exp(-twice)))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < count)


@planned
def silu_mul(gate: Tensor, up: Tensor) -> Any:
    """silu of the gate times the other half, which may be halves of one tensor."""
    if gate.is_contiguous() and up.is_contiguous():
        count = gate.numel()
        launch = Launch(_silu_mul_flat, -(-count // _BLOCK), gate.device, (count,), (_BLOCK,))

        def flat(gate: Tensor, up: Tensor) -> Tensor:
            output = torch.empty_like(gate)
            launch(gate, up, output)
            return output

        return flat, (gate, up)
    rows, others = rows_of(gate), rows_of(up)
    if rows is None or others is None:
        return lambda gate, up: silu_mul(gate.contiguous(), up.contiguous()), (gate, up)
    width = gate.shape[-1]
    block = min(power(width), _BLOCK)
    pieces = -(-width // block)
    grid = gate.numel() // width * pieces if width else 0
    scalars = (width, *rows[1:], *others[1:], pieces)
    spread = Launch(_silu_mul_rows, grid, gate.device, scalars, (block,), max(block // 512, 1))

    def call(gate: Tensor, up: Tensor) -> Tensor:
        output = empty_like(gate)
        spread(gate, up, output)
        return output

    return call, (gate, up)


@planned
def gelu(input: Tensor, approximate: str) -> Any:
    """Gaussian error linear unit, either form."""
    if not input.is_contiguous():
        return lambda input: gelu(input.contiguous(), approximate), (input,)
    count = input.numel()
    launch = Launch(_gelu, -(-count // _BLOCK), input.device, (count,), (approximate == "tanh", _BLOCK))

    def call(input: Tensor) -> Tensor:
        output = torch.empty_like(input)
        launch(input, output)
        return output

    return call, (input,)


KERNELS: dict[str, Callable[..., Any]] = {"triton.silu_mul": silu_mul, "triton.gelu": gelu}
