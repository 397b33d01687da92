"""FlashAttention 2 for ROCm on Triton (`flash_attn`), read from its sources at v2.8.3.

Not run on hardware: tested against a function of the same signature.

Windows and a softcap are taken and then passed over in silence: they are not declared.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._shared.amd_processors import check_processor
from ..._shared.dense_attention import Call, dense
from ..._shared.rocm_flash_attn import find, library


def detect() -> str:
    """The version of flash-attn; raises where it is missing, calls Composable Kernel, or there is no device."""
    version = find(triton=True)
    check_processor("flash-attn on Triton", ())
    return version


def _attend(call: Call) -> Tensor:
    options = (0.0, call.scale, call.causal, call.window, 0.0, call.alibi_slopes)
    output: Tensor = library.flash_attn_func(*call.operands, *options)
    return output


KERNELS: dict[str, Callable[..., Any]] = {
    "flash_attn.triton": dense(_attend, "alibi_slopes", "causal"),
    "flash_attn.triton.cross": dense(_attend),
}
