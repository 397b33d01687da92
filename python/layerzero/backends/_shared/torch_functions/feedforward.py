"""Matrix products, feed-forward blocks and activations."""

import math
from typing import Any

import torch
from torch import Tensor

from layerzero.kernels import direct

from ..blocks import HALF, blocks, rows_of
from ..packed_weights import dequantized, unpacked

linear = torch._C._nn.linear
gelu = torch._C._nn.gelu
silu = torch._C._nn.silu

# How many rows of half-width weights are widened at once.
_WIDENED = 512


def _rounds_before_bias(input: Tensor, bias: Tensor | None) -> bool:
    """Whether torch would round the product to half precision and add the bias to that: it does unless the rows of the
    input form a matrix without a copy."""
    if bias is None or input.dim() == 2 or input.dtype not in HALF:
        return False
    return not input.is_contiguous()


def _linear_call(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...] | None:
    return None if _rounds_before_bias(input, bias) else (linear, (input, weight, bias))


@direct(_linear_call)
def linear_kernel(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's own linear layer; the sum with the bias is rounded once."""
    if _rounds_before_bias(input, bias):
        # torch would copy the rows too.
        return linear(rows_of(input), weight, bias).view(*input.shape[:-1], weight.shape[0])
    return linear(input, weight, bias)


def linear_packed(
    input: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, interleave: int, activation: str
) -> Tensor:
    """torch's own linear layer on the weight, which is unpacked for every call: a copy of it. The blocks show by their shape
    how many features are side by side. Half-width floats are computed in float32 where an activation follows, so that they are rounded once."""
    plain = unpacked(weight, out_features, input.shape[-1])
    if activation == "none":
        return linear_kernel(input, plain, bias)
    if input.dtype not in HALF:
        return _activated(linear(input, plain, bias), activation)
    wide = linear(input.float(), plain.float(), None if bias is None else bias.float())
    return _activated(wide, activation).to(input.dtype)


def linear_quantized(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor,
    out_features: int,
    interleave: int,
    group_size: int,
    activation: str,
) -> Tensor:
    """torch's own linear layer on the weight, which becomes float32 for every call. Half-width floats are computed in float32, so
    that neither the weight nor the product is rounded."""
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    plain = dequantized(weight, scales, out_features, input.shape[-1], group_size, dtype)
    out = linear(input.to(dtype), plain, None if bias is None else bias.to(dtype))
    return (out if activation == "none" else _activated(out, activation)).to(input.dtype)


def _activated(x: Tensor, activation: str) -> Tensor:
    return gelu(x, approximate="tanh") if activation == "gelu_tanh" else _activate(x, activation)


def fused_mlp(
    input: Tensor, up_weight: Tensor, down_weight: Tensor, gate_weight: Tensor | None, activation: str
) -> Tensor:
    """Up-projection, activation, down-projection, with torch's own matrix products."""
    up = linear(input, up_weight)
    if gate_weight is None:
        return linear(_activate(up, activation), down_weight)
    return linear(_times(_activate(linear(input, gate_weight), activation), up), down_weight)


def fused_mlp_wide(
    input: Tensor, up_weight: Tensor, down_weight: Tensor, gate_weight: Tensor | None, activation: str
) -> Tensor:
    """The same of half-width floats in float32, rounded once: their own products round after every step, which adds
    up to more than the tolerance."""
    gate_weight = None if gate_weight is None else gate_weight.float()
    output = fused_mlp(input.float(), up_weight.float(), down_weight.float(), gate_weight, activation)
    return output.to(input.dtype)


def fused_mlp_blocked(
    input: Tensor, up_weight: Tensor, down_weight: Tensor, gate_weight: Tensor | None, activation: str
) -> Tensor:
    """The same with the weights widened piece by piece, since a copy of them all costs more than the products."""
    x = rows_of(input).float()
    output = x.new_zeros(x.shape)
    for start in range(0, up_weight.shape[0], _WIDENED):
        piece = slice(start, start + _WIDENED)
        hidden = linear(x, up_weight[piece].float())
        if gate_weight is None:
            hidden = _activate(hidden, activation)
        else:
            hidden = _activate(linear(x, gate_weight[piece].float()), activation).mul_(hidden)
        output.addmm_(hidden, down_weight[:, piece].float().t())
    return output.to(input.dtype).reshape(input.shape)


def fused_mlp_two_parts(
    input: Tensor, up_weight: Tensor, down_weight: Tensor, gate_weight: Tensor | None, activation: str
) -> Tensor:
    """The same with products of half-width floats, which round only what they give: what rounding took is a second
    product, and both parts together are as good as float32."""
    x = rows_of(input)
    hidden = _product(x, up_weight)
    if gate_weight is None:
        hidden = _activate(hidden, activation)
    else:
        hidden = _activate(_product(x, gate_weight), activation).mul_(hidden)
    large = hidden.to(x.dtype)
    small = hidden.sub_(large).nan_to_num_(0.0, 0.0, 0.0).to(x.dtype)
    return torch.addmm(linear(small, down_weight), large, down_weight.t()).reshape(input.shape)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` of half-width floats in float32."""
    large = linear(x, weight)
    small = torch.addmm(large, x, weight.t(), beta=-1)
    # Where the product is not finite, nothing is left to add.
    return large.float().add_(small.nan_to_num_(0.0, 0.0, 0.0))


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return silu(x)
    return gelu(x) if activation == "gelu" else torch.relu(x)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """The product, in the memory of `x` unless a gradient needs it."""
    return x * y if x.requires_grad or y.requires_grad else x.mul_(y)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu of the gate times the other half."""
    return _times(silu(gate), up)


def silu_mul_plain(gate: Tensor, up: Tensor) -> Tensor:
    """The same with a temporary."""
    return silu(gate) * up


def _gelu_call(input: Tensor, approximate: str) -> tuple[Any, ...]:
    return gelu, (input,), {"approximate": approximate}


@direct(_gelu_call)
def gelu_kernel(input: Tensor, approximate: str) -> Tensor:
    """torch's own Gaussian error linear unit."""
    return gelu(input, approximate=approximate)


def _softmax_call(input: Tensor) -> tuple[Any, ...]:
    return torch.softmax, (input, -1), {}


@direct(_softmax_call)
def softmax(input: Tensor) -> Tensor:
    """torch's own softmax, over the last dimension."""
    return torch.softmax(input, -1)


def gelu_sigmoid(input: Tensor, approximate: str) -> Tensor:
    """The form by tanh, as a sigmoid, which is cheaper: (1 + tanh(y)) / 2 = sigmoid(2 y)."""
    if approximate != "tanh":
        return gelu(input)
    work = torch.float64 if input.dtype == torch.float64 else torch.float32
    slope = 2.0 * math.sqrt(2.0 / math.pi)
    constant = torch.full((), slope, dtype=work, device=input.device)
    output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    for given, result in blocks(input.reshape(-1), output.view(-1), whole=0):
        x = given.to(work)
        out = result if input.dtype == work else torch.empty_like(x)
        torch.addcmul(constant, x, x, value=0.044715 * slope, out=out).mul_(x).sigmoid_().mul_(x)
        if out is not result:
            result.copy_(out)
    return output
