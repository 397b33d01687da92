"""The arguments of attention within packed sequences."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import Tensor

from .taking import taking

Result = TypeVar("Result")


class Bounds(NamedTuple):
    """Where the queries and keys of sequences are, and how long they may be."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class VarlenCall(NamedTuple):
    """The arguments of a call. What a kernel does not take has its default."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    causal: bool
    scale: float | None
    window_left: int
    window_right: int
    softcap: float
    max_seqlen_q: int
    max_seqlen_k: int
    sinks: Tensor | None = None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def bounds(self) -> Bounds:
        """Where its sequences are."""
        return Bounds(self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k)

    @property
    def window(self) -> tuple[int, int]:
        """How many earlier and later keys a query attends to; -1 for all."""
        return self.window_left, self.window_right


def varlen_kernel(run: Callable[[VarlenCall], Result], *, sinks: bool = False) -> Callable[..., Result]:
    """A kernel that takes every argument; sinks only if asked to."""
    return taking(VarlenCall, VarlenCall._fields if sinks else VarlenCall._fields[:-1], run)
