"""FlashAttention 2 for ROCm on Composable Kernel (`flash_attn`), read from its sources at v2.8.3.

Not run on hardware: tested against a function of the same signature.

A softcap is taken and then passed over in silence: it is not declared.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._shared.amd_processors import check_processor
from ..._shared.operands import bshd, positive
from ..._shared.rocm_flash_attn import find, library

_PROCESSORS = ("gfx90a", "gfx942", "gfx950")


def detect() -> str:
    """The version of flash-attn; raises where it is missing, calls Triton, or the processor is another."""
    version = find(triton=False)
    check_processor("flash-attn on Composable Kernel", _PROCESSORS)
    return version


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    layout: str,
) -> Tensor:
    """Dense attention, aligned bottom-right."""
    query, scale = positive(query, scale)
    window = (window_left, window_right)
    q, k, v = bshd(query, layout), bshd(key, layout), bshd(value, layout)
    output: Tensor = library.flash_attn_func(q, k, v, 0.0, scale, causal, window, 0.0, alibi_slopes)
    return output.transpose(1, 2) if layout == "BHSD" else output


def cross(query: Tensor, key: Tensor, value: Tensor, scale: float | None, layout: str) -> Tensor:
    """Attention to another sequence."""
    return attention(query, key, value, None, False, scale, -1, -1, layout)


KERNELS: dict[str, Callable[..., Any]] = {
    "flash_attn.ck": attention,
    "flash_attn.ck.cross": cross,
}
