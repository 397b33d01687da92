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


def varlen(attend: Callable[[Packed], Tensor], operand: Callable[[Tensor], Tensor] = loadable) -> Callable[..., Tensor]:
    """A kernel for packed sequences. The lengths are read once for all layers of a model (see `tensor_contents`); rows of
    no sequence are zeros."""

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
        rows = rows_of("cu_seqlens_q", cu_seqlens_q, query.shape[0], max_seqlen_q)
        tokens = rows_of("cu_seqlens_k", cu_seqlens_k, key.shape[0], max_seqlen_k)
        if rows.longest == 0 or tokens.longest == 0:
            return torch.zeros(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)
        query, scale = positive(query, scale)
        operands = operand(query), operand(key), operand(value)
        window = (window_left, window_right)
        call = Packed(*operands, cu_seqlens_q, cu_seqlens_k, rows, tokens, causal, scale, window, softcap)
        return rows.zero_others(attend(call))

    return packed
