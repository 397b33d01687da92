"""kernels-community/rmsnorm of the Hugging Face hub, read from its sources of August 2026: for Intel GPUs.

Not run on hardware: tested against a function of the same signature. Its CPU kernels are not used.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._shared.hub.cache import Repository

_repository = Repository("kernels-community/rmsnorm", "apply_rms_norm")
detect = _repository.find


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm."""
    output: Tensor = _repository.apply_rms_norm(input, weight, eps)
    return output


KERNELS: dict[str, Callable[..., Any]] = {"hub.rmsnorm": rms_norm}
