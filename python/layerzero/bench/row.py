"""A row of ``layerzero bench out-of-box``: a call of a model, beside the torch code a user writes for it.

A row makes its tensors when it is measured, so that the weights of all models are never there at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """How much is computed at once."""

    seq: int
    """Tokens of a prompt."""
    batch: int
    """Sequences that decode together."""
    context: int
    """Tokens a sequence has in its cache."""
    largest: int
    """Elements of the largest tensor; rows with a larger one are left out."""
    longest: int
    """Tokens of the longest prompt, for windows."""

    def within(self, positions: int | None) -> Sizes:
        """The same for a model with so many positions."""
        most = positions or max(self.seq, self.context)
        return replace(self, seq=min(self.seq, most), context=min(self.context, most))


CPU = Sizes(seq=64, batch=2, context=512, largest=1 << 26, longest=512)
GPU = Sizes(seq=2048, batch=16, context=4096, largest=1 << 31, longest=8192)


class Pair(NamedTuple):
    """A call, written for LayerZero and in plain torch."""

    ours: Callable[[Any], Any]
    """Makes the call of the module it is given: ``lz``, or something with the same functions that explains or records."""
    torch: Callable[[], Any]
    updated: tuple[Tensor, ...] = ()
    """The tensors both write to, where they give no result."""


class Maker:
    """Makes the tensors of a row: the same for the same name."""

    def __init__(self, name: str, device: str, dtype: Any) -> None:
        import torch

        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))

    def tensor(self, *shape: int, dtype: Any = None, scale: float = 1.0) -> Tensor:
        """Numbers of a normal distribution."""
        import torch

        made = torch.randn(shape, generator=self._generator, device=self.device, dtype=dtype or self.dtype)
        return made.mul_(scale) if scale != 1.0 else made

    def below(self, least: int, end: int, *shape: int, dtype: Any = None) -> Tensor:
        """Integers from ``least`` to before ``end``."""
        import torch

        kind = dtype or torch.int64
        return torch.randint(least, end, shape, generator=self._generator, device=self.device, dtype=kind)

    def order(self, count: int, dtype: Any = None) -> Tensor:
        """Every integer below ``count`` once."""
        import torch

        made = torch.randperm(count, generator=self._generator, device=self.device)
        return made.to(dtype or torch.int64)


Make = Callable[[Maker], Pair]


@dataclass(frozen=True)
class Row:
    """A call of a model."""

    model: str
    kind: str
    """The function, or what of attention it shows: ``attention``, ``window``, ``softcap``, ``paged``, ``mask``, …"""
    phase: str
    """``prefill`` or ``decode``."""
    shape: str
    make: Make
    layout: str = ""
    elements: int = 0
    """Of its largest tensor, where that is a weight."""

    @property
    def name(self) -> str:
        """Which row it is, in words."""
        return " ".join(filter(None, (f"{self.model}: {self.kind}", self.phase, self.layout, self.shape)))

    def made(self, device: str, dtype: Any) -> Pair:
        """Both calls, with their tensors."""
        return self.make(Maker(self.name, device, dtype))
