"""FlashAttention 2 for ROCm on Composable Kernel (`flash_attn`), read from its sources at v2.8.3.

Not run on hardware: tested against a function of the same signature.

A softcap is taken and then passed over in silence: it is not declared.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._shared.amd_processors import check_processor
from ..._shared.dense_attention import Call, dense
from ..._shared.rocm_flash_attn import find, library

_PROCESSORS = ("gfx90a", "gfx942", "gfx950")


def detect() -> str:
    """The version of flash-attn; raises where it is missing, calls Triton, or the processor is another."""
    version = find(triton=False)
    check_processor("flash-attn on Composable Kernel", _PROCESSORS)
    return version


def _attend(call: Call) -> Tensor:
    options = (0.0, call.scale, call.causal, call.window, 0.0, call.alibi_slopes)
    output: Tensor = library.flash_attn_func(*call.operands, *options)
    return output


KERNELS: dict[str, Callable[..., Any]] = {
    "flash_attn.ck": dense(_attend, "alibi_slopes", "causal", "window_left", "window_right"),
    "flash_attn.ck.cross": dense(_attend),
}
