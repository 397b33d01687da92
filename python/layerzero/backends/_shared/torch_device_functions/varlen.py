"""Attention within packed sequences.

torch's FlashAttention 2 takes them as they are. The other kernels work on each sequence by itself; the host has to know
where it is.
"""

import torch
from torch import Tensor

from ..operands import loadable, positive
from ..packed_rows import rows_of
from ..torch_functions.attention import reachable
from ..torch_functions.varlen import by_sequence
from .sdpa import masked, sdpa
from .unfused import attend

_flash_packed = torch.ops.aten._flash_attention_forward.default


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


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
    """torch's FlashAttention 2 for packed sequences. In a CUDA graph the lengths cannot be read: the longest sequences are
    as long as was promised, or as all of them together."""
    bounds = cu_seqlens_q.to(torch.int32).contiguous(), cu_seqlens_k.to(torch.int32).contiguous()
    most_q, most_k = max_seqlen_q or query.shape[0], max_seqlen_k or key.shape[0]
    rows = None
    if not _is_capturing(query):
        rows = rows_of("cu_seqlens_q", cu_seqlens_q, query.shape[0], max_seqlen_q)
        tokens = rows_of("cu_seqlens_k", cu_seqlens_k, key.shape[0], max_seqlen_k)
        most_q, most_k = rows.longest, tokens.longest
        if most_q == 0 or most_k == 0:
            return torch.zeros_like(query, memory_format=torch.contiguous_format)
    query, scale = positive(query, scale)
    output: Tensor = _flash_packed(
        loadable(query),
        loadable(key),
        loadable(value),
        *bounds,
        # Told that no sequence has two queries, it takes for granted that each has one.
        max(most_q, 2),
        most_k,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=window_left,
        window_size_right=window_right,
    )[0]
    if rows is not None and rows.first == 0 and rows.end == query.shape[0]:
        return output
    # Rows of no sequence are left as they were.
    row = torch.arange(query.shape[0], device=query.device)
    outside = (row < bounds[0][0]) | (row >= bounds[0][-1])
    return output.masked_fill(outside[:, None, None], 0.0)


def by_sdpa(
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
    """torch's function for each sequence by itself."""

    def attend_one(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        square = queries.shape[2] in (1, keys.shape[2]) or not causal
        if square and window_left < 0 and window_right < 0:
            return sdpa(queries, keys, values, causal, scale, 0.0, 0, "BHSD")
        return masked(
            queries, keys, values, None, None, causal, scale, window_left, window_right, 0.0, 0, "BHSD"
        )

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
    """Matrix products for each sequence by itself; takes every argument."""

    def attend_one(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        allowed = reachable(queries, keys, causal, (window_left, window_right))
        return attend(queries, keys, values, scale, allowed, softcap=softcap)

    return by_sequence(attend_one, query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
