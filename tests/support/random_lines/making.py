"""What makers of lines have in common: how they are registered, what they pick, and how a line is put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from random_modules import Writer
from torch import Tensor

Line = Callable[[Writer], "str | None"]
#: All of them, with how often they are taken.
LINES: list[tuple[Line, float]] = []


def line(weight: float = 1.0) -> Callable[[Line], Line]:
    """Adds a maker of lines."""

    def register(maker: Line) -> Line:
        LINES.append((maker, weight))
        return maker

    return register


def is_float(x: Tensor) -> bool:
    """Whether it holds floats."""
    return x.is_floating_point()


def of_rank(*ranks: int) -> Callable[[Tensor], bool]:
    """Floats with so many axes."""
    return lambda x: x.is_floating_point() and x.dim() in ranks


def integers(x: Tensor) -> bool:
    """Whether it holds indices."""
    return x.dtype in (torch.int64, torch.int32)


def like(w: Writer, name: str) -> Callable[[Tensor], bool]:
    """Whether it has the same sizes for both batches."""
    wanted = [one.shape for one in w.values[name]]
    return lambda x: x.shape == wanted[0] and x.dtype == w.tensor(name).dtype


def axis(w: Writer, x: Tensor) -> int:
    """An axis, counted from either end."""
    return w.rng.randrange(-x.dim(), x.dim()) if x.dim() else 0


def number(w: Writer) -> Any:
    """A number."""
    return w.rng.choice([0, 1, 2, -1, 0.5, 1.5, -0.25, 3, 1e-3, 0.1, -2.0])


def dtype_argument(x: Tensor) -> str:
    """The argument that gives a layer the dtype of a tensor; nothing for float32, which layers have by default."""
    return f", dtype={x.dtype}" if x.dtype != torch.float32 else ""


def one_of(w: Writer, forms: Sequence[str]) -> str:
    """A new variable with one of these expressions."""
    return f"{w.fresh()} = {w.rng.choice(forms)}"
