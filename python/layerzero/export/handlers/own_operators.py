"""LayerZero's own operators, `torch.ops.layerzero.*`, in primitives. Those without a handler stay calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layerzero import layouts
from layerzero.export.building import Builder, Value
from layerzero.export.handlers import layers
from layerzero.export.handlers.registry import Call, Some, handles


def own(*names: str) -> Callable[[Some], Some]:
    """Registers the handler of operators of our own, which gets the arguments by name. Those it does not know must not be given."""

    def register(handler: Some) -> Some:
        def by_name(builder: Builder, call: Call, *given: Any) -> Any:
            return handler(builder, call, **dict(zip(call.names, given, strict=True)))

        handles(*(f"layerzero.{name}.default" for name in names))(by_name)
        return handler

    return register


@own("rms_norm")
def rms_norm(builder: Builder, call: Call, *, input: Value, weight: Value | None, eps: float, **_: Any) -> Value:
    """Over the last axis."""
    return layers.rms_norm(builder, call, input, input.shape[-1:], weight, eps)


@own("layer_norm")
def layer_norm(
    builder: Builder,
    call: Call,
    *,
    input: Value,
    normalized_shape: Any,
    weight: Value | None,
    bias: Value | None,
    eps: float,
    **_: Any,
) -> Value:
    """Over the last axis, or those of a shape."""
    axes = 1 if normalized_shape is None else len(normalized_shape)
    return layers.normalized(builder, input, axes, weight, bias, eps)


@own("linear")
def linear(builder: Builder, call: Call, *, input: Value, weight: Value, bias: Value | None = None, **_: Any) -> Value:
    """`x·Wᵀ + b`."""
    return layers.linear(builder, call, input, weight, bias)


@own("embedding")
def embedding(builder: Builder, call: Call, *, indices: Value, weight: Value, **_: Any) -> Value:
    """Rows of a table."""
    return builder.emit("embedding", [weight, indices], weight.dtype, call.shape)


@own("gelu")
def gelu(builder: Builder, call: Call, *, input: Value, approximate: str = "none", **_: Any) -> Value:
    """By the error function or by tanh."""
    return builder.unary("gelu_tanh" if approximate == "tanh" else "gelu", input)


@own("silu_mul")
def silu_mul(builder: Builder, call: Call, *, gate: Value, up: Value, **_: Any) -> Value:
    """`silu(gate) · up`."""
    return builder.binary("mul", builder.unary("silu", gate), up)


@own("softmax")
def softmax(builder: Builder, call: Call, *, input: Value, **_: Any) -> Value:
    """Over the last axis."""
    return builder.emit("softmax", [input], input.dtype, input.shape, axis=input.rank - 1)


@own("attention", "cross_attention")
def attention(
    builder: Builder,
    call: Call,
    *,
    query: Value,
    key: Value,
    value: Value,
    causal: bool = False,
    scale: float | None = None,
    attn_mask: Value | None = None,
    window: Any = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    layout: str | None = None,
    default_layout: str | None = None,
    **_: Any,
) -> Any:
    """Dense attention in one of its two layouts. A causal one is aligned at the last key."""
    left, right = (-1, -1) if window is None else window
    if dropout_p > 0 or alibi_slopes is not None or sinks is not None or right > 0 or (right == 0 and not causal):
        return NotImplemented
    lies = (layout or default_layout or layouts.here("default_layout")).upper()
    if lies not in ("BSHD", "BHSD"):
        return NotImplemented
    swapped = lies == "BSHD"
    order = [0, 2, 1, 3]
    if swapped:
        query, key, value = (builder.permute(one, order) for one in (query, key, value))
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = builder.cast(attn_mask, query.dtype)
    inputs = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    attributes: dict[str, Any] = {"causal": causal, "scale": scale}
    if left >= 0:
        attributes["window"] = left
    if softcap > 0:
        attributes["softcap"] = softcap
    found = builder.emit("attention", inputs, query.dtype, [*query.shape[:3], value.shape[3]], **attributes)
    return builder.permute(found, order) if swapped else found


@handles("layerzero_graph.cached_attention.default")
def cached_attention(
    builder: Builder,
    call: Call,
    query: Value,
    key: Value,
    value: Value,
    position: Value,
    firsts: Value | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Value:
    """Attention over the part of a cache that is written (`generating/cached_attention.py`)."""
    attributes = {"scale": scale, "window": window, "softcap": softcap}
    inputs = [query, key, value, position, firsts]
    return builder.emit("cached_attention", inputs, query.dtype, call.shape, **attributes)
