"""Elements and rows by their numbers."""

from __future__ import annotations

import torch

from layerzero.device_graphs.nodes import Node, Work
from layerzero.device_graphs.runners.registry import runs


@runs("gather")
def gather(node: Node) -> Work:
    """An element for each number, along one axis."""
    axis = node.axis
    return Work(lambda x, at: torch.gather(x, axis, at.long()), "torch.gather")


@runs("index_select")
def index_select(node: Node) -> Work:
    """Parts of one axis."""
    axis = node.axis
    return Work(lambda x, at: torch.index_select(x, axis, at), "torch.index_select")


@runs("index_copy")
def index_copy(node: Node) -> Work:
    """Parts of one axis replaced."""
    axis = node.axis
    return Work(lambda x, at, source: torch.index_copy(x, axis, at.long(), source), "torch.index_copy")


@runs("index_put")
def index_put(node: Node) -> Work:
    """Rows replaced, or added to."""
    add = node.attributes.get("accumulate", False)
    return Work(
        lambda x, source, *at: torch.index_put(x, [one.long() for one in at], source, accumulate=add), "torch.index_put"
    )
