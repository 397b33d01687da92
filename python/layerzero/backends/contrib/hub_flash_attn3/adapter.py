"""kernels-community/flash-attn3 of the Hugging Face hub, read from its sources of August 2026: FlashAttention 3.

Not run on hardware: tested against a function of the same signature.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._shared.dense_attention import Call, dense
from ..._shared.hub.cache import Repository

_repository = Repository("kernels-community/flash-attn3", "flash_attn_func")
detect = _repository.find


def _call(*args: Any, **keywords: Any) -> Tensor:
    """The output out of what a build returns: that, or a tuple that begins with it."""
    result = _repository.flash_attn_func(*args, **keywords)
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _options(call: Call) -> dict[str, Any]:
    return {"softmax_scale": call.scale, "causal": call.causal, "window_size": call.window, "softcap": call.softcap}


def _whole(call: Call) -> tuple[Any, ...] | None:
    """The kernel's own call, where no argument has to be turned or copied."""
    return (_call, call.operands, _options(call)) if call.is_plain() else None


def _attend(call: Call) -> Tensor:
    return _call(*call.operands, **_options(call))


_OPTIONS = ("causal", "window_left", "window_right", "softcap")

KERNELS: dict[str, Callable[..., Any]] = {
    "hub.flash_attn3": dense(_attend, *_OPTIONS, whole=_whole),
    "hub.flash_attn3.cross": dense(_attend, "softcap", whole=_whole),
}
