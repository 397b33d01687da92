# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Attention of one query per sequence over keys and values that lie evenly, in either layout.

A causal query, being the last, sees every key.
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


@triton.jit(do_not_specialize=["first", "seq_k", "share", "parts", "lines", "group", "blocks"])
def _attend(
    q_ptr, k_ptr, v_ptr, y_ptr,
    kv_heads, group, blocks, head_dim, v_dim, first, seq_k, share, parts, lines, scale, cap,
    q_batch, q_head, k_batch, k_head, v_batch, v_head,
    K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    V_DIM: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    go_on(OVERLAPS)
    # Launched by compiled code, numbers come as float64.
    scale, cap = tl.cast(scale, tl.float32), tl.cast(cap, tl.float32)
    batch, kv_head, part, row, _, start, end, q, k_at, v_at = begin(
        q_ptr, k_ptr, v_ptr, kv_heads, group, blocks, head_dim, first, seq_k, share, parts,
        q_batch, q_head, k_batch, k_head, v_batch, v_head, K_TOKEN, V_TOKEN, ROWS, TOKENS, DIM, V_DIM,
    )  # fmt: skip
    token = tl.arange(0, TOKENS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, V_DIM], tl.float32)
    for at in range(start, end, TOKENS):
        there = token < end - at
        y, top, total = attend(
            q, k_at, v_at, there, there[None, :], y, top, total, head_dim, v_dim, scale, cap, DIM, V_DIM, CAPPED, EXACT
        )
        k_at += TOKENS * K_TOKEN
        v_at += TOKENS * V_TOKEN
    line = (batch * kv_heads + kv_head) * group + row
    give(y_ptr, y, top, total, line, row < group, True, v_dim, parts, part, lines, V_DIM, SPLIT)


@planned
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window_left: int,
    softcap: float,
    layout: str,
) -> Any:
    """One query per sequence."""
    return plan(_attend, query, key, value, None, scale, window_left, softcap, layout)


KERNELS: dict[str, Callable[..., Any]] = {"triton.decode": decode, "triton.decode.gqa": decode}
