"""Elements by tensors of indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from layerzero.export import sizes
from layerzero.export.building import Builder, Value, broadcast
from layerzero.export.handlers.elementwise import combine, operand
from layerzero.export.handlers.registry import Call, handles

_INDICES = (torch.int64, torch.int32)


def not_negative(builder: Builder, ids: Value, size: sizes.Size) -> Value:
    """Indices that count from the front."""
    if ids.name in builder.not_negative:
        return ids
    below = builder.binary("lt", ids, builder.number(0, ids.dtype))
    return builder.where(below, combine(builder, "add", ids, size, ids.dtype), ids)


def _outside(builder: Builder, ids: Value, size: sizes.Size) -> Value:
    """Where indices that count from the front are none of an axis."""
    beyond = builder.binary("ge", ids, operand(builder, size, ids.dtype))
    if ids.name in builder.not_negative:
        return beyond
    return builder.binary("or", beyond, builder.binary("lt", ids, builder.number(0, ids.dtype)))


@handles("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(builder: Builder, call: Call, value: Value, ids: Sequence[Value | None]) -> Any:
    """Elements of some axes together: these axes become one, of which elements are selected by one number."""
    axes = [axis for axis, one in enumerate(ids) if one is not None]
    given = [one for one in ids if one is not None]
    if any(one.dtype not in _INDICES for one in given):
        return NotImplemented
    behind = [axis for axis in range(value.rank) if axis not in axes]
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    first = axes[0] if together else 0
    order = behind[:first] + axes + behind[first:]
    value = builder.permute(value, order)
    indexed = value.shape[first : first + len(axes)]
    places = broadcast(*(one.shape for one in given))
    if len(given) == 1:
        place = given[0]
    else:
        given = [not_negative(builder, one, n) for one, n in zip(given, indexed, strict=True)]
        outside = [_outside(builder, one, n) for one, n in zip(given, indexed, strict=True)]
        place = given[0]
        for one, n in zip(given[1:], indexed[1:], strict=True):
            dtype = torch.promote_types(place.dtype, one.dtype)
            scaled = place if n == 1 else combine(builder, "mul", place, n, dtype)
            place = combine(builder, "add", scaled, one, dtype)
        # One that is outside of its own axis must not reach another row: it becomes one outside of all.
        wrong = outside[0]
        for one in outside[1:]:
            wrong = builder.binary("or", wrong, one)
        place = builder.where(wrong, operand(builder, sizes.product(indexed), place.dtype), place)
        place = builder.expand(place, places)
    flat = [*value.shape[:first], sizes.product(indexed), *value.shape[first + len(axes) :]]
    value, place = builder.reshape(value, flat), builder.reshape(place, [sizes.product(places)])
    flat[first] = place.shape[0]
    selected = builder.emit("index_select", [value, place], value.dtype, flat, axis=first)
    return builder.reshape(selected, call.shape)


@handles("aten.index_select.default")
def index_select(builder: Builder, call: Call, value: Value, axis: int, ids: Value) -> Any:
    """Elements of one axis."""
    if value.rank == 0:
        return NotImplemented
    ids = builder.reshape(ids, [sizes.product(ids.shape)])
    return builder.emit("index_select", [value, ids], value.dtype, call.shape, axis=value.axis(axis))


@handles("aten.gather.default")
def gather(builder: Builder, call: Call, value: Value, axis: int, ids: Value, *_: Any) -> Any:
    """Elements by their places along one axis."""
    if value.rank == 0 or ids.rank == 0:
        return NotImplemented
    return builder.emit("gather", [value, ids], value.dtype, call.shape, axis=value.axis(axis))


@handles("aten.embedding.default")
def embedding(builder: Builder, call: Call, table: Value, ids: Value, *_: Any) -> Value:
    """Rows of a table."""
    return builder.emit("embedding", [table, ids], table.dtype, call.shape)


@handles("aten.index_copy.default")
def index_copy(builder: Builder, call: Call, value: Value, axis: int, ids: Value, source: Value) -> Any:
    """Parts of one axis replaced."""
    if value.rank == 0:
        return NotImplemented
    ids = builder.reshape(ids, [sizes.product(ids.shape)])
    return builder.emit("index_copy", [value, ids, source], value.dtype, value.shape, axis=value.axis(axis))


@handles("aten.index_add.default")
def index_add(builder: Builder, call: Call, value: Value, axis: int, ids: Value, source: Value, alpha: Any) -> Any:
    """Rows added to; of the first axis only."""
    if value.rank == 0 or value.axis(axis) != 0 or alpha != 1:
        return NotImplemented
    return builder.emit("index_put", [value, source, ids], value.dtype, value.shape, accumulate=True)


@handles("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(
    builder: Builder, call: Call, value: Value, ids: Sequence[Value | None], source: Value, accumulate: bool
) -> Any:
    """Rows replaced at places of the first axes; a mask of the whole is a selection."""
    if len(ids) == 1 and ids[0] is not None and ids[0].dtype == torch.bool and source.rank == 0 and not accumulate:
        mask = ids[0]
        mask = builder.reshape(mask, [*mask.shape, *[1] * (value.rank - mask.rank)])
        return builder.where(mask, builder.cast(source, value.dtype), value)
    if any(one is None or one.dtype not in _INDICES for one in ids):
        return NotImplemented
    inputs = [value, builder.cast(source, value.dtype), *ids]
    return builder.emit("index_put", inputs, value.dtype, value.shape, accumulate=accumulate)


@handles("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(builder: Builder, call: Call, value: Value, axis: int, ids: Value, filled: Any) -> Any:
    """One number in parts of one axis."""
    if value.rank == 0:
        return NotImplemented
    axis = value.axis(axis)
    shape = [*value.shape[:axis], ids.shape[0], *value.shape[axis + 1 :]]
    source = builder.expand(operand(builder, filled, value.dtype), shape)
    return builder.emit("index_copy", [value, ids, source], value.dtype, value.shape, axis=axis)
