"""FlashAttention 4 over paged caches. Not loaded: not run on hardware, tested with a fake of the library's signatures."""

from ..flash_attn_4.adapter import PAGES as KERNELS
from ..flash_attn_4.adapter import detect

__all__ = ["KERNELS", "detect"]
