"""Kernels of attention that also give the logarithms of the softmaxes' sums, of a function that makes one library's call.

With them come sinks: a result without sinks is exp(lse) / (exp(lse) + exp(sink)) times too large.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .dense_attention import Call, lse_kernel
from .operands import bshd, loadable
from .torch_functions.attention import with_sinks
from .varlen_attention import Packed, nothing, packed_call
from .varlen_call import VarlenCall, varlen_kernel

#: Makes a library's call: the output in the order batch, sequence, heads, element, and logarithms as batch, heads, sequence.
DenseLse = Callable[[Call], tuple[Tensor, Tensor]]
#: The same for packed sequences: rows, heads, element, and logarithms as heads, rows.
PackedLse = Callable[[Packed], tuple[Tensor, Tensor]]


def natural(lse: Tensor) -> Tensor:
    """Logarithms in the order of the output, minus infinity where a query attends to nothing: some libraries give plus."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def dense_lse(
    attend: DenseLse, operand: Callable[[Tensor, str], Tensor] = bshd
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A kernel of dense attention with logarithms."""

    def run(call: Call) -> tuple[Tensor, Tensor]:
        output, lse = attend(call.loaded(operand))
        if call.layout == "BHSD":
            return output.transpose(1, 2).contiguous(), natural(lse).contiguous()
        return output, natural(lse).transpose(1, 2).contiguous()

    return lse_kernel(run)


def dense_sinks(attend: DenseLse, operand: Callable[[Tensor, str], Tensor] = bshd) -> Callable[..., Tensor]:
    """A kernel of dense attention with sinks."""
    run = dense_lse(attend, operand)

    def attention_sinks(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        causal: bool,
        scale: float | None,
        window_left: int,
        window_right: int,
        softcap: float,
        layout: str,
    ) -> Tensor:
        output, lse = run(query, key, value, causal, scale, window_left, window_right, softcap, layout)
        if sinks is None:
            return output
        return with_sinks(output, lse, sinks[:, None] if layout == "BHSD" else sinks)

    return attention_sinks


def varlen_lse(
    attend: PackedLse, operand: Callable[[Tensor], Tensor] = loadable
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A kernel for packed sequences with logarithms. Rows of no sequence are zeros and minus infinity."""

    def run(call: VarlenCall) -> tuple[Tensor, Tensor]:
        packed = packed_call(call, operand)
        if packed is None:
            return nothing(call), call.query.new_full(call.query.shape[:2], -torch.inf, dtype=torch.float32)
        output, lse = attend(packed)
        logarithms = natural(lse).transpose(0, 1).contiguous()
        logarithms[: packed.rows.first] = -torch.inf
        logarithms[packed.rows.end :] = -torch.inf
        return packed.rows.zero_others(output), logarithms

    return varlen_kernel(run)
