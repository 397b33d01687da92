"""kernels-community/flash-attn3 of the Hugging Face hub, read from its sources of August 2026: FlashAttention 3.

Not run on hardware: tested against a function of the same signature.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.kernels import direct

from ..._shared.hub.cache import load
from ..._shared.operands import bshd, is_plain, positive

_REPOSITORY = "kernels-community/flash-attn3"
# Its function, once it is found.
_dense: Any = None


def detect() -> str:
    """The commit that is used, as a version; raises where it may not be, or is not in the cache."""
    global _dense
    version, module = load(_REPOSITORY, ("flash_attn_func",))
    _dense = module.flash_attn_func
    return version


def _call(*args: Any, **keywords: Any) -> Tensor:
    """The output out of what a build returns: that, or a tuple that begins with it."""
    result = _dense(*args, **keywords)
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _options(causal: bool, scale: float | None, window_left: int, window_right: int, softcap: float) -> dict[str, Any]:
    window = (window_left, window_right)
    return {"softmax_scale": scale, "causal": causal, "window_size": window, "softcap": softcap}


def _whole_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    layout: str,
) -> tuple[Any, ...] | None:
    """The kernel's own call, where no argument has to be turned or copied."""
    if not is_plain(layout, scale, query, key, value):
        return None
    return _call, (query, key, value), _options(causal, scale, window_left, window_right, softcap)


@direct(_whole_call)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    layout: str,
) -> Tensor:
    """Dense attention, aligned bottom-right."""
    query, scale = positive(query, scale)
    q, k, v = bshd(query, layout), bshd(key, layout), bshd(value, layout)
    output = _call(q, k, v, **_options(causal, scale, window_left, window_right, softcap))
    return output.transpose(1, 2) if layout == "BHSD" else output


def cross(query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float, layout: str) -> Tensor:
    """Attention to another sequence."""
    return attention(query, key, value, False, scale, -1, -1, softcap, layout)


KERNELS: dict[str, Callable[..., Any]] = {
    "hub.flash_attn3": attention,
    "hub.flash_attn3.cross": cross,
}
