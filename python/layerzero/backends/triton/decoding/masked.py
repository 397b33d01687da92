# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Attention of one query per sequence over keys and values that lie evenly, under a mask of booleans.

So a cache of fixed size is read: the mask hides the slots that are not written yet, and padding. Keys and values that it
hides from every head of a group are not loaded, so that a half-full cache costs half. Otherwise this is `decode.py`.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..launching import planned
from ..overlapping import go_on
from .evenly import attend, begin, plan
from .splitting import give


@triton.jit
def _hidden(at, head, some, token, left, mask_head, mask_key, EACH: tl.constexpr):
    """Which of the next tokens the mask hides: 1 or 0, for each head, or one row for all of them. `left` of them exist."""
    place = token.to(tl.int64)[None, :] * mask_key
    there = (token < left)[None, :]
    if EACH:
        place += head[:, None] * mask_head
        there = there & some[:, None]
    return 1 - tl.load(at + place, mask=there, other=0).to(tl.int32)


@triton.jit(do_not_specialize=["first", "seq_k", "share", "parts", "lines", "group", "blocks"])
def _attend(
    q_ptr, k_ptr, v_ptr, mask_ptr, y_ptr,
    kv_heads, group, blocks, head_dim, v_dim, first, seq_k, share, parts, lines, scale, cap,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, mask_batch, mask_head, mask_key,
    K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    V_DIM: tl.constexpr, EACH: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    go_on(OVERLAPS)
    batch, kv_head, part, row, head, start, end, q, k_at, v_at = begin(
        q_ptr, k_ptr, v_ptr, kv_heads, group, blocks, head_dim, first, seq_k, share, parts,
        q_batch, q_head, k_batch, k_head, v_batch, v_head, K_TOKEN, V_TOKEN, ROWS, TOKENS, DIM, V_DIM,
    )  # fmt: skip
    token = tl.arange(0, TOKENS)
    mask_at = mask_ptr + batch * mask_batch + tl.cast(start, tl.int64) * mask_key
    hidden = _hidden(mask_at, head, row < group, token, end - start, mask_head, mask_key, EACH)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, V_DIM], tl.float32)
    for at in range(start, end, TOKENS):
        # Of a key that one head may attend to and another may not, the other's weight is 0.
        read = tl.min(hidden, 0) == 0
        y, top, total = attend(
            q, k_at, v_at, read, hidden == 0, y, top, total, head_dim, v_dim, scale, cap, DIM, V_DIM, CAPPED, EXACT
        )
        k_at += TOKENS * K_TOKEN
        v_at += TOKENS * V_TOKEN
        mask_at += TOKENS * mask_key
        # Looked up here, and not where it is used, it leaves all stages of the pipeline to keys and values.
        hidden = _hidden(mask_at, head, row < group, token, end - at - TOKENS, mask_head, mask_key, EACH)
    line = (batch * kv_heads + kv_head) * group + row
    give(y_ptr, y, top, total, line, row < group, True, v_dim, parts, part, lines, V_DIM, SPLIT)


@planned
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    scale: float | None,
    window_left: int,
    softcap: float,
    layout: str,
) -> Any:
    """One query per sequence, under a mask."""
    return plan(_attend, query, key, value, attn_mask, scale, window_left, softcap, layout)


KERNELS: dict[str, Callable[..., Any]] = {"triton.decode.masked": decode, "triton.decode.masked.gqa": decode}
