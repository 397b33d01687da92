"""Matrix products, feed-forward blocks and activations."""

from typing import Any

import torch
from torch import Tensor

from layerzero.kernels import direct

linear = torch._C._nn.linear
gelu = torch._C._nn.gelu
silu = torch._C._nn.silu


def _linear_call(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    return linear, (input, weight, bias)


@direct(_linear_call)
def linear_kernel(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's own linear layer."""
    return linear(input, weight, bias)


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


def _gelu_call(input: Tensor, approximate: str) -> tuple[Any, ...]:
    return gelu, (input,), {"approximate": approximate}


@direct(_gelu_call)
def gelu_kernel(input: Tensor, approximate: str) -> Tensor:
    """torch's own Gaussian error linear unit."""
    return gelu(input, approximate=approximate)
