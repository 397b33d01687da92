"""quack (`quack`, from PyPI `quack-kernels`), read from its sources at v0.3.0 to v0.6.4.

Run on an H200 at 0.6.5: every kernel against float64.
"""

from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from torch import Tensor

_MISFITS = (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError)

# The library's module, once it is found.
_norms: Any = None


def detect() -> str:
    """The version of quack; raises `ImportError` where it or one of its functions is missing."""
    global _norms
    try:
        version = metadata.version("quack-kernels")
        module = import_module("quack.rmsnorm")
        for name in ("rmsnorm", "rmsnorm_fwd"):
            getattr(module, name)
    except metadata.PackageNotFoundError as error:
        raise ImportError("quack-kernels is not installed") from error
    except _MISFITS as error:
        raise ImportError(f"quack cannot be used: {' '.join(str(error).split())}") from error
    _norms = module
    return version


def rms_norm(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm."""
    output: Tensor = _norms.rmsnorm_fwd(input.view(-1, input.shape[-1]), weight, eps=eps)[0]
    return output.view(input.shape)


def rms_norm_train(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same with a gradient."""
    output: Tensor = _norms.rmsnorm(input, weight, eps=eps)
    return output


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Adds the residual, then normalizes the sum before it is rounded."""
    rows, others = (tensor.view(-1, tensor.shape[-1]) for tensor in (input, residual))
    output, total, _ = _norms.rmsnorm_fwd(rows, weight, residual=others, eps=eps)
    return output.view(input.shape), total.view(input.shape)


KERNELS: dict[str, Callable[..., Any]] = {
    "quack.rms_norm": rms_norm,
    "quack.rms_norm.train": rms_norm_train,
    "quack.add_rms_norm": fused_add_rms_norm,
}
