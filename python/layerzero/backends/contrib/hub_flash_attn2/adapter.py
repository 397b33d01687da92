"""kernels-community/flash-attn2 of the Hugging Face hub, read from its sources of August 2026: FlashAttention 2.8.

Not run on hardware: tested against a function of the same signature.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.kernels import direct

from ..._shared.hub.cache import load
from ..._shared.operands import bshd, is_plain, positive

_REPOSITORY = "kernels-community/flash-attn2"
# Its function, once it is found.
_dense: Any = None


def detect() -> str:
    """The commit that is used, as a version; raises where it may not be, or is not in the cache."""
    global _dense
    version, module = load(_REPOSITORY, ("flash_attn_func",))
    _dense = module.flash_attn_func
    return version


def _whole_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None,
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
    return _dense, (query, key, value, 0.0, scale, causal, (window_left, window_right), softcap, alibi_slopes)


@direct(_whole_call)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None,
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
    window = (window_left, window_right)
    output: Tensor = _dense(q, k, v, 0.0, scale, causal, window, softcap, alibi_slopes)
    return output.transpose(1, 2) if layout == "BHSD" else output


def cross(query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float, layout: str) -> Tensor:
    """Attention to another sequence."""
    return attention(query, key, value, None, False, scale, -1, -1, softcap, layout)


KERNELS: dict[str, Callable[..., Any]] = {
    "hub.flash_attn2": attention,
    "hub.flash_attn2.cross": cross,
}
