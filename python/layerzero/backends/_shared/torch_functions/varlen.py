"""Attention within packed sequences: each sequence by itself, as dense keys and values.

The public functions are kernels. Results are put together out of their parts, so that gradients flow through them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..packed_rows import check_longest
from .attention import _wide_gradients, attend, attend_flash, reachable
from .paged import check_segments

#: Attends the queries of one sequence to its keys and values, in the order batch, heads, sequence, element.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_sequence(
    attend_one: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """The sequences one after another. Rows of no sequence, and of one without keys, are zeros."""
    rows = check_segments("cu_seqlens_q", cu_seqlens_q, query.shape[0])
    tokens = check_segments("cu_seqlens_k", cu_seqlens_k, key.shape[0])
    check_longest("max_seqlen_q", max_seqlen_q, max((end - start for start, end in rows), default=0))
    check_longest("max_seqlen_k", max_seqlen_k, max((end - start for start, end in tokens), default=0))
    # Heads first, as attention has them.
    query, key, value = query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    heads, v_dim = query.shape[1], value.shape[3]

    def zeros(count: int) -> Tensor:
        return query.new_zeros(1, heads, count, v_dim)

    parts, done = [], 0
    for (start, end), (first, last) in zip(rows, tokens, strict=True):
        if start > done:
            parts.append(zeros(start - done))
        if last == first:
            parts.append(zeros(end - start))
        elif end > start:
            parts.append(attend_one(query[:, :, start:end], key[:, :, first:last], value[:, :, first:last]))
        done = end
    parts.append(zeros(query.shape[2] - done))
    return torch.cat(parts, 2)[0].transpose(0, 1).contiguous()


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """torch's flash attention for the CPU, a call for each sequence."""
    reach = (window_left, window_right)

    def attend_one(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if _wide_gradients(queries.shape[2], queries, keys, values):
            wide = attend_flash(queries.float(), keys.float(), values.float(), causal, scale, reach)
            return wide.to(queries.dtype)
        return attend_flash(queries, keys, values, causal, scale, reach)

    return by_sequence(attend_one, query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """Matrix products for each sequence; takes every argument."""

    def attend_one(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        allowed = reachable(queries, keys, causal, (window_left, window_right))
        return attend(queries, keys, values, scale, allowed, softcap=softcap)

    return by_sequence(attend_one, query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
