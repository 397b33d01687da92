"""The nodes of a graph for exact sizes, and the steps that run them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: The tensors a step reads, in the order of its inputs; `None` for one that is left out.
Inputs = Sequence[Any]


@dataclass(frozen=True)
class Node:
    """An operation on values, with numbers for all sizes."""

    op: str
    attributes: Mapping[str, Any]
    inputs: tuple[str | None, ...]
    output: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    origin: str = ""
    flops: float = 0.0
    bytes: float = 0.0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Node:
        """A row of the native graph's `nodes`."""
        return cls(
            row["op"],
            json.loads(row["attributes"]) or {},
            tuple(row["inputs"]),
            row["output"],
            getattr(torch, row["dtype"]),
            tuple(row["shape"]),
            row["origin"],
            row["flops"],
            row["bytes"],
        )

    def __getattr__(self, name: str) -> Any:
        """An attribute of the operation."""
        try:
            return self.attributes[name]
        except KeyError:
            raise AttributeError(f"{self.op} has no attribute '{name}'") from None


@dataclass(frozen=True)
class Work:
    """How a node is run: a function of its inputs, and what runs in it."""

    run: Callable[..., Any]
    """Gives the result, or a tuple of several."""
    kernel: str
    """A torch function, as ``torch.addmm``. For a function of LayerZero its name, as ``rms_norm``: the engine chooses."""
    chosen: bool = False
    """Whether `kernel` is a function of LayerZero, whose kernel the engine chooses."""
    in_place: bool = False
    """Whether it writes its first input, which is the result."""
    view: bool = False
    """Whether the result may share its first input's memory. Reports leave such steps out."""


@dataclass(frozen=True)
class Step:
    """A call in a program."""

    nodes: tuple[Node, ...]
    """What it computes: one node, or several that are one call."""
    work: Work
    reads: tuple[str | None, ...]
    makes: tuple[str, ...]
    """The values it makes: as many as its function gives."""
    alone: bool = field(default=False)
    """Whether it is a call of torch's that may wait for the device, so that no graph can hold it."""

    @property
    def last(self) -> Node:
        """The node that gives it its name."""
        return self.nodes[-1]

    def __call__(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Runs it."""
        found = self.work.run(*inputs)
        return found if isinstance(found, tuple) else (found,)
