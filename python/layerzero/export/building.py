"""Writes the document of a graph: its values, nodes and constants."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from layerzero.export import sizes
from layerzero.export.sizes import Size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Value:
    """A tensor of the graph."""

    name: str
    dtype: torch.dtype
    shape: tuple[Size, ...]

    @property
    def rank(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    def axis(self, axis: int) -> int:
        """An axis counted from the front."""
        return axis + max(self.rank, 1) if axis < 0 else axis


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in the graph."""
    return str(dtype).removeprefix("torch.")


def number(value: float) -> float | str:
    """A number for JSON. Integers keep all their digits; NaN and infinities become texts."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    value = float(value)
    return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


#: Operations whose results have no negative elements if their first input has none.
_KEEPS_SIGN = frozenset({"reshape", "permute", "expand", "slice", "cast"})


@dataclass
class Builder:
    """Collects the parts of the document. `node` is the name of the node that is translated now; its values get that name."""

    node: str = "v"
    origin: str = ""
    inputs: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    not_negative: set[str] = field(default_factory=set)
    _numbers: dict[tuple[torch.dtype, str], Value] = field(default_factory=dict)
    _memory: dict[tuple[Any, ...], Value] = field(default_factory=dict)

    def named(self, wanted: str) -> str:
        """The wanted name, with a number behind it if another value has that name."""
        name, i = wanted, 0
        while name in self.names:
            i += 1
            name = f"{wanted}.{i}"
        self.names.add(name)
        return name

    def input(self, name: str, dtype: torch.dtype, shape: Iterable[Any]) -> Value:
        """A tensor the caller gives."""
        value = Value(self.named(name), dtype, tuple(map(sizes.size, shape)))
        row = {"name": value.name, "dtype": dtype_name(dtype), "shape": [sizes.text(n) for n in value.shape]}
        self.inputs.append(row)
        return value

    def constant(self, name: str, tensor: torch.Tensor) -> Value:
        """A weight, or another tensor of the model. The same memory under two names is one constant."""
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        if key in self._memory and tensor.numel() > 0:
            return self._memory[key]
        value = Value(self.named(name), tensor.dtype, tuple(tensor.shape))
        self.constants[value.name] = tensor
        self._memory[key] = value
        return value

    def number(self, value: complex, dtype: torch.dtype) -> Value:
        """A number, as a constant without axes."""
        key = (dtype, repr(value))
        if key not in self._numbers:
            found = self.constant(f"number.{value!r}", torch.tensor(value, dtype=dtype, device="cpu"))
            if isinstance(value, int) and value >= 0:
                self.not_negative.add(found.name)
            self._numbers[key] = found
        return self._numbers[key]

    def emit(
        self,
        op: str,
        inputs: Sequence[Value | None],
        dtype: torch.dtype,
        shape: Iterable[Any],
        /,
        **attributes: Any,
    ) -> Value:
        """A node. `dtype` and `shape` are those of its result; the graph checks them."""
        value = Value(self.named(self.node), dtype, tuple(map(sizes.size, shape)))
        self.nodes.append(
            {
                "op": op,
                "attrs": attributes,
                "inputs": [None if one is None else one.name for one in inputs],
                "output": value.name,
                "origin": self.origin,
                "dtype": dtype_name(dtype),
                "shape": [sizes.text(n) for n in value.shape],
            }
        )
        if op in _KEEPS_SIGN and inputs and inputs[0] is not None and inputs[0].name in self.not_negative:
            self.not_negative.add(value.name)
        return value

    def cast(self, value: Value, dtype: torch.dtype | None) -> Value:
        """The value as `dtype`: itself if it has that dtype already."""
        if dtype is None or value.dtype == dtype:
            return value
        return self.emit("cast", [value], dtype, value.shape, dtype=dtype_name(dtype))

    def unary(self, kind: str, value: Value) -> Value:
        """A function of each element."""
        dtype = torch.bool if kind == "not" else value.dtype
        return self.emit("unary", [value], dtype, value.shape, kind=kind)

    def binary(self, kind: str, left: Value, right: Value) -> Value:
        """A function of two elements."""
        dtype = torch.bool if kind in ("eq", "ne", "lt", "le", "gt", "ge") else left.dtype
        return self.emit("binary", [left, right], dtype, broadcast(left.shape, right.shape), kind=kind)

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        """`a` where the condition holds, else `b`."""
        return self.emit("where", [condition, a, b], a.dtype, broadcast(condition.shape, a.shape, b.shape))

    def reshape(self, value: Value, shape: Iterable[Any]) -> Value:
        """The same elements in another shape."""
        shape = tuple(map(sizes.size, shape))
        if shape == value.shape:
            return value
        return self.emit("reshape", [value], value.dtype, shape, shape=[sizes.text(n) for n in shape])

    def permute(self, value: Value, axes: Sequence[int]) -> Value:
        """The axes in another order."""
        if list(axes) == list(range(value.rank)):
            return value
        return self.emit("permute", [value], value.dtype, [value.shape[i] for i in axes], axes=list(axes))

    def expand(self, value: Value, shape: Iterable[Any]) -> Value:
        """Axes of size 1 repeated."""
        shape = tuple(map(sizes.size, shape))
        if shape == value.shape:
            return value
        return self.emit("expand", [value], value.dtype, shape, shape=[sizes.text(n) for n in shape])

    def slice(self, value: Value, axis: int, start: Size, length: Size, step: int = 1) -> Value:
        """`length` elements of an axis, from `start` on, each `step` after the one before."""
        shape = list(value.shape)
        if start == 0 and step == 1 and sizes.same(length, shape[axis]):
            return value
        shape[axis] = length
        end = sizes.size(start + (length - 1) * step + 1) if length != 0 else start
        attributes = {"axis": axis, "start": sizes.text(start), "end": sizes.text(end), "step": step}
        return self.emit("slice", [value], value.dtype, shape, **attributes)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Tensors joined along an axis."""
        if len(values) == 1:
            return values[0]
        shape = list(values[0].shape)
        shape[axis] = sizes.size(sum(value.shape[axis] for value in values))
        return self.emit("concat", values, values[0].dtype, shape, axis=axis)

    def reduce(self, kind: str, value: Value, axes: Sequence[int], keepdim: bool) -> Value:
        """A reduction over some axes: a sum, a maximum, …"""
        joined = {value.axis(axis) for axis in axes} if value.rank else set()
        kept = ((i, n) for i, n in enumerate(value.shape))
        shape = [1 if i in joined else n for i, n in kept if keepdim or i not in joined]
        dtype = torch.bool if kind in ("any", "all") else value.dtype
        return self.emit("reduce", [value], dtype, shape, kind=kind, axes=sorted(joined), keepdim=keepdim)

    def iota(self, start: Size, step: int, length: Size, dtype: torch.dtype = torch.int64) -> Value:
        """`length` numbers from `start` on, each `step` more than the one before."""
        attributes = {"start": sizes.text(start), "len": sizes.text(length), "dtype": dtype_name(dtype)}
        value = self.emit("iota", [], dtype, [length], step=step, **attributes)
        if isinstance(start, int) and start >= 0 and step > 0:
            self.not_negative.add(value.name)
        return value

    def full(self, shape: Iterable[Any], value: float, dtype: torch.dtype) -> Value:
        """A tensor filled with one number."""
        shape = tuple(map(sizes.size, shape))
        attributes = {"shape": [sizes.text(n) for n in shape], "value": number(value), "dtype": dtype_name(dtype)}
        return self.emit("full", [], dtype, shape, **attributes)

    def matmul(self, a: Value, b: Value) -> Value:
        """A product of matrices."""
        leading = broadcast(a.shape[:-2], b.shape[:-2])
        return self.emit("matmul", [a, b], a.dtype, [*leading, a.shape[-2], b.shape[-1]])

    def document(self, name: str, symbols: list[dict[str, Any]], outputs: list[str], updates: list[list[str]]) -> str:
        """The whole of it, as JSON."""
        rows = {
            "name": name,
            "symbols": symbols,
            "inputs": self.inputs,
            "constants": list(self.constants),
            "nodes": self.nodes,
            "outputs": outputs,
            "updates": updates,
        }
        return json.dumps(rows, allow_nan=False)


def broadcast(*shapes: Sequence[Size]) -> tuple[Size, ...]:
    """The sizes of tensors that are broadcast to each other."""
    rank = max(map(len, shapes))
    found: list[Size] = [1] * rank
    for shape in shapes:
        for i, n in enumerate(shape, rank - len(shape)):
            if found[i] == 1:
                found[i] = n
    return tuple(found)
