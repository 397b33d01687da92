"""Kernels of attention within packed sequences, of a function that makes one library's call."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .operands import loadable, positive
from .packed_rows import Rows, rows_of
from .varlen_call import VarlenCall, varlen_kernel


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


def packed_call(call: VarlenCall, operand: Callable[[Tensor], Tensor]) -> Packed | None:
    """What a library is given; `None` where no sequence has both queries and keys. The lengths are read once for all layers
    of a model (see `tensor_contents`)."""
    rows = rows_of("cu_seqlens_q", call.cu_seqlens_q, call.query.shape[0], call.max_seqlen_q)
    tokens = rows_of("cu_seqlens_k", call.cu_seqlens_k, call.key.shape[0], call.max_seqlen_k)
    if rows.longest == 0 or tokens.longest == 0:
        return None
    query, scale = positive(call.query, call.scale)
    loaded = operand(query), operand(call.key), operand(call.value)
    starts = call.cu_seqlens_q, call.cu_seqlens_k
    return Packed(*loaded, *starts, rows, tokens, call.causal, scale, call.window, call.softcap)


def nothing(call: VarlenCall) -> Tensor:
    """What a call gives where no sequence has both queries and keys."""
    query = call.query
    return torch.zeros(*query.shape[:2], call.value.shape[2], dtype=query.dtype, device=query.device)


def varlen(attend: Callable[[Packed], Tensor], operand: Callable[[Tensor], Tensor] = loadable) -> Callable[..., Tensor]:
    """A kernel for packed sequences. Rows of no sequence are zeros."""

    def run(call: VarlenCall) -> Tensor:
        packed = packed_call(call, operand)
        return nothing(call) if packed is None else packed.rows.zero_others(attend(packed))

    return varlen_kernel(run)
