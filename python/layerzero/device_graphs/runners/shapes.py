"""The same elements with other sizes, and parts of tensors."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from layerzero.device_graphs.nodes import Node, Work
from layerzero.device_graphs.runners.registry import runs


@runs("reshape")
def reshape(node: Node) -> Work:
    """The same elements in row-major order. A copy where the input's strides allow no view."""
    shape = node.shape
    return Work(lambda x: x.reshape(shape), "torch.reshape", view=True)


@runs("permute")
def permute(node: Node) -> Work:
    """Axes in another order."""
    axes = tuple(node.axes)
    return Work(lambda x: x.permute(axes), "torch.permute", view=True)


@runs("expand")
def expand(node: Node) -> Work:
    """Axes of size 1 repeated."""
    shape = node.shape
    return Work(lambda x: x.expand(shape), "torch.expand", view=True)


@runs("slice")
def slice_(node: Node) -> Work:
    """A part of one axis."""
    axis = node.axis % max(len(node.shape), 1)
    taken = (slice(None),) * axis + (slice(int(node.start), int(node.end), node.step),)
    return Work(lambda x: x[taken], "torch.slice", view=True)


@runs("concat")
def concat(node: Node) -> Work:
    """Tensors behind each other along an axis."""
    axis = node.axis
    return Work(lambda *parts: torch.cat(parts, axis), "torch.cat")


@runs("pad")
def pad(node: Node) -> Work:
    """A number around a tensor."""
    pads = [int(n) for pair in reversed(node.pads) for n in pair]
    value = node.attributes.get("value", 0.0)
    if isinstance(value, str):
        value = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[value]
    if node.dtype == torch.bool:
        value = bool(value)
    return Work(lambda x: F.pad(x, pads, value=value), "torch.pad")
