"""kernels-community/rmsnorm of the Hugging Face hub, read from its sources of August 2026: for Intel GPUs.

Not run on hardware: tested against a function of the same signature. Its CPU kernels are not used.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._shared.hub.cache import load

_REPOSITORY = "kernels-community/rmsnorm"
# Its function, once it is found.
_apply: Any = None


def detect() -> str:
    """The commit that is used, as a version; raises where it may not be, or is not in the cache."""
    global _apply
    version, module = load(_REPOSITORY, ("apply_rms_norm",))
    _apply = module.apply_rms_norm
    return version


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm."""
    output: Tensor = _apply(input, weight, eps)
    return output


KERNELS: dict[str, Callable[..., Any]] = {"hub.rmsnorm": rms_norm}
