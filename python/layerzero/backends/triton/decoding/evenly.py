# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""What kernels of one query per sequence share when keys and values lie evenly: `decode.py` and `masked.py`.

The query heads that share a key/value head are the rows of one product.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import strides_of_mask
from ..launching import Launch, hint, power
from ..overlapping import overlaps
from . import splitting
from .splitting import dot, place, weigh


@triton.jit
def begin(
    q_ptr, k_ptr, v_ptr, kv_heads, group, blocks, head_dim, first, seq_k, share, parts,
    q_batch, q_head, k_batch, k_head, v_batch, v_head,
    K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    V_DIM: tl.constexpr,
):  # fmt: skip
    """Where a block of threads works: its sequence, key/value head and part, its rows, its first token and the one after
    its last; its query, and where its first tiles of keys and values are."""
    block, kv_head, part, batch = place(blocks, kv_heads, parts)
    row = block * ROWS + tl.arange(0, ROWS)
    head = kv_head * group + row
    dim, v_column = tl.arange(0, DIM), tl.arange(0, V_DIM)
    start = first + part * share
    end = tl.minimum(start + share, seq_k)

    inside = (row < group)[:, None] & (dim < head_dim)[None, :]
    q = tl.load(q_ptr + batch * q_batch + head[:, None] * q_head + dim[None, :], mask=inside, other=0.0)
    token = tl.arange(0, TOKENS)
    k_at = k_ptr + batch * k_batch + kv_head * k_head + tl.cast(start, tl.int64) * K_TOKEN
    v_at = v_ptr + batch * v_batch + kv_head * v_head + tl.cast(start, tl.int64) * V_TOKEN
    k_at = k_at + token.to(tl.int64)[:, None] * K_TOKEN + dim[None, :]
    v_at = v_at + token.to(tl.int64)[:, None] * V_TOKEN + v_column[None, :]
    return batch, kv_head, part, row, head, start, end, q, k_at, v_at


@triton.jit
def attend(
    q, k_at, v_at, read, seen, y, top, total, head_dim, v_dim, scale, cap,
    DIM: tl.constexpr, V_DIM: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attends to a tile: keys and values that are `read` are loaded, and those that are `seen` have a weight. Returns the
    sums, the largest score and the sum of the weights."""
    dim, v_column = tl.arange(0, DIM), tl.arange(0, V_DIM)
    k = tl.load(k_at, mask=read[:, None] & (dim < head_dim)[None, :], other=0.0)
    v = tl.load(v_at, mask=read[:, None] & (v_column < v_dim)[None, :], other=0.0)
    weights, kept, top, total = weigh(dot(q, tl.trans(k), EXACT), seen, top, total, scale, cap, CAPPED)
    return y * kept[:, None] + dot(weights.to(q.dtype), v, EXACT), top, total


def plan(
    kernel: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    window_left: int,
    softcap: float,
    layout: str,
) -> Any:
    """The call of a kernel and its tensors. The mask's strides follow the other ones, and whether heads have masks of their
    own follows the sizes of tiles."""
    head, token = (1, 2) if layout == "BHSD" else (2, 1)
    batch, heads, head_dim = query.shape[0], query.shape[head], query.shape[3]
    kv_heads, seq_k, v_dim = key.shape[head], key.shape[token], value.shape[3]
    device, exact = query.device, query.dtype == torch.float32
    if batch * heads * v_dim == 0 or kv_heads == 0:
        shape = (*query.shape[:-1], v_dim)
        return lambda query: torch.zeros(shape, dtype=query.dtype, device=device), (query,)
    group = heads // kv_heads
    dim, v_width = power(max(head_dim, 16)), power(max(v_dim, 16))
    rows = splitting.rows_for(group, exact, max(dim, v_width))
    blocks = -(-group // rows)
    crowd = hint(batch * kv_heads * blocks)
    tokens, warps, stages = splitting.tiling(exact, max(dim, v_width), crowd, device)
    first = max(seq_k - 1 - window_left, 0) if window_left >= 0 else 0
    tiles = -(-(seq_k - first) // tokens)
    parts = splitting.parts_for(crowd, hint(tiles), device)
    share = -(-tiles // parts)
    if isinstance(tiles, int):
        # None is empty; in a graph of contexts that vary, some may be.
        parts = max(-(-tiles // max(share, 1)), 1)
    tensors: tuple[Tensor, ...] = (query, key, value)
    strides: tuple[int, ...] = ()
    each: tuple[bool, ...] = ()
    if attn_mask is not None:
        mask_batch, mask_head, _, mask_key = strides_of_mask(attn_mask)
        tensors, strides, each = (*tensors, attn_mask), (mask_batch, mask_head, mask_key), (mask_head != 0,)
    scalars = (
        *(kv_heads, group, blocks, head_dim, v_dim, first, seq_k, share * tokens, parts, batch * heads * parts),
        *splitting.factors(1.0 / math.sqrt(max(head_dim, 1)) if scale is None else float(scale), float(softcap)),
        *(query.stride(0), query.stride(head), key.stride(0), key.stride(head), value.stride(0), value.stride(head)),
        *strides,
    )
    constants = (
        *(key.stride(token), value.stride(token), rows, tokens, dim, v_width),
        *each,
        *(softcap != 0.0, parts > 1, exact, parts > 1 and overlaps(device)),
    )
    grid = batch * kv_heads * blocks * parts
    launch = Launch(kernel, grid, device, scalars, constants, warps, stages)
    return splitting.attention(launch, query, v_dim, parts), tensors
