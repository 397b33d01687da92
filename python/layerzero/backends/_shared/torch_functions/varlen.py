"""Attention within packed sequences: each sequence by itself, as dense keys and values.

The public functions are kernels. Results are put together out of their parts, so that gradients flow through them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..packed_rows import check_longest
from ..varlen_call import Bounds, VarlenCall, varlen_kernel
from .attention import _wide_gradients, attend, attend_flash, attend_flash_lse, attend_lse, reachable
from .paged import check_segments

#: Attends the queries of one sequence to its keys and values, in the order batch, heads, sequence, element.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
#: The same with logarithms, in the order batch, heads, sequence.
AttendLse = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def by_sequence(attend_one: Attend, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds) -> Tensor:
    """The sequences one after another. Rows of no sequence, and of one without keys, are zeros."""

    def with_nothing(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, None]:
        return attend_one(queries, keys, values), None

    return _by_sequence(with_nothing, query, key, value, bounds)[0]


def by_sequence_lse(
    attend_one: AttendLse, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds
) -> tuple[Tensor, Tensor]:
    """The same with logarithms: minus infinity where rows are zeros."""
    output, logarithms = _by_sequence(attend_one, query, key, value, bounds)
    nothing = query.new_full((1, query.shape[1], 1), -torch.inf, dtype=torch.float32)
    parts = [part.float() if isinstance(part, Tensor) else nothing.expand(1, -1, part or 0) for part in logarithms]
    if not parts:
        return output, query.new_zeros(query.shape[:2], dtype=torch.float32)
    return output, torch.cat(parts, 2)[0].transpose(0, 1).contiguous()


def _by_sequence(
    attend_one: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Bounds,
) -> tuple[Tensor, list[Tensor | int | None]]:
    """The output, and the logarithms of its parts: how many rows, where they attend to nothing."""
    rows = check_segments("cu_seqlens_q", bounds.cu_seqlens_q, query.shape[0])
    tokens = check_segments("cu_seqlens_k", bounds.cu_seqlens_k, key.shape[0])
    check_longest("max_seqlen_q", bounds.max_seqlen_q, max((end - start for start, end in rows), default=0))
    check_longest("max_seqlen_k", bounds.max_seqlen_k, max((end - start for start, end in tokens), default=0))
    # Heads first, as attention has them.
    query, key, value = query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    parts: list[Tensor] = []
    logarithms: list[Tensor | int | None] = []
    done = 0

    def nothing(count: int) -> None:
        if count:
            parts.append(query.new_zeros(count, query.shape[1], value.shape[3]))
            logarithms.append(count)

    for (start, end), (first, last) in zip(rows, tokens, strict=True):
        nothing(start - done)
        if last == first:
            nothing(end - start)
        elif end > start:
            output, lse = attend_one(query[:, :, start:end], key[:, :, first:last], value[:, :, first:last])
            parts.append(output[0].transpose(0, 1))
            logarithms.append(lse)
        done = end
    nothing(query.shape[2] - done)
    if not parts:
        return query.new_zeros(0, query.shape[1], value.shape[3]), logarithms
    return torch.cat(parts).contiguous(), logarithms


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
    """torch's flash attention for the CPU, a call for each sequence."""
    reach, rows = (window_left, window_right), None if sinks is None else sinks[:, None]

    def attend_one(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if _wide_gradients(queries.shape[2], queries, keys, values):
            wide = attend_flash(queries.float(), keys.float(), values.float(), causal, scale, reach)
            return wide.to(queries.dtype)
        return attend_flash(queries, keys, values, causal, scale, reach, rows)

    bounds = Bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return by_sequence(attend_one, query, key, value, bounds)


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
    """torch's flash attention for the CPU with its logarithms, a call for each sequence."""

    def attend_one(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return attend_flash_lse(queries, keys, values, causal, scale, (window_left, window_right))

    bounds = Bounds(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return by_sequence_lse(attend_one, query, key, value, bounds)


def unfused_with(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel that works on each sequence by itself, by matrix products; takes every argument."""

    def run(call: VarlenCall) -> Tensor:
        columns = None if call.sinks is None else call.sinks[:, None, None]

        def attend_one(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            allowed = reachable(queries, keys, call.causal, call.window)
            return attend(queries, keys, values, call.scale, allowed, softcap=call.softcap, sinks=columns)

        return by_sequence(attend_one, *call.operands, call.bounds)

    return varlen_kernel(run, sinks=True)


def unfused_lse_with(attend_lse: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The same with the logarithms of the softmaxes' sums."""

    def run(call: VarlenCall) -> tuple[Tensor, Tensor]:
        def attend_one(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            allowed = reachable(queries, keys, call.causal, call.window)
            return attend_lse(queries, keys, values, call.scale, allowed, call.softcap)

        return by_sequence_lse(attend_one, *call.operands, call.bounds)

    return varlen_kernel(run)


unfused, unfused_lse = unfused_with(attend), unfused_lse_with(attend_lse)
