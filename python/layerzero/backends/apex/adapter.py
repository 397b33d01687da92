"""Apex (`apex`, with its CUDA extensions), read from its sources in 2025. Run on an H200 at 6424da3 (0.1).

It launches on the device that is the current one, whatever the tensors are on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._shared.library import Library

_library = Library(
    "apex",
    # Another package of that name has none of them.
    modules={
        "apex.normalization.fused_layer_norm": (
            *("FusedRMSNormFunction", "FusedRMSNormAffineFunction"),
            *("FusedLayerNormFunction", "FusedLayerNormAffineFunction"),
        ),
        "fused_layer_norm_cuda": (),
    },
)
detect = _library.find


def rms_norm(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm."""
    shape = input.shape[-1:]
    output: Tensor
    with torch.cuda.device_of(input):  # type: ignore[no-untyped-call]
        if weight is None:
            output = _library.FusedRMSNormFunction.apply(input, shape, eps, False)
        else:
            output = _library.FusedRMSNormAffineFunction.apply(input, weight, shape, eps, False)
    return output


def layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm, with both weight and bias or with neither."""
    shape = input.shape[-1:]
    output: Tensor
    with torch.cuda.device_of(input):  # type: ignore[no-untyped-call]
        if weight is None:
            output = _library.FusedLayerNormFunction.apply(input, shape, eps, False)
        else:
            output = _library.FusedLayerNormAffineFunction.apply(input, weight, bias, shape, eps, False)
    return output


KERNELS: dict[str, Callable[..., Any]] = {"apex.rms_norm": rms_norm, "apex.layer_norm": layer_norm}
