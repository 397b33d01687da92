"""Layers of models: products, norms, activations, tables, convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import layerzero as lz
from layerzero.device_graphs.nodes import Node, Work
from layerzero.device_graphs.runners.registry import runs

_ACTIVATIONS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@runs("linear")
def linear(node: Node) -> Work:
    """``activation(x · wᵀ + bias) + residual``."""
    activation = _ACTIVATIONS[node.attributes.get("activation", "none")]
    if activation is None and len(node.inputs) < 4:
        return Work(lz.linear, "linear", chosen=True)

    def run(x: Any, weight: Any, bias: Any = None, residual: Any = None) -> Any:
        found = lz.linear(x, weight, bias)
        if activation is not None:
            found = activation(found)
        return found if residual is None else found + residual

    return Work(run, "linear", chosen=True)


@runs("matmul")
def matmul(node: Node) -> Work:
    """A product of matrices."""
    turn_a, turn_b, alpha = (node.attributes.get(name) for name in ("transpose_a", "transpose_b", "alpha"))
    if turn_b and not turn_a and alpha in (None, 1.0):

        def linear_or_batched(a: Any, b: Any) -> Any:
            return lz.linear(a, b) if b.dim() == 2 and a.dim() > 1 else torch.matmul(a, b.mT)

        return Work(linear_or_batched, "linear", chosen=True)

    def run(a: Any, b: Any) -> Any:
        found = torch.matmul(a.mT if turn_a else a, b.mT if turn_b else b)
        return found if alpha in (None, 1.0) else found * alpha

    return Work(run, "torch.matmul")


@runs("softmax")
def softmax(node: Node) -> Work:
    """Numbers that sum to 1 along an axis."""
    axis = node.axis
    if axis % max(len(node.shape), 1) == len(node.shape) - 1:
        return Work(lz.softmax, "softmax", chosen=True)
    return Work(lambda x: torch.softmax(x, axis), "torch.softmax")


@runs("rms_norm")
def rms_norm(node: Node) -> Work:
    """Divided by the root of the mean of squares."""
    eps = node.eps
    return Work(lambda x, weight=None: lz.rms_norm(x, weight, eps), "rms_norm", chosen=True)


@runs("add_rms_norm")
def add_rms_norm(node: Node) -> Work:
    """The same of a sum."""
    eps = node.eps
    return Work(
        lambda x, residual, weight=None: lz.fused_add_rms_norm(x, residual, weight, eps)[0],
        "fused_add_rms_norm",
        chosen=True,
    )


@runs("layer_norm")
def layer_norm(node: Node) -> Work:
    """Mean 0 and variance 1 along the last axes."""
    sizes, eps = list(node.shape[len(node.shape) - node.attributes.get("axes", 1) :]), node.eps
    return Work(lambda x, weight=None, bias=None: lz.layer_norm(x, sizes, weight, bias, eps), "layer_norm", chosen=True)


@runs("add_layer_norm")
def add_layer_norm(node: Node) -> Work:
    """The same of a sum."""
    sizes, eps = list(node.shape[-1:]), node.eps
    return Work(
        lambda x, residual, weight=None, bias=None: lz.layer_norm(x + residual, sizes, weight, bias, eps),
        "layer_norm",
        chosen=True,
    )


@runs("group_norm")
def group_norm(node: Node) -> Work:
    """Mean 0 and variance 1 in groups of channels."""
    groups, eps = node.groups, node.eps
    return Work(lambda x, weight=None, bias=None: F.group_norm(x, groups, weight, bias, eps), "torch.group_norm")


@runs("gated")
def gated(node: Node) -> Work:
    """``function(gate) · up``."""
    if node.kind == "silu_mul":
        return Work(lz.silu_mul, "silu_mul", chosen=True)
    approximate = "tanh" if node.kind == "gelu_tanh_mul" else "none"
    return Work(lambda gate, up: F.gelu(gate, approximate=approximate) * up, "torch.gelu")


@runs("embedding")
def embedding(node: Node) -> Work:
    """Rows of a table."""
    if not node.dtype.is_floating_point:
        return Work(lambda table, ids: F.embedding(ids, table), "torch.embedding")
    return Work(lambda table, ids: lz.embedding(ids, table), "embedding", chosen=True)


@runs("rope")
def rope(node: Node) -> Work:
    """Rotary positional embedding of x, whose last two axes are positions and width."""
    interleaved = node.attributes.get("interleaved", False)
    half, rank, positions = node.shape[-1] // 2, len(node.shape), node.shape[-2]

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        if interleaved:
            cos, sin = ((one if one.shape[-1] > half else one.repeat_interleave(2, -1)) for one in (cos, sin))
            other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        else:
            cos, sin = ((one if one.shape[-1] > half else torch.cat((one, one), -1)) for one in (cos, sin))
            other = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * cos + other * sin

    def run(x: Any, cos: Any, sin: Any) -> Any:
        # A table of one row for each position, for all sequences and heads.
        same = cos.shape == sin.shape and cos.shape[-2:] == (positions, half) and cos.numel() == positions * half
        if rank != 4 or not same:
            return turned(x, cos, sin)
        cos, sin = (one.reshape(positions, half) for one in (cos, sin))
        # Heads that were split off the last axis lie beside each other.
        if x.stride(1) < x.stride(2):
            return lz.rope(x.transpose(1, 2), cos, sin, interleaved, layout="bshd").transpose(1, 2)
        return lz.rope(x, cos, sin, interleaved, layout="bhsd")

    return Work(run, "rope", chosen=True)


@runs("conv")
def conv(node: Node) -> Work:
    """A convolution over one or two axes."""
    activation = _ACTIVATIONS[node.attributes.get("activation", "none")]
    function = F.conv1d if len(node.stride) == 1 else F.conv2d
    how = {name: getattr(node, name) for name in ("stride", "padding", "dilation", "groups")}

    def run(x: Any, weight: Any, bias: Any = None) -> Any:
        found = function(x, weight, bias, **how)
        return found if activation is None else activation(found)

    return Work(run, f"torch.conv{len(node.stride)}d")


@runs("pool")
def pool(node: Node) -> Work:
    """The largest or the mean of each window."""
    axes, ceil = len(node.kernel), node.attributes.get("ceil", False)
    where = (node.kernel, node.stride, node.padding)
    if node.kind == "max":
        largest: Any = F.max_pool1d if axes == 1 else F.max_pool2d
        return Work(lambda x: largest(x, *where, ceil_mode=ceil), f"torch.max_pool{axes}d")
    mean: Any = F.avg_pool1d if axes == 1 else F.avg_pool2d
    whole = node.attributes.get("count_padding", True)
    return Work(lambda x: mean(x, *where, ceil, whole), f"torch.avg_pool{axes}d")
