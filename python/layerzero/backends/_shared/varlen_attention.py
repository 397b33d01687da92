"""Kernels of attention within packed sequences, of a function that makes one library's call."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .operands import loadable, positive
from .packed_rows import Rows, rows_of


class Packed(NamedTuple):
    """What a call gives to a library. Its scale is positive, and operands can be loaded from."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    #: The rows and the keys of sequences, and how many the longest has.
    rows: Rows
    tokens: Rows
    causal: bool
    scale: float | None
    window: tuple[int, int]
    softcap: float

    @property
    def each_has_one(self) -> bool:
        """Whether row b is the one query of sequence b."""
        return self.rows.first == 0 and self.rows.end == self.query.shape[0] == self.cu_seqlens_q.shape[0] - 1


def packed_call(
    operands: tuple[Tensor, Tensor, Tensor],
    bounds: tuple[Tensor, Tensor, int, int],
    options: tuple[bool, float | None, tuple[int, int], float],
    operand: Callable[[Tensor], Tensor],
) -> Packed | None:
    """What a library is given; `None` where no sequence has both queries and keys. The lengths are read once for all layers
    of a model (see `tensor_contents`)."""
    query, key, value = operands
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = bounds
    rows = rows_of("cu_seqlens_q", cu_seqlens_q, query.shape[0], max_seqlen_q)
    tokens = rows_of("cu_seqlens_k", cu_seqlens_k, key.shape[0], max_seqlen_k)
    if rows.longest == 0 or tokens.longest == 0:
        return None
    causal, scale, window, softcap = options
    query, scale = positive(query, scale)
    loaded = operand(query), operand(key), operand(value)
    return Packed(*loaded, cu_seqlens_q, cu_seqlens_k, rows, tokens, causal, scale, window, softcap)


def varlen(attend: Callable[[Packed], Tensor], operand: Callable[[Tensor], Tensor] = loadable) -> Callable[..., Tensor]:
    """A kernel for packed sequences. Rows of no sequence are zeros."""

    def packed(
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
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options = (causal, scale, (window_left, window_right), softcap)
        call = packed_call((query, key, value), bounds, options, operand)
        if call is None:
            return torch.zeros(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)
        return call.rows.zero_others(attend(call))

    return packed
