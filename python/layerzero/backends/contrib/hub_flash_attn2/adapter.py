"""kernels-community/flash-attn2 of the Hugging Face hub, read from its sources of August 2026: FlashAttention 2.8.

Not run on hardware: tested against a function of the same signature.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._shared.dense_attention import Call, dense
from ..._shared.hub.cache import load

_REPOSITORY = "kernels-community/flash-attn2"
# Its function, once it is found.
_dense: Any = None


def detect() -> str:
    """The commit that is used, as a version; raises where it may not be, or is not in the cache."""
    global _dense
    version, module = load(_REPOSITORY, ("flash_attn_func",))
    _dense = module.flash_attn_func
    return version


def _arguments(call: Call) -> tuple[Any, ...]:
    return (*call.operands, 0.0, call.scale, call.causal, call.window, call.softcap, call.alibi_slopes)


def _whole(call: Call) -> tuple[Any, ...] | None:
    """The kernel's own call, where no argument has to be turned or copied."""
    return (_dense, _arguments(call)) if call.is_plain() else None


def _attend(call: Call) -> Tensor:
    output: Tensor = _dense(*_arguments(call))
    return output


_OPTIONS = ("alibi_slopes", "causal", "window_left", "window_right", "softcap")

KERNELS: dict[str, Callable[..., Any]] = {
    "hub.flash_attn2": dense(_attend, *_OPTIONS, whole=_whole),
    "hub.flash_attn2.cross": dense(_attend, "softcap"),
}
