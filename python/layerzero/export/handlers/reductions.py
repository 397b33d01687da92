"""Numbers of all elements along some axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from layerzero.export import sizes
from layerzero.export.building import Builder, Value
from layerzero.export.handlers.elementwise import HALVES, operand
from layerzero.export.handlers.registry import Call, handles

#: For each overload: which number. Their arguments are the axes, whether they stay, and a type, or the first of those.
REDUCTIONS = {
    "sum.default": "sum",
    "sum.dim_IntList": "sum",
    "mean.default": "mean",
    "mean.dim": "mean",
    "amax.default": "max",
    "amin.default": "min",
    "max.default": "max",
    "min.default": "min",
    "any.default": "any",
    "any.dim": "any",
    "any.dims": "any",
    "all.default": "all",
    "all.dim": "all",
    "all.dims": "all",
    "prod.default": "prod",
    "prod.dim_int": "prod",
}


def wide(builder: Builder, value: Value) -> Value:
    """Halves as float32: what is between would overflow, or be rounded more than once."""
    return builder.cast(value, torch.float32 if value.dtype in HALVES else value.dtype)


def axes_of(value: Value, axes: Any) -> list[int]:
    """The axes a call names; all of them if it names none."""
    if axes is None or axes == []:
        return list(range(value.rank))
    return [value.axis(axis) for axis in (axes if isinstance(axes, Sequence) else [axes])]


def _reduction(kind: str, has_axes: bool) -> Any:
    def handler(builder: Builder, call: Call, value: Value, *rest: Any) -> Value:
        axes = axes_of(value, rest[0] if has_axes else None)
        keepdim = bool(rest[1]) if has_axes and len(rest) > 1 else False
        if kind not in ("any", "all"):
            value = builder.cast(value, call.dtype)
        # `any` and `all` of uint8 are uint8.
        return builder.cast(builder.reduce(kind, value, axes, keepdim), call.dtype)

    return handler


for _op, _kind in REDUCTIONS.items():
    handles(f"aten.{_op}")(_reduction(_kind, not _op.endswith("default") or _op.startswith(("amax", "amin"))))


def _with_places(kind: str) -> Any:
    def handler(builder: Builder, call: Call, value: Value, axis: int, keepdim: bool) -> list[Value | None]:
        shape, axes = call.shape_of(0), axes_of(value, axis)
        if not axes:
            return [value, builder.full([], 0, torch.int64)]
        attributes = {"kind": f"arg{kind}", "axis": axes[0], "keepdim": keepdim}
        return [
            builder.reduce(kind, value, axes, keepdim) if 0 in call.used else None,
            builder.emit("argreduce", [value], torch.int64, shape, **attributes) if 1 in call.used else None,
        ]

    return handler


def _place(kind: str) -> Any:
    def handler(builder: Builder, call: Call, value: Value, axis: int | None, keepdim: bool) -> Value:
        if value.rank == 0:
            return builder.full([], 0, torch.int64)
        axis = None if axis is None else value.axis(axis)
        return builder.emit("argreduce", [value], torch.int64, call.shape, kind=kind, axis=axis, keepdim=keepdim)

    return handler


for _kind in ("max", "min"):
    handles(f"aten.{_kind}.dim")(_with_places(_kind))
    handles(f"aten.arg{_kind}.default")(_place(f"arg{_kind}"))


@handles("aten.cumsum.default")
def cumsum(builder: Builder, call: Call, value: Value, axis: int) -> Value:
    """Running sums."""
    value = builder.cast(value, call.dtype)
    if value.rank == 0:
        return value
    return builder.emit("cumsum", [value], call.dtype, value.shape, axis=value.axis(axis))


def variance(builder: Builder, value: Value, axes: Any, correction: float | None, keepdim: bool) -> Value:
    """The mean of squares of the distances to the mean, with n - correction in the place of n."""
    axes = axes_of(value, axes)
    distance = builder.binary("sub", value, builder.reduce("mean", value, axes, True))
    squares = builder.reduce("sum", builder.binary("mul", distance, distance), axes, keepdim)
    count = sizes.size(sizes.product(value.shape[axis] for axis in axes) - int(1 if correction is None else correction))
    return builder.binary("div", squares, operand(builder, count, value.dtype))


@handles("aten.var.correction")
def var(builder: Builder, call: Call, value: Value, axes: Any, correction: Any, keepdim: bool) -> Any:
    """The variance."""
    return builder.cast(variance(builder, wide(builder, value), axes, correction, keepdim), call.dtype)


@handles("aten.std.correction")
def std(builder: Builder, call: Call, value: Value, axes: Any, correction: Any, keepdim: bool) -> Any:
    """The square root of the variance."""
    found = variance(builder, wide(builder, value), axes, correction, keepdim)
    return builder.cast(builder.unary("sqrt", found), call.dtype)


@handles("aten.var_mean.correction")
def var_mean(builder: Builder, call: Call, value: Value, axes: Any, correction: Any, keepdim: bool) -> Any:
    """The variance and the mean."""
    dtype, value = value.dtype, wide(builder, value)
    mean = builder.reduce("mean", value, axes_of(value, axes), keepdim)
    return [builder.cast(one, dtype) for one in (variance(builder, value, axes, correction, keepdim), mean)]


@handles("aten.softmax.int", "aten._softmax.default")
def softmax(builder: Builder, call: Call, value: Value, axis: int, dtype: Any) -> Any:
    """Shares that sum up to 1."""
    if value.rank == 0:
        return NotImplemented
    value = builder.cast(value, call.dtype)
    return builder.emit("softmax", [value], call.dtype, value.shape, axis=value.axis(axis))


@handles("aten._safe_softmax.default")
def safe_softmax(builder: Builder, call: Call, value: Value, axis: int, dtype: Any) -> Any:
    """The same with zeros where everything is minus infinity."""
    found = softmax(builder, call, value, axis, dtype)
    if found is NotImplemented:
        return found
    value = builder.cast(value, call.dtype)
    most = builder.reduce("max", value, [value.axis(axis)], True)
    masked = builder.binary("eq", most, builder.number(float("-inf"), call.dtype))
    return builder.where(masked, builder.number(0.0, call.dtype), found)


@handles("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax(builder: Builder, call: Call, value: Value, axis: int, dtype: Any) -> Any:
    """`y - log(sum(exp(y)))` of `y = x - max(x)`."""
    if value.rank == 0:
        return NotImplemented
    value = wide(builder, builder.cast(value, call.dtype))
    axes = [value.axis(axis)]
    below = builder.binary("sub", value, builder.reduce("max", value, axes, True))
    total = builder.reduce("sum", builder.unary("exp", below), axes, True)
    return builder.cast(builder.binary("sub", below, builder.unary("log", total)), call.dtype)


@handles("aten.linalg_vector_norm.default")
def vector_norm(builder: Builder, call: Call, value: Value, order: float, axes: Any, keepdim: bool) -> Any:
    """The root of the sum of squares; the sum or the greatest of what is left of signs."""
    if order not in (1, 2, float("inf")):
        return NotImplemented
    value, axes = wide(builder, builder.cast(value, call.dtype)), axes_of(value, axes)
    if order == 2:
        found = builder.unary("sqrt", builder.reduce("sum", builder.binary("mul", value, value), axes, keepdim))
    else:
        found = builder.reduce("sum" if order == 1 else "max", builder.unary("abs", value), axes, keepdim)
    return builder.cast(found, call.dtype)
