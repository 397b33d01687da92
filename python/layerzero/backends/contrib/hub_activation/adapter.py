"""kernels-community/activation of the Hugging Face hub, read from its sources of August 2026.

Not run on hardware: tested against functions of the same signatures.

`silu_and_mul` takes gate and other half joined in one tensor, which the operation does not give, and is not used.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._shared.hub.cache import Repository

_repository = Repository("kernels-community/activation", "gelu", "gelu_tanh")
detect = _repository.find


def gelu(input: Tensor, approximate: str) -> Tensor:
    """Gaussian error linear unit."""
    output = torch.empty_like(input)
    run = _repository.gelu_tanh if approximate == "tanh" else _repository.gelu
    run(output, input)
    return output


KERNELS: dict[str, Callable[..., Any]] = {"hub.activation.gelu": gelu}
