"""quack (`quack`, from PyPI `quack-kernels`), read from its sources at v0.3.0 to v0.6.4.

Run on an H200 at 0.6.5: every kernel against float64.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._shared.library import Library

_library = Library("quack", modules={"quack.rmsnorm": ("rmsnorm", "rmsnorm_fwd")})
detect = _library.find


def rms_norm(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm."""
    output: Tensor = _library.rmsnorm_fwd(input.view(-1, input.shape[-1]), weight, eps=eps)[0]
    return output.view(input.shape)


def rms_norm_train(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same with a gradient."""
    output: Tensor = _library.rmsnorm(input, weight, eps=eps)
    return output


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Adds the residual, then normalizes the sum before it is rounded."""
    rows, others = (tensor.view(-1, tensor.shape[-1]) for tensor in (input, residual))
    output, total, _ = _library.rmsnorm_fwd(rows, weight, residual=others, eps=eps)
    return output.view(input.shape), total.view(input.shape)


KERNELS: dict[str, Callable[..., Any]] = {
    "quack.rms_norm": rms_norm,
    "quack.rms_norm.train": rms_norm_train,
    "quack.add_rms_norm": fused_add_rms_norm,
}
