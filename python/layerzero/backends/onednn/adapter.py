"""oneDNN as PyTorch exposes it: `torch.ops.mkldnn`, and tensors in its own layout.

There is no layer norm: the one for tensors in oneDNN's layout refuses every call ("only support affine model").
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_linear = torch.ops.mkldnn._linear_pointwise.default
_linear_times = torch.ops.mkldnn._linear_pointwise.binary
_gelu = torch._C._nn.gelu
# oneDNN's name for the activation, and which form of it. Its relu makes zeros of NaNs.
_ACTIVATIONS = {"silu": ("swish", ""), "gelu": ("gelu", "none")}


def detect() -> str:
    """The version of PyTorch, whose build says whether oneDNN is in it."""
    if not torch._C._has_mkldnn:
        raise ImportError("this build of PyTorch has no oneDNN")
    return str(torch.__version__)


#: What oneDNN computes half-width floats with: bfloat16 from plain AVX-512 on, float16 only by AVX-512 FP16.
_FOR_BFLOAT16 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_FOR_FLOAT16 = ("avx512fp16",)


def lacks() -> list[str]:
    """The instruction sets oneDNN does not use here: the CPU has none of them, or `ONEDNN_MAX_CPU_ISA` forbids them."""
    bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    float16 = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return [*(() if bfloat16 else _FOR_BFLOAT16), *(() if float16 else _FOR_FLOAT16)]


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's inner product."""
    output: Tensor = _linear(input, weight, bias, "none", [], "")
    return output


def fused_mlp(
    input: Tensor, up_weight: Tensor, down_weight: Tensor, gate_weight: Tensor | None, activation: str
) -> Tensor:
    """Feed-forward block whose activation and gating happen inside oneDNN's inner products.

    Narrower floats would be rounded between them, which adds up to more than the tolerance.
    """
    name, form = _ACTIVATIONS[activation]
    if gate_weight is None:
        hidden = _linear(input, up_weight, None, name, [], form)
    else:
        gate = _linear(input, gate_weight, None, name, [], form)
        hidden = _linear_times(input, gate, up_weight, None, "mul")
    return linear(hidden, down_weight, None)


def gelu(input: Tensor) -> Tensor:
    """oneDNN's Gaussian error linear unit, the exact one."""
    return _gelu(input.to_mkldnn()).to_dense()


KERNELS: dict[str, Callable[..., Any]] = {
    "onednn.linear": linear,
    "onednn.linear.bf16": linear,
    "onednn.linear.f16": linear,
    "onednn.mlp": fused_mlp,
    "onednn.gelu": gelu,
    "onednn.gelu.bf16": gelu,
    "onednn.gelu.f16": gelu,
}
