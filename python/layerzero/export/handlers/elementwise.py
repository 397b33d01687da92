"""Functions of elements."""

from __future__ import annotations

from typing import Any

import torch

from layerzero.export.building import Builder, Value
from layerzero.export.handlers.registry import HANDLERS, Call, handles, passes_on

UNARY = {
    "abs": "abs",
    "ceil": "ceil",
    "cos": "cos",
    "erf": "erf",
    "exp": "exp",
    "floor": "floor",
    "log": "log",
    "neg": "neg",
    "reciprocal": "reciprocal",
    "relu": "relu",
    "round": "round",
    "rsqrt": "rsqrt",
    "sgn": "sign",
    "sigmoid": "sigmoid",
    "sign": "sign",
    "silu": "silu",
    "sin": "sin",
    "sqrt": "sqrt",
    "tanh": "tanh",
}
#: For each overload, which function it is. Both sides become the type torch computes in.
BINARY = {
    "mul.Tensor": "mul",
    "mul.Scalar": "mul",
    "div.Tensor": "div",
    "div.Scalar": "div",
    "true_divide.Tensor": "div",
    "pow.Tensor_Tensor": "pow",
    "pow.Tensor_Scalar": "pow",
    "pow.Scalar": "pow",
    "maximum.default": "max",
    "minimum.default": "min",
    "max.other": "max",
    "min.other": "min",
    "remainder.Tensor": "remainder",
    "remainder.Scalar": "remainder",
    "floor_divide.default": "floor_div",
    "bitwise_and.Tensor": "and",
    "bitwise_and.Scalar": "and",
    "bitwise_or.Tensor": "or",
    "bitwise_or.Scalar": "or",
    "bitwise_xor.Tensor": "xor",
    "bitwise_xor.Scalar": "xor",
    "__and__.Tensor": "and",
    "__and__.Scalar": "and",
    "__or__.Tensor": "or",
    "__or__.Scalar": "or",
    "__xor__.Tensor": "xor",
    "__xor__.Scalar": "xor",
    "eq.Tensor": "eq",
    "eq.Scalar": "eq",
    "ne.Tensor": "ne",
    "ne.Scalar": "ne",
    "lt.Tensor": "lt",
    "lt.Scalar": "lt",
    "le.Tensor": "le",
    "le.Scalar": "le",
    "gt.Tensor": "gt",
    "gt.Scalar": "gt",
    "ge.Tensor": "ge",
    "ge.Scalar": "ge",
}
LOGICAL = {"logical_and.default": "and", "logical_or.default": "or", "logical_xor.default": "xor"}
HALVES = (torch.float16, torch.bfloat16)


def result_type(*operands: Value | complex) -> torch.dtype:
    """The type torch computes in."""
    as_torch = [
        torch.empty([1] * one.rank, dtype=one.dtype, device="meta") if isinstance(one, Value) else one
        for one in operands
    ]
    if len(as_torch) == 1:
        return torch.result_type(as_torch[0], as_torch[0])
    found = torch.result_type(as_torch[0], as_torch[1])
    for i in range(2, len(as_torch)):
        found = torch.promote_types(found, torch.result_type(as_torch[0], as_torch[i]))
    return found


def is_number(operand: Any) -> bool:
    """Whether it is a number of Python's, which an expression of sizes is not."""
    return isinstance(operand, (bool, int, float))


def computed_in(dtype: torch.dtype, *operands: Any) -> torch.dtype:
    """float32 for halves where a number would be rounded to them: of products and quotients torch rounds the result only."""
    if dtype in HALVES:
        for one in operands:
            if is_number(one) and torch.tensor(one, dtype=dtype).item() != float(one):
                return torch.float32
    return dtype


def operand(builder: Builder, one: Any, dtype: torch.dtype) -> Value:
    """A side of an operation, as a tensor of a type."""
    if isinstance(one, Value):
        return builder.cast(one, dtype)
    if is_number(one):
        return builder.number(one, dtype)
    # An expression of sizes: the only element of a range that begins there.
    return builder.reshape(builder.iota(one, 1, 1, dtype), [])


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
#: Of halves and a number, torch computes these with the number as it is. For all others it rounds the number to the half first.
_EXACT_NUMBERS = ("mul", "div", "floor_div")


def combine(builder: Builder, kind: str, left: Any, right: Any, dtype: torch.dtype) -> Value:
    """A binary function of two sides, computed in a type."""
    if kind in _EXACT_NUMBERS:
        dtype = computed_in(dtype, left, right)
    return builder.binary(kind, operand(builder, left, dtype), operand(builder, right, dtype))


def operand_type(left: Any, right: Any) -> torch.dtype:
    """The type two sides are computed in; a size counts as an integer."""
    return result_type(*(one if isinstance(one, Value) or is_number(one) else 1 for one in (left, right)))


def _unary(kind: str) -> Any:
    def handler(builder: Builder, call: Call, value: Value) -> Value:
        return builder.unary(kind, builder.cast(value, call.dtype))

    return handler


def _binary(kind: str) -> Any:
    def handler(builder: Builder, call: Call, left: Any, right: Any) -> Value:
        dtype = operand_type(left, right) if kind in _COMPARISONS else call.dtype
        return builder.cast(combine(builder, kind, left, right, dtype), call.dtype)

    return handler


def _logical(kind: str) -> Any:
    def handler(builder: Builder, call: Call, left: Value, right: Value) -> Value:
        return builder.binary(kind, builder.cast(left, torch.bool), builder.cast(right, torch.bool))

    return handler


for _op, _kind in UNARY.items():
    handles(f"aten.{_op}.default")(_unary(_kind))
for _op, _kind in BINARY.items():
    handles(f"aten.{_op}")(_binary(_kind))
for _op, _kind in LOGICAL.items():
    handles(f"aten.{_op}")(_logical(_kind))
handles(
    "aten.clone.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten.contiguous.default",
    "aten.lift_fresh_copy.default",
    "aten.lift_fresh.default",
    "aten._to_copy.default",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.to.device",
    "aten.to.other",
)(passes_on)


@handles("aten.dropout.default")
def dropout(builder: Builder, call: Call, value: Value, p: float, train: bool) -> Any:
    """Nothing, but where a model is trained."""
    return NotImplemented if train and p > 0 else value


@handles("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar")
def add(builder: Builder, call: Call, left: Any, right: Any, alpha: Any, kind: str = "add") -> Value:
    """`left ± alpha · right`."""
    if alpha != 1 and call.dtype in HALVES:
        # Numbers are rounded, and the result; the product is not.
        if is_number(alpha):
            alpha = torch.tensor(alpha, dtype=call.dtype).item()
        left, right = (operand(builder, operand(builder, one, call.dtype), torch.float32) for one in (left, right))
        right = combine(builder, "mul", right, alpha, torch.float32)
        return builder.cast(builder.binary(kind, left, right), call.dtype)
    if alpha != 1:
        right = right * alpha if is_number(right) else combine(builder, "mul", right, alpha, call.dtype)
    return builder.cast(combine(builder, kind, left, right, call.dtype), call.dtype)


def _sub(builder: Builder, call: Call, left: Any, right: Any, alpha: Any) -> Value:
    return add(builder, call, left, right, alpha, kind="sub")


HANDLERS["aten.sub.Tensor"] = HANDLERS["aten.sub.Scalar"] = _sub


@handles("aten.rsub.Tensor", "aten.rsub.Scalar")
def rsub(builder: Builder, call: Call, left: Any, right: Any, alpha: Any) -> Value:
    """`right - alpha · left`."""
    return _sub(builder, call, right, left, alpha)


@handles("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def div(builder: Builder, call: Call, left: Any, right: Any, mode: str | None) -> Any:
    """The quotient, rounded down where the mode says so."""
    if mode == "trunc":
        return NotImplemented
    kind = "div" if mode is None else "floor_div"
    return builder.cast(combine(builder, kind, left, right, call.dtype), call.dtype)


@handles("aten.logical_not.default", "aten.bitwise_not.default")
def negation(builder: Builder, call: Call, value: Value) -> Value:
    """Of truth values `not`; of integers every bit turned."""
    if call.dtype == torch.bool:
        return builder.unary("not", builder.cast(value, torch.bool))
    return builder.binary("xor", value, builder.number(-1, value.dtype))


@handles("aten.gelu.default")
def gelu(builder: Builder, call: Call, value: Value, approximate: str) -> Value:
    """By the error function or by tanh."""
    return builder.unary("gelu_tanh" if approximate == "tanh" else "gelu", value)


@handles("aten.where.self", "aten.where.Scalar", "aten.where.ScalarSelf", "aten.where.ScalarOther")
def where(builder: Builder, call: Call, condition: Value, a: Any, b: Any) -> Value:
    """One of two elements."""
    a, b = (operand(builder, one, call.dtype) for one in (a, b))
    return builder.where(builder.cast(condition, torch.bool), a, b)


@handles("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(builder: Builder, call: Call, value: Value, mask: Value, filled: Any) -> Value:
    """The filled value where the mask is true."""
    return builder.where(mask, operand(builder, filled, call.dtype), value)


@handles("aten.clamp.default", "aten.clamp.Tensor", "aten.hardtanh.default")
def clamp(builder: Builder, call: Call, value: Value, least: Any, most: Any) -> Value:
    """Between two bounds."""
    found = builder.cast(value, call.dtype)
    if least is not None:
        found = combine(builder, "max", found, least, call.dtype)
    if most is not None:
        found = combine(builder, "min", found, most, call.dtype)
    return builder.cast(found, call.dtype)


@handles("aten.clamp_min.default", "aten.clamp_min.Tensor")
def clamp_min(builder: Builder, call: Call, value: Value, least: Any) -> Value:
    """Not below a bound."""
    return clamp(builder, call, value, least, None)


@handles("aten.clamp_max.default", "aten.clamp_max.Tensor")
def clamp_max(builder: Builder, call: Call, value: Value, most: Any) -> Value:
    """Not above a bound."""
    return clamp(builder, call, value, None, most)


@handles("aten.leaky_relu.default")
def leaky_relu(builder: Builder, call: Call, value: Value, slope: float) -> Value:
    """`x` above zero, `slope · x` below."""
    above = builder.binary("gt", value, builder.number(0, value.dtype))
    return builder.where(above, value, builder.cast(combine(builder, "mul", value, slope, value.dtype), value.dtype))


@handles("aten.isnan.default")
def isnan(builder: Builder, call: Call, value: Value) -> Value:
    """Only NaN differs from itself."""
    return builder.binary("ne", value, value)
