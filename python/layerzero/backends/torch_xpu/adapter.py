"""PyTorch's own kernels for Intel GPUs, and compositions of them.

Not run on hardware: the functions are those of the CUDA and CPU backends.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..torch import attention, feedforward, norm, position
from ..torch_cuda import sdpa


def detect() -> str:
    """The version of PyTorch; raises `RuntimeError` where it was built without XPU or finds no device."""
    if not hasattr(torch, "xpu") or not torch.xpu.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no XPU device")
    return str(torch.__version__)


KERNELS: dict[str, Callable[..., Any]] = {
    "torch.xpu.sdpa": sdpa.sdpa,
    "torch.xpu.sdpa.train": sdpa.sdpa,
    "torch.xpu.sdpa.masked": sdpa.masked,
    "torch.xpu.sdpa.masked.train": sdpa.masked,
    "torch.xpu.sdpa.math": attention.sdpa_math,
    "torch.xpu.sdpa.cross": sdpa.sdpa_cross,
    "torch.xpu.sdpa.cross.train": sdpa.sdpa_cross,
    "torch.xpu.sdpa.math.cross": attention.sdpa_math_cross,
    "torch.xpu.rope": position.rope,
    "torch.xpu.rms_norm": norm.rms_norm,
    "torch.xpu.rms_norm.composed": norm.rms_norm_composed,
    "torch.xpu.layer_norm": norm.layer_norm,
    "torch.xpu.layer_norm.mixed": norm.layer_norm_mixed,
    "torch.xpu.add_rms_norm": norm.fused_add_rms_norm_plain,
    "torch.xpu.add_rms_norm.composed": norm.fused_add_rms_norm,
    "torch.xpu.linear": feedforward.linear_kernel,
    "torch.xpu.mlp": feedforward.fused_mlp,
    "torch.xpu.silu_mul": feedforward.silu_mul_plain,
    "torch.xpu.gelu": feedforward.gelu_kernel,
}
