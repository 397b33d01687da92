# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Rotary embedding, and linear bias by distance.

A position that is not in the tables gives NaN: to raise, the host would have to wait for the device.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._shared.data_errors import bad_data
from .launching import Launch, planned, power

# How many pairs a block of threads turns.
_BLOCK = 2048
# How many biases a block of threads writes, at most.
_BIASES = 4096


@triton.jit
def _rope(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, y_ptr,
    seq, heads, head_dim, pairs, table, groups,
    x_batch, x_seq, x_head, y_batch, y_seq, y_head, cos_row, sin_row, p_batch, p_seq,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // groups).to(tl.int64)
    batch, at = token // seq, token % seq
    head = tl.program_id(0) % groups * HEADS + tl.arange(0, HEADS).to(tl.int64)
    x_ptr += batch * x_batch + at * x_seq + (head * x_head)[:, None]
    y_ptr += batch * y_batch + at * y_seq + (head * y_head)[:, None]
    position = at
    if POSITIONS:
        position = tl.load(positions_ptr + batch * p_batch + at * p_seq).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    known = (pair < pairs) & (position >= 0) & (position < table)
    cos = tl.load(cos_ptr + position * cos_row + pair, mask=known, other=float("nan")).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position * sin_row + pair, mask=known, other=float("nan")).to(tl.float32)[None, :]
    there = (head < heads)[:, None] & (pair < pairs)[None, :]
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)
        both = (head < heads)[:, None] & (column < 2 * pairs)[None, :]
        x = tl.load(x_ptr + column[None, :], mask=both, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [HEADS, PAIRS, 2]))
        turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), [HEADS, 2 * PAIRS])
        tl.store(y_ptr + column[None, :], turned.to(y_ptr.dtype.element_ty), mask=both)
    else:
        a = tl.load(x_ptr + pair[None, :], mask=there, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + pairs + pair[None, :], mask=there, other=0.0).to(tl.float32)
        tl.store(y_ptr + pair[None, :], (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=there)
        tl.store(y_ptr + pairs + pair[None, :], (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=there)
    if REST > 0:
        left = 2 * pairs + tl.arange(0, REST)
        beyond = (head < heads)[:, None] & (left < head_dim)[None, :]
        tl.store(y_ptr + left[None, :], tl.load(x_ptr + left[None, :], mask=beyond), mask=beyond)


def _sizes(tensor: Tensor, layout: str) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Batch, sequence and heads: how many, and how far apart."""
    shape, stride = tensor.shape, tensor.stride()
    if layout == "NHD":
        return (1, shape[0], shape[1]), (0, stride[0], stride[1])
    seq, heads = (2, 1) if layout == "BHSD" else (1, 2)
    return (shape[0], shape[seq], shape[heads]), (stride[0], stride[seq], stride[heads])


@planned
def rope(input: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, layout: str) -> Any:
    """Turns pairs half a head apart, or neighbours; what is not turned is copied."""
    (batch, seq, heads), strides = _sizes(input, layout)
    head_dim, (table, rot) = input.shape[-1], cos.shape
    pairs = head_dim // 2 if rot == head_dim else rot
    if positions is None and seq > table:
        raise bad_data(f"positions[{table}]", table, f"but cos and sin have rows 0 to below {table}")
    steps = (0, 0)
    if positions is not None:
        if layout == "NHD" and positions.dim() == 2 and positions.shape[0] != 1:
            raise bad_data("the number of rows of positions", positions.shape[0], "but the input is one sequence")
        shared = positions.dim() == 1 or positions.shape[0] == 1
        steps = 0 if shared else positions.stride(0), positions.stride(-1)
    # Where the result of a call like this one lies.
    _, y_strides = _sizes(torch.empty_like(input), layout)
    block, rest = power(pairs), head_dim - 2 * pairs
    together = min(power(heads), max(_BLOCK // block, 1))
    groups = -(-heads // together)
    launch = Launch(
        _rope,
        batch * seq * groups if input.numel() else 0,
        input.device,
        (seq, heads, head_dim, pairs, table, groups, *strides, *y_strides, cos.stride(0), sin.stride(0), *steps),
        (together, block, power(rest) if rest else 0, positions is not None, interleaved),
        min(max(together * block // 256, 1), 8),
    )

    def call(input: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
        output = torch.empty_like(input)
        launch(input, cos, sin, positions, output)
        return output

    return call, (input, cos, sin, positions)


@triton.jit
def _alibi(slopes_ptr, y_ptr, slope_step, seq_q, seq_k, parts, BLOCK: tl.constexpr):
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    head, query = row // seq_q, row % seq_q
    slope = tl.load(slopes_ptr + head * slope_step).to(tl.float32)
    key = part * BLOCK + tl.arange(0, BLOCK)
    # Queries are aligned with the last keys.
    distance = tl.abs(query + (seq_k - seq_q) - key).to(tl.float32)
    bias = (-slope * distance).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row.to(tl.int64) * seq_k + key, bias, mask=key < seq_k)


@planned
def alibi(slopes: Tensor, seq_q: int, seq_k: int) -> Any:
    """Linear bias by distance: every bias is written once, and nothing but the slopes is read."""
    heads, device = slopes.shape[0], slopes.device
    block = min(power(seq_k), _BIASES)
    parts = -(-seq_k // block)
    launch = Launch(
        _alibi,
        heads * seq_q * parts,
        device,
        (slopes.stride(0), seq_q, seq_k, parts),
        (block,),
        min(max(block // 256, 1), 8),
    )

    def call(slopes: Tensor) -> Tensor:
        output = torch.empty((heads, seq_q, seq_k), dtype=slopes.dtype, device=device)
        launch(slopes, output)
        return output

    return call, (slopes,)


KERNELS: dict[str, Callable[..., Any]] = {"triton.rope": rope, "triton.alibi": alibi}
