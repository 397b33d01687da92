"""Functions of each element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from layerzero.device_graphs.nodes import Node, Work
from layerzero.device_graphs.runners.registry import runs

_UNARY: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("neg", "abs", "sign", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid"),
            *("relu", "erf", "floor", "ceil", "round"),
        )
    },
    "not": torch.logical_not,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

_BINARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "pow", "eq", "ne", "lt", "le", "gt", "ge")},
    "div": torch.true_divide,
    "max": torch.maximum,
    "min": torch.minimum,
    "remainder": torch.remainder,
    "floor_div": torch.floor_divide,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}

#: Functions of truth values, which torch does not have for them: truth values are the integers 0 and 1.
_OF_TRUTHS: dict[str, Callable[..., Any]] = {
    "add": torch.logical_or,
    "mul": torch.logical_and,
    "max": torch.logical_or,
    "min": torch.logical_and,
}


@runs("unary")
def unary(node: Node) -> Work:
    """A function of one number. `floor`, `ceil` and `round` leave integers as they are, in torch too."""
    return Work(_UNARY[node.kind], f"torch.{node.kind}")


@runs("binary")
def binary(node: Node) -> Work:
    """A function of two numbers, which are broadcast to each other."""
    function, kind, dtype = _BINARY[node.kind], node.kind, node.dtype
    if dtype == torch.bool and kind in _OF_TRUTHS:
        function = _OF_TRUTHS[kind]
    if kind == "div" and not dtype.is_floating_point:
        function = lambda a, b: torch.div(a, b, rounding_mode="trunc")
    return Work(function, f"torch.{kind}")


@runs("where")
def where(_: Node) -> Work:
    """One number or another, by a truth value."""
    return Work(torch.where, "torch.where")


@runs("cast")
def cast(node: Node) -> Work:
    """The same number in another type."""
    dtype = node.dtype
    return Work(lambda x: x.to(dtype), "torch.to")


@runs("triangle")
def triangle(node: Node) -> Work:
    """A matrix with zeros on one side of a diagonal."""
    function, diagonal = torch.triu if node.upper else torch.tril, node.diagonal
    return Work(lambda x: function(x, diagonal), f"torch.{function.__name__}")
