"""Attention within packed sequences.

torch's FlashAttention 2 takes them as they are. The other kernels work on each sequence by itself; the host has to know
where it is.
"""

import torch
from torch import Tensor

from ..operands import loadable, positive
from ..packed_rows import rows_of
from ..torch_functions.attention import with_sinks
from ..torch_functions.varlen import by_sequence, unfused_lse_with, unfused_with
from ..varlen_call import Bounds
from .sdpa import masked, sdpa
from .unfused import attend, attend_lse

_flash_packed = torch.ops.aten._flash_attention_forward.default


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sinks: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """torch's FlashAttention 2 for packed sequences. In a CUDA graph the lengths cannot be read: the longest sequences are
    as long as was promised, or as all of them together."""
    bounds = Bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    output, lse = _flash(query, key, value, bounds, causal, scale, (window_left, window_right))
    return output if sinks is None else with_sinks(output, lse, sinks)


def flash_lse(
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
) -> tuple[Tensor, Tensor]:
    """The same with the logarithms of the softmaxes' sums."""
    bounds = Bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _flash(query, key, value, bounds, causal, scale, (window_left, window_right))


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Bounds,
    causal: bool,
    scale: float | None,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Output and logarithms, in the order row, head."""
    starts, firsts = bounds.cu_seqlens_q.to(torch.int32).contiguous(), bounds.cu_seqlens_k.to(torch.int32).contiguous()
    most_q, most_k = bounds.max_seqlen_q or query.shape[0], bounds.max_seqlen_k or key.shape[0]
    whole = False
    if not _is_capturing(query):
        rows = rows_of("cu_seqlens_q", bounds.cu_seqlens_q, query.shape[0], bounds.max_seqlen_q)
        tokens = rows_of("cu_seqlens_k", bounds.cu_seqlens_k, key.shape[0], bounds.max_seqlen_k)
        most_q, most_k = rows.longest, tokens.longest
        if most_q == 0 or most_k == 0:
            output = torch.zeros_like(query, memory_format=torch.contiguous_format)
            return output, query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
        whole = rows.first == 0 and rows.end == query.shape[0]
    query, scale = positive(query, scale)
    output, lse = _flash_packed(
        loadable(query),
        loadable(key),
        loadable(value),
        starts,
        firsts,
        # Told that no sequence has two queries, it takes for granted that each has one.
        max(most_q, 2),
        most_k,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )[:2]
    lse = lse.transpose(0, 1)
    # It gives plus infinity for a query that attends to nothing.
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    if whole:
        return output, lse
    # Rows of no sequence are left as they were.
    row = torch.arange(query.shape[0], device=query.device)
    outside = ((row < starts[0]) | (row >= starts[-1]))[:, None]
    return output.masked_fill(outside[..., None], 0.0), lse.masked_fill(outside, -torch.inf)


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
        return masked(queries, keys, values, None, None, causal, scale, window_left, window_right, 0.0, 0, "BHSD")

    bounds = Bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return by_sequence(attend_one, query, key, value, bounds)


unfused, unfused_lse = unfused_with(attend), unfused_lse_with(attend_lse)
