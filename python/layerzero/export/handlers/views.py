"""The same elements in another order, with other sizes, or some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from layerzero.export import sizes
from layerzero.export.building import Builder, Value, number
from layerzero.export.handlers.registry import Call, handles


@handles(
    "aten.view.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.unsqueeze.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten._reshape_copy.default",
)
def reshape(builder: Builder, call: Call, value: Value, *_: Any) -> Value:
    """Other sizes: torch knows which."""
    return builder.reshape(value, call.shape)


@handles("aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default")
def expand(builder: Builder, call: Call, value: Value, *_: Any) -> Value:
    """Axes of size 1 repeated."""
    return builder.expand(value, call.shape)


@handles("aten.permute.default")
def permute(builder: Builder, call: Call, value: Value, axes: Sequence[int]) -> Value:
    """The axes in another order."""
    return builder.permute(value, [value.axis(axis) for axis in axes])


@handles("aten.transpose.int")
def transpose(builder: Builder, call: Call, value: Value, a: int, b: int) -> Value:
    """Two axes in each other's place."""
    axes = list(range(value.rank))
    if axes:
        a, b = value.axis(a), value.axis(b)
        axes[a], axes[b] = axes[b], axes[a]
    return builder.permute(value, axes)


@handles("aten.t.default")
def turned(builder: Builder, call: Call, value: Value) -> Value:
    """A matrix with rows as columns."""
    return builder.permute(value, list(reversed(range(value.rank))))


@handles("aten.slice.Tensor")
def slice_(builder: Builder, call: Call, value: Value, axis: int, start: Any, end: Any, step: int) -> Value:
    """A part of an axis. torch knows how long it is."""
    axis = value.axis(axis)
    size = value.shape[axis]
    return builder.slice(value, axis, first(size, start), call.shape[axis], step)


def first(size: sizes.Size, start: Any) -> sizes.Size:
    """Where a part begins, as Python counts: from the end if it is negative, and never outside."""
    start = sizes.size(0 if start is None else start)
    if isinstance(start, int) and start < 0:
        start = max(size + start, 0) if isinstance(size, int) else sizes.size(sympy.Max(size + start, 0))
    return min(start, size) if isinstance(start, int) and isinstance(size, int) else start


@handles("aten.narrow.default")
def narrow(builder: Builder, call: Call, value: Value, axis: int, start: Any, length: Any) -> Value:
    """So many elements of an axis."""
    return slice_(builder, call, value, axis, start, None, 1)


@handles("aten.diff.default")
def diff(builder: Builder, call: Call, value: Value, times: int, axis: int, *ends: Value | None) -> Any:
    """Each element less the one before it."""
    if times != 1 or call.dtype == torch.bool:
        return NotImplemented
    before, after = ends
    axis, parts = value.axis(axis), [one for one in (before, value, after) if one is not None]
    whole = parts[0] if len(parts) == 1 else builder.concat(parts, axis)
    length = call.shape[axis]
    left, right = builder.slice(whole, axis, 0, length), builder.slice(whole, axis, 1, length)
    return builder.binary("sub", right, left)


@handles("aten.select.int")
def select(builder: Builder, call: Call, value: Value, axis: int, index: Any) -> Value:
    """One element of an axis, which goes."""
    axis = value.axis(axis)
    if isinstance(index, int) and index < 0:
        index = sizes.size(value.shape[axis] + index)
    return builder.reshape(builder.slice(value, axis, sizes.size(index), 1), call.shape)


def parts(builder: Builder, call: Call, value: Value, axis: int) -> list[Value | None]:
    """The parts of an axis that torch made results of; those nobody reads are left out."""
    found: list[Value | None] = []
    start: sizes.Size = 0
    for i in range(len(call.results)):
        length = call.shape_of(i)[axis]
        found.append(builder.slice(value, axis, start, length) if i in call.used else None)
        start = sizes.size(start + length)
    return found


@handles("aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default", "aten.chunk.default")
def split(builder: Builder, call: Call, value: Value, _: Any, axis: int) -> list[Value | None]:
    """Parts of an axis, as slices."""
    return parts(builder, call, value, value.axis(axis))


@handles("aten.unbind.int")
def unbind(builder: Builder, call: Call, value: Value, axis: int) -> list[Value | None]:
    """Each element of an axis, which goes."""
    axis = value.axis(axis)
    return [
        builder.reshape(builder.slice(value, axis, i, 1), call.shape_of(i)) if i in call.used else None
        for i in range(len(call.results))
    ]


@handles("aten.cat.default", "aten.concat.default")
def cat(builder: Builder, call: Call, values: Sequence[Value], axis: int) -> Value:
    """Tensors behind each other. Those of one axis without elements count for any sizes."""
    values = [builder.cast(value, call.dtype) for value in values if value.shape != (0,) or len(call.shape) == 1]
    return builder.concat(values, values[0].axis(axis))


@handles("aten.stack.default")
def stack(builder: Builder, call: Call, values: Sequence[Value], axis: int) -> Value:
    """Tensors along a new axis."""
    axis = axis + len(call.shape) if axis < 0 else axis
    one = [*call.shape[:axis], 1, *call.shape[axis + 1 :]]
    return builder.concat([builder.reshape(builder.cast(value, call.dtype), one) for value in values], axis)


@handles("aten.repeat.default")
def repeat(builder: Builder, call: Call, value: Value, times: Sequence[Any]) -> Value:
    """The whole tensor so many times along each axis: an axis of size 1 before each is repeated."""
    shape = (1,) * (len(times) - value.rank) + value.shape
    between = [n for size in shape for n in (1, size)]
    wide = [n for size, count in zip(shape, times, strict=True) for n in (count, size)]
    return builder.reshape(builder.expand(builder.reshape(value, between), wide), call.shape)


@handles("aten.flip.default")
def flip(builder: Builder, call: Call, value: Value, axes: Sequence[int]) -> Value:
    """Axes from their last element to their first."""
    for axis in map(value.axis, axes):
        size = value.shape[axis]
        ids = builder.iota(sizes.size(size - 1), -1, size)
        value = builder.emit("index_select", [value, ids], value.dtype, value.shape, axis=axis)
    return value


@handles("aten.constant_pad_nd.default", "aten.pad.default")
def pad(builder: Builder, call: Call, value: Value, around: Sequence[Any], *rest: Any) -> Any:
    """One number around the last axes, the last of them first."""
    mode, filled = rest if len(rest) == 2 else ("constant", rest[0])
    if mode != "constant":
        return NotImplemented
    pads: list[list[int | str]] = [[0, 0] for _ in value.shape]
    for i in range(len(around) // 2):
        pads[-1 - i] = [sizes.text(sizes.size(around[2 * i])), sizes.text(sizes.size(around[2 * i + 1]))]
    return builder.emit("pad", [value], value.dtype, call.shape, pads=pads, value=number(filled or 0))


@handles("aten.tril.default")
def tril(builder: Builder, call: Call, value: Value, diagonal: int) -> Value:
    """What is on a diagonal and left of it."""
    return builder.emit("triangle", [value], value.dtype, value.shape, upper=False, diagonal=diagonal)


@handles("aten.triu.default")
def triu(builder: Builder, call: Call, value: Value, diagonal: int) -> Value:
    """What is on a diagonal and right of it."""
    return builder.emit("triangle", [value], value.dtype, value.shape, upper=True, diagonal=diagonal)


@handles("aten.slice_scatter.default")
def slice_scatter(
    builder: Builder, call: Call, value: Value, source: Value, axis: int, start: Any, end: Any, step: int
) -> Any:
    """The value with a part of an axis replaced: what is before, the source, what is behind."""
    axis = value.axis(axis)
    if step != 1:
        return NotImplemented
    size, length = value.shape[axis], source.shape[axis]
    start = first(size, start)
    behind = sizes.size(start + length)
    pieces = [
        builder.slice(value, axis, 0, start),
        builder.cast(source, value.dtype),
        builder.slice(value, axis, behind, sizes.size(size - behind)),
    ]
    return builder.concat([piece for piece in pieces if piece.shape[axis] != 0], axis)


@handles("aten.copy.default")
def copy(builder: Builder, call: Call, value: Value, source: Value, *_: Any) -> Value:
    """The source with the type and sizes of the value."""
    return builder.expand(builder.cast(source, call.dtype), call.shape)


@handles("aten.roll.default")
def roll(builder: Builder, call: Call, value: Value, shifts: Sequence[Any], axes: Sequence[int]) -> Any:
    """Axes turned by some elements."""
    if not axes:
        return NotImplemented
    for shift, axis in zip(shifts, axes, strict=True):
        axis, size = value.axis(axis), value.shape[value.axis(axis)]
        if not isinstance(size, int) or not isinstance(shift, int):
            return NotImplemented
        cut = (size - shift) % size if size else 0
        if cut:
            pieces = [builder.slice(value, axis, cut, size - cut), builder.slice(value, axis, 0, cut)]
            value = builder.concat(pieces, axis)
    return value
