"""Elements and rows by their numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.device_graphs.nodes import Node, Work
from layerzero.device_graphs.runners.registry import runs


def from_front(at: Tensor, size: int) -> Tensor:
    """Places of which negative ones count from the back, as places from the front."""
    at = at.long()
    return torch.where(at < 0, at + size, at)


@runs("gather")
def gather(node: Node) -> Work:
    """An element for each number, along one axis."""
    axis = node.axis
    return Work(lambda x, at: torch.gather(x, axis, at.long()), "torch.gather")


@runs("index_select")
def index_select(node: Node) -> Work:
    """Parts of one axis."""
    before = (slice(None),) * (node.axis % max(len(node.shape), 1))
    # As written by a user: negative numbers count from the back, which torch.index_select does not know.
    return Work(lambda x, at: x[(*before, at)], "torch.index")


@runs("index_copy")
def index_copy(node: Node) -> Work:
    """Parts of one axis replaced."""
    axis = node.axis

    def run(x: Tensor, at: Tensor, source: Tensor) -> Tensor:
        return torch.index_copy(x, axis, from_front(at, x.shape[axis]), source)

    return Work(run, "torch.index_copy")


@runs("index_put")
def index_put(node: Node) -> Work:
    """Rows replaced, or added to."""
    add = node.attributes.get("accumulate", False)
    return Work(
        lambda x, source, *at: torch.index_put(x, [one.long() for one in at], source, accumulate=add), "torch.index_put"
    )
