"""Tensors out of nothing."""

from __future__ import annotations

from typing import Any

import torch

from layerzero.export import sizes
from layerzero.export.building import Builder, Value
from layerzero.export.handlers.elementwise import combine, is_number, operand
from layerzero.export.handlers.registry import Call, handles


@handles("aten.full.default", "aten.new_full.default", "aten.full_like.default", "aten.scalar_tensor.default")
def full(builder: Builder, call: Call, *given: Any) -> Any:
    """One number everywhere: the first argument, or the one after the sizes or the tensor whose type is taken."""
    numbers = [one for one in given if is_number(one)]
    if not numbers or isinstance(numbers[0], complex):
        return NotImplemented
    return builder.full(call.shape, numbers[0], call.dtype)


def _filled(number: int) -> Any:
    def handler(builder: Builder, call: Call, *_: Any) -> Value:
        return builder.full(call.shape, number, call.dtype)

    return handler


handles("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default")(_filled(0))
handles("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default")(_filled(1))
# Whatever stands there is not read.
handles("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default")(_filled(0))


@handles("aten.arange.start_step")
def arange(builder: Builder, call: Call, start: Any, end: Any, step: Any, *_: Any) -> Any:
    """Numbers at equal distances. torch knows how many."""
    length = call.shape[0]
    if not isinstance(step, int) or isinstance(start, float):
        # Fractions: start + step · 0, 1, 2, …
        if not is_number(start) or not is_number(step):
            return NotImplemented
        counted = builder.iota(0, 1, length, torch.float64)
        scaled = combine(builder, "mul", counted, float(step), torch.float64)
        return builder.cast(combine(builder, "add", scaled, float(start), torch.float64), call.dtype)
    return builder.iota(sizes.size(start), step, length, call.dtype)


@handles("aten.arange.default")
def arange_to(builder: Builder, call: Call, end: Any, *_: Any) -> Any:
    """From 0 on."""
    return arange(builder, call, 0, end, 1)


@handles("aten.arange.start")
def arange_from(builder: Builder, call: Call, start: Any, end: Any, *_: Any) -> Any:
    """In steps of 1."""
    return arange(builder, call, start, end, 1)


@handles("aten.fill.Scalar", "aten.fill.Tensor")
def fill(builder: Builder, call: Call, value: Value, filled: Any) -> Value:
    """Another number everywhere."""
    return builder.expand(operand(builder, filled, call.dtype), call.shape)
