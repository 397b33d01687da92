"""What models are made of: products, norms, attention, convolutions, pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from layerzero.export import sizes
from layerzero.export.building import Builder, Value, broadcast
from layerzero.export.handlers.elementwise import combine
from layerzero.export.handlers.registry import Call, handles


def product(builder: Builder, a: Value, b: Value, shape: Sequence[sizes.Size]) -> Value:
    """A product as torch's `matmul` defines it: vectors are rows at the left and columns at the right."""
    left = builder.reshape(a, [1, *a.shape]) if a.rank == 1 else a
    right = builder.reshape(b, [*b.shape, 1]) if b.rank == 1 else b
    return builder.reshape(builder.matmul(left, right), shape)


@handles("aten.matmul.default", "aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.dot.default")
def matmul(builder: Builder, call: Call, a: Value, b: Value) -> Value:
    """A product of matrices."""
    return product(builder, a, b, call.shape)


@handles("aten.linear.default")
def linear(builder: Builder, call: Call, value: Value, weight: Value, bias: Value | None) -> Value:
    """`x·Wᵀ + b`."""
    turned = builder.permute(weight, list(reversed(range(weight.rank))))
    found = product(builder, value, turned, call.shape)
    return found if bias is None else builder.binary("add", found, bias)


@handles("aten.addmm.default", "aten.baddbmm.default")
def addmm(builder: Builder, call: Call, added: Value, a: Value, b: Value, beta: Any, alpha: Any) -> Value:
    """`beta · x + alpha · a·b`."""
    found = builder.matmul(a, b)
    if alpha != 1:
        found = combine(builder, "mul", found, alpha, call.dtype)
    if beta == 0:
        return builder.cast(found, call.dtype)
    if beta != 1:
        added = combine(builder, "mul", added, beta, call.dtype)
    return builder.cast(combine(builder, "add", found, added, call.dtype), call.dtype)


def normalized(
    builder: Builder, value: Value, axes: int, weight: Value | None, bias: Value | None, eps: float
) -> Value:
    """A layer norm over the last axes."""
    inputs = [value, weight, bias]
    while inputs[-1] is None:
        inputs.pop()
    return builder.emit("layer_norm", inputs, value.dtype, value.shape, eps=eps, axes=axes)


@handles("aten.layer_norm.default")
def layer_norm(
    builder: Builder, call: Call, value: Value, shape: Sequence[Any], weight: Any, bias: Any, eps: float, _: bool
) -> Value:
    """Layer normalization."""
    return normalized(builder, value, len(shape), weight, bias, eps)


@handles("aten.native_layer_norm.default")
def native_layer_norm(
    builder: Builder, call: Call, value: Value, shape: Sequence[Any], weight: Any, bias: Any, eps: float
) -> Any:
    """The same with mean and deviation, where nothing reads these."""
    if call.used - {0}:
        return NotImplemented
    return [normalized(builder, value, len(shape), weight, bias, eps), None, None]


@handles("aten.group_norm.default")
def group_norm(
    builder: Builder, call: Call, value: Value, groups: int, weight: Any, bias: Any, eps: float, _: bool
) -> Value:
    """Group normalization."""
    inputs = [value, weight, bias]
    while inputs[-1] is None:
        inputs.pop()
    return builder.emit("group_norm", inputs, value.dtype, value.shape, groups=groups, eps=eps)


@handles("aten.native_group_norm.default")
def native_group_norm(
    builder: Builder, call: Call, value: Value, weight: Any, bias: Any, n: Any, c: Any, hw: Any, groups: int, eps: float
) -> Any:
    """The same with mean and deviation, where nothing reads these."""
    if call.used - {0}:
        return NotImplemented
    return [group_norm(builder, call, value, groups, weight, bias, eps, False), None, None]


@handles(
    "aten.batch_norm.default",
    "aten._native_batch_norm_legit_no_training.default",
)
def batch_norm(builder: Builder, call: Call, value: Value, weight: Any, bias: Any, *rest: Any) -> Any:
    """Of a model that is not trained: `(x - mean) / sqrt(var + eps) · weight + bias` with the model's mean and variance."""
    mean, variance = rest[0], rest[1]
    several = isinstance(call.results, (tuple, list))
    if several:
        eps = rest[3]
    else:
        training, eps = rest[2], rest[4]
        if training or mean is None:
            return NotImplemented
    if several and call.used - {0}:
        return NotImplemented
    channels = [1, value.shape[1], *[1] * (value.rank - 2)]
    # As torch does, halves are computed in float32 and rounded once.
    dtype = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype

    def wide(one: Value) -> Value:
        return builder.reshape(builder.cast(one, dtype), channels)

    deviation = builder.unary("sqrt", combine(builder, "add", wide(variance), eps, dtype))
    found = builder.binary("div", builder.binary("sub", builder.cast(value, dtype), wide(mean)), deviation)
    if weight is not None:
        found = builder.binary("mul", found, wide(weight))
    if bias is not None:
        found = builder.binary("add", found, wide(bias))
    found = builder.cast(found, value.dtype)
    return [found, None, None] if several else found


@handles("aten.rms_norm.default")
def rms_norm(builder: Builder, call: Call, value: Value, shape: Sequence[Any], weight: Any, eps: float | None) -> Value:
    """`x / sqrt(mean(x²) + eps) · weight`, computed in float32 where x is a half."""
    dtype = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype
    eps = torch.finfo(value.dtype).eps if eps is None else eps
    wide = builder.cast(value, dtype)
    axes = list(range(value.rank - len(shape), value.rank))
    mean = builder.reduce("mean", builder.binary("mul", wide, wide), axes, True)
    found = builder.binary("mul", wide, builder.unary("rsqrt", combine(builder, "add", mean, eps, dtype)))
    if weight is not None:
        found = builder.binary("mul", found, builder.cast(weight, dtype))
    return builder.cast(found, call.dtype)


@handles("aten.scaled_dot_product_attention.default")
def attention(
    builder: Builder,
    call: Call,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    shared: bool,
) -> Any:
    """Attention; torch's causal one is aligned at the first key."""
    if dropout > 0 or not 2 < query.rank < 5 or key.rank != query.rank or value.rank != query.rank:
        return NotImplemented
    if query.rank == 3:
        # Heads without a batch.
        query, key, value = (builder.reshape(one, [1, *one.shape]) for one in (query, key, value))
    leading = [broadcast(*(one.shape[:1] for one in (query, key, value)))[0]]
    query, key, value = (builder.expand(one, [*leading, *one.shape[1:]]) for one in (query, key, value))
    if not shared and not sizes.same(key.shape[1], query.shape[1]):
        heads = broadcast(query.shape[1:2], key.shape[1:2])[0]
        query, key, value = (builder.expand(one, [one.shape[0], heads, *one.shape[2:]]) for one in (query, key, value))
    if mask is not None and mask.dtype != torch.bool:
        mask = builder.cast(mask, query.dtype)
    inputs = [query, key, value] if mask is None else [query, key, value, mask]
    top_left = causal and not sizes.same(query.shape[2], key.shape[2])
    shape = [*query.shape[:3], value.shape[3]]
    found = builder.emit("attention", inputs, query.dtype, shape, causal=causal, top_left=top_left, scale=scale)
    return builder.reshape(found, call.shape)


def _per_axis(given: Sequence[int], axes: int) -> list[int]:
    return list(given) * axes if len(given) == 1 else list(given)


@handles("aten.conv1d.default", "aten.conv2d.default")
def conv(
    builder: Builder,
    call: Call,
    value: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Any:
    """A convolution over one or two axes. What has no batch gets one of 1."""
    axes = weight.rank - 2
    if axes not in (1, 2):
        return NotImplemented
    shape = list(call.shape)
    if value.rank == weight.rank - 1:
        value, shape = builder.reshape(value, [1, *value.shape]), [1, *shape]
    attributes = {"stride": stride, "padding": padding, "dilation": dilation}
    attributes = {name: _per_axis(given, axes) for name, given in attributes.items()}
    inputs = [value, weight] if bias is None else [value, weight, bias]
    found = builder.emit("conv", inputs, value.dtype, shape, groups=groups, **attributes)
    return builder.reshape(found, call.shape)


@handles("aten.convolution.default")
def convolution(
    builder: Builder,
    call: Call,
    value: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    _: Sequence[int],
    groups: int,
) -> Any:
    """A convolution that is not transposed."""
    if transposed:
        return NotImplemented
    return conv(builder, call, value, weight, bias, stride, padding, dilation, groups)


def pooled(builder: Builder, call: Call, value: Value, axes: int, shape: Sequence[Any], **attributes: Any) -> Value:
    """A pool of a tensor with or without a batch."""
    shape = list(shape)
    result = tuple(shape)
    if value.rank == axes + 1:
        value, shape = builder.reshape(value, [1, *value.shape]), [1, *shape]
    return builder.reshape(builder.emit("pool", [value], value.dtype, shape, **attributes), result)


def _pool(kind: str, axes: int) -> Any:
    def handler(builder: Builder, call: Call, value: Value, kernel: Any, stride: Any, padding: Any, *rest: Any) -> Any:
        several = isinstance(call.results, (tuple, list))
        if several and call.used - {0}:
            return NotImplemented
        if kind == "max":
            dilation, ceil = rest
            if any(n != 1 for n in dilation):
                return NotImplemented
            attributes: dict[str, Any] = {"kind": "max", "ceil": ceil}
        else:
            ceil, counted, *divisor = rest
            if divisor and divisor[0] is not None:
                return NotImplemented
            attributes = {"kind": "avg", "ceil": ceil, "count_padding": counted}
        attributes["kernel"] = _per_axis(kernel, axes)
        attributes["stride"] = _per_axis(stride or kernel, axes)
        attributes["padding"] = _per_axis(padding, axes)
        shape = call.shape_of(0) if several else call.shape
        found = pooled(builder, call, value, axes, shape, **attributes)
        return [found, None] if several else found

    return handler


handles("aten.max_pool1d.default")(_pool("max", 1))
handles("aten.max_pool2d.default", "aten.max_pool2d_with_indices.default")(_pool("max", 2))
handles("aten.avg_pool1d.default")(_pool("avg", 1))
handles("aten.avg_pool2d.default")(_pool("avg", 2))


@handles("aten.adaptive_avg_pool1d.default", "aten._adaptive_avg_pool2d.default", "aten.adaptive_avg_pool2d.default")
def adaptive_avg_pool(builder: Builder, call: Call, value: Value, wanted: Sequence[Any]) -> Any:
    """To one element: a mean. To a divisor of the size: a pool of equal windows."""
    axes = len(wanted)
    last = value.shape[-axes:]
    if all(n == 1 for n in wanted):
        return builder.reduce("mean", value, list(range(value.rank - axes, value.rank)), True)
    if not all(isinstance(n, int) and n % int(k) == 0 for n, k in zip(last, wanted, strict=True)):
        return NotImplemented
    kernel = [int(n) // int(k) for n, k in zip(last, wanted, strict=True)]
    zeros = [0] * axes
    return pooled(builder, call, value, axes, call.shape, kind="avg", kernel=kernel, stride=kernel, padding=zeros)
