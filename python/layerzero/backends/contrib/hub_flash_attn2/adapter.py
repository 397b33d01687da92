"""kernels-community/flash-attn2 of the Hugging Face hub, read from its sources of August 2026: FlashAttention 2.8.

Not run on hardware: tested against a function of the same signature.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._shared.dense_attention import Call, dense
from ..._shared.hub.cache import Repository

_repository = Repository("kernels-community/flash-attn2", "flash_attn_func")
detect = _repository.find


def _arguments(call: Call) -> tuple[Any, ...]:
    return (*call.operands, 0.0, call.scale, call.causal, call.window, call.softcap, call.alibi_slopes)


def _whole(call: Call) -> tuple[Any, ...] | None:
    """The kernel's own call, where no argument has to be turned or copied."""
    return (_repository.flash_attn_func, _arguments(call)) if call.is_plain() else None


def _attend(call: Call) -> Tensor:
    output: Tensor = _repository.flash_attn_func(*_arguments(call))
    return output


_OPTIONS = ("alibi_slopes", "causal", "window_left", "window_right", "softcap")

KERNELS: dict[str, Callable[..., Any]] = {
    "hub.flash_attn2": dense(_attend, *_OPTIONS, whole=_whole),
    "hub.flash_attn2.cross": dense(_attend, "softcap", whole=_whole),
}
