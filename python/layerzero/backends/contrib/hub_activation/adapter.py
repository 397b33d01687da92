"""kernels-community/activation of the Hugging Face hub, read from its sources of August 2026.

Not run on hardware: tested against functions of the same signatures.

`silu_and_mul` takes gate and other half joined in one tensor, which the operation does not give, and is not used.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._shared.hub.cache import load

_REPOSITORY = "kernels-community/activation"
# Its functions by the approximation they use, once it is found.
_gelu: dict[str, Any] = {}


def detect() -> str:
    """The commit that is used, as a version; raises where it may not be, or is not in the cache."""
    version, module = load(_REPOSITORY, ("gelu", "gelu_tanh"))
    _gelu.update(none=module.gelu, tanh=module.gelu_tanh)
    return version


def gelu(input: Tensor, approximate: str) -> Tensor:
    """Gaussian error linear unit."""
    output = torch.empty_like(input)
    _gelu[approximate](output, input)
    return output


KERNELS: dict[str, Callable[..., Any]] = {"hub.activation.gelu": gelu}
