"""FlashAttention 4 (`flash_attn.cute`), read from its sources at 4.0.0b10 to 4.0.0b27.

Run on an H200 at 4.0.0b36: dense attention, gradients and capture against float64. Pages are in
`flash_attn_4_pages`. A call through the library's Python takes the host 0.2 to 0.5 ms there;
`_shared/flash_attn_4/launching.py` goes past it.

Before 4.0.0b9 softcap gave wrong scores, and before 4.0.0b26 a kernel that was compiled for an expanded operand was used
for others too; hence what is required of versions, and the copies of expanded operands.
"""

from collections.abc import Callable
from typing import Any

from .._shared.flash_attn_4.attention import attention, cross, library, trained, trained_cross, unpacked

detect = library.find

KERNELS: dict[str, Callable[..., Any]] = {
    "flash_attn.v4": attention,
    "flash_attn.v4.unpacked": unpacked,
    "flash_attn.v4.train": trained,
    "flash_attn.v4.cross": cross,
    "flash_attn.v4.cross.train": trained_cross,
}
