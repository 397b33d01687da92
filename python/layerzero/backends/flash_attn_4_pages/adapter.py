"""FlashAttention 4 over paged caches.

Run on an H200 at 4.0.0b36 with bfloat16 and heads of 128, and float16 and heads of 64, windows and softcap among the calls.
Priorities are below those of every other kernel, so that it serves only calls for which it was measured.
"""

from ..flash_attn_4.adapter import PAGES as KERNELS
from ..flash_attn_4.adapter import detect

__all__ = ["KERNELS", "detect"]
