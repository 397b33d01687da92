"""PyTorch's own kernels for AMD GPUs, and compositions of them. Its fused attention comes from AOTriton there, whose
causal bound is aligned top-left: calls it would get wrong are not declared.

Not run on hardware: the functions are those of the CUDA and CPU backends.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..._shared.amd_processors import check_processor
from ..._shared.torch_device_functions import sdpa
from ..._shared.torch_functions import attention, feedforward, norm, position


def detect() -> str:
    """The version of PyTorch; raises `RuntimeError` where it was built without ROCm or finds no device."""
    check_processor("torch", ())
    return str(torch.__version__)


KERNELS: dict[str, Callable[..., Any]] = {
    "torch.rocm.sdpa": sdpa.sdpa,
    "torch.rocm.sdpa.train": sdpa.sdpa,
    "torch.rocm.sdpa.masked": sdpa.masked,
    "torch.rocm.sdpa.masked.train": sdpa.masked,
    "torch.rocm.sdpa.flash": sdpa.flash,
    "torch.rocm.sdpa.efficient": sdpa.efficient,
    "torch.rocm.sdpa.math": attention.sdpa_math,
    "torch.rocm.sdpa.cross": sdpa.sdpa_cross,
    "torch.rocm.sdpa.cross.train": sdpa.sdpa_cross,
    "torch.rocm.sdpa.flash.cross": sdpa.flash_cross,
    "torch.rocm.sdpa.math.cross": attention.sdpa_math_cross,
    "torch.rocm.rope": position.rope,
    "torch.rocm.rms_norm": norm.rms_norm,
    "torch.rocm.rms_norm.composed": norm.rms_norm_composed,
    "torch.rocm.layer_norm": norm.layer_norm,
    "torch.rocm.layer_norm.mixed": norm.layer_norm_mixed,
    "torch.rocm.add_rms_norm": norm.fused_add_rms_norm_plain,
    "torch.rocm.add_rms_norm.composed": norm.fused_add_rms_norm,
    "torch.rocm.linear": feedforward.linear_kernel,
    "torch.rocm.mlp": feedforward.fused_mlp,
    "torch.rocm.silu_mul": feedforward.silu_mul_plain,
    "torch.rocm.gelu": feedforward.gelu_kernel,
    "torch.rocm.softmax": feedforward.softmax,
}
