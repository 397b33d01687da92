"""Sizes: numbers or expressions of symbols, and how they are written in a graph."""

from __future__ import annotations

from typing import Any, TypeAlias

import sympy
import torch
from torch.utils._sympy import functions as torch_functions

#: A number (int), or an expression of symbols (sympy.Expr, which has no types).
Size: TypeAlias = Any

#: Functions of two arguments, as the graph writes them.
_BINARY = {"FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%"}


class UnknownSizeError(ValueError):
    """A size that depends on data, or a function of sizes that a graph cannot express."""


def size(value: Any) -> Size:
    """A size from an int, a SymInt or an expression of torch's."""
    if isinstance(value, torch.SymInt):
        value = value.node.expr
    if isinstance(value, (int, sympy.Integer)):
        return int(value)
    if isinstance(value, sympy.Expr):
        return value
    raise UnknownSizeError(f"{value!r} is no size")


def floor_div(a: Size, b: Size) -> Size:
    """The quotient, rounded down."""
    return size(torch_functions.FloorDiv(sympy.sympify(a), sympy.sympify(b)))


def product(sizes: Any) -> Size:
    """All of them multiplied."""
    total: Size = 1
    for one in sizes:
        total = size(total * one)
    return total


def same(a: Size, b: Size) -> bool:
    """Whether two expressions are equal for all values of their symbols, as far as expanding them shows it."""
    return a == b or bool(sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0)


def text(value: Size) -> int | str:
    """A size as a graph has it: a number, or a text with ``+ - * // %``, ``min`` and ``max``."""
    return int(value) if isinstance(value, (int, sympy.Integer)) else _text(value)


def _text(expression: Any) -> str:
    if isinstance(expression, sympy.Integer):
        return str(int(expression))
    if isinstance(expression, sympy.Symbol):
        if not expression.name.startswith("s"):
            raise UnknownSizeError(f"the size {expression.name} depends on the data")
        return str(expression.name)
    parts = [_text(argument) for argument in expression.args if not isinstance(argument, sympy.Rational)]
    numbers = [argument for argument in expression.args if isinstance(argument, sympy.Rational)]
    name = type(expression).__name__
    if isinstance(expression, sympy.Mul):
        # With a fraction: multiply everything, then divide once.
        number = sympy.sympify(sympy.prod(numbers))
        above = "*".join(f"({part})" for part in [str(number.p), *parts])
        return above if number.q == 1 else f"({above}) // {number.q}"
    parts = [_text(argument) for argument in expression.args]
    if isinstance(expression, sympy.Add):
        return " + ".join(f"({part})" for part in parts)
    if isinstance(expression, sympy.Pow) and isinstance(expression.exp, sympy.Integer) and 0 < expression.exp < 16:
        return "*".join([f"({parts[0]})"] * int(expression.exp))
    if name in _BINARY:
        return f"(({parts[0]}) {_BINARY[name]} ({parts[1]}))"
    if name in ("Min", "Max"):
        nested = parts[0]
        for part in parts[1:]:
            nested = f"{name.lower()}({nested}, {part})"
        return nested
    if name == "ModularIndexing":
        return f"((({parts[0]}) // ({parts[1]})) % ({parts[2]}))"
    raise UnknownSizeError(f"the graph has no {name}, which {expression} needs")
