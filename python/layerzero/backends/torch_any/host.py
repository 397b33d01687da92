"""What computes in float64, on devices that have none: on copies in host memory, and the results go back."""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from .._shared.torch_functions.norm import needs_float64


@cache
def has_float64(torch_type: str) -> bool:
    """Whether devices of a type have float64: Apple's and some others do not."""
    try:
        torch.zeros(1, dtype=torch.float64, device=torch_type)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which computes in float64; of a norm, where its ``eps`` wants that."""
    names = list(inspect.signature(function).parameters)
    eps = names.index("eps") if "eps" in names else None

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        arguments = (*arguments, *(named[name] for name in names[len(arguments) :]))
        first: Tensor = arguments[0]
        is_narrow = eps is not None and not needs_float64(first, arguments[eps])
        if is_narrow or has_float64(first.device.type):
            return function(*arguments)
        given = function(*(one.cpu() if isinstance(one, Tensor) else one for one in arguments))
        return tuple(one.to(first.device) for one in given) if isinstance(given, tuple) else given.to(first.device)

    return call
