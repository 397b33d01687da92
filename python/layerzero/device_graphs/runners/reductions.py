"""Many numbers to one."""

from __future__ import annotations

from typing import Any

import torch

from layerzero.device_graphs.nodes import Node, Work
from layerzero.device_graphs.runners.registry import runs


@runs("reduce")
def reduce(node: Node) -> Work:
    """A sum, a mean, the largest, … along some axes."""
    kind, axes, keepdim = node.kind, tuple(node.axes), node.attributes.get("keepdim", False)
    dtype = node.dtype
    if kind in ("sum", "mean"):
        function = getattr(torch, kind)
        return Work(lambda x: function(x, axes, keepdim=keepdim, dtype=dtype), f"torch.{kind}")
    if kind in ("max", "min"):
        function = torch.amax if kind == "max" else torch.amin
        return Work(lambda x: function(x, axes, keepdim=keepdim), f"torch.{function.__name__}")
    one = {"prod": lambda x, axis: torch.prod(x, axis, keepdim=True, dtype=dtype)}.get(
        kind, lambda x, axis: getattr(torch, kind)(x, axis, keepdim=True)
    )

    def each(x: Any) -> Any:
        places = sorted(axis % max(x.dim(), 1) for axis in axes)
        for axis in places:
            x = one(x, axis)  # type: ignore[no-untyped-call]
        if not keepdim:
            for axis in reversed(places):
                x = x.squeeze(axis)
        return x.to(dtype)

    return Work(each, f"torch.{kind}")


@runs("argreduce")
def argreduce(node: Node) -> Work:
    """Where the largest is, or the smallest."""
    function = torch.argmax if node.kind == "argmax" else torch.argmin
    axis, keepdim = node.attributes.get("axis"), node.attributes.get("keepdim", False)
    return Work(lambda x: function(x, axis, keepdim=keepdim), f"torch.{node.kind}")


@runs("cumsum")
def cumsum(node: Node) -> Work:
    """Sums of all up to each."""
    axis, dtype = node.axis, node.dtype
    return Work(lambda x: torch.cumsum(x, axis, dtype=dtype), "torch.cumsum")
