"""FlashAttention 4 over paged caches, within packed sequences, with logarithms and with sinks.

Run on an H200 at 4.0.0b36 with bfloat16 and heads of 128, and float16 and heads of 64, windows and softcap among the calls.
Priorities are below those of every other kernel, so that it serves only calls for which it was measured.
"""

from collections.abc import Callable
from typing import Any

from .._shared.flash_attn_4.attention import (
    attention_lse,
    library,
    packed,
    packed_lse,
    paged_prefill,
    sinks,
)

detect = library.find

KERNELS: dict[str, Callable[..., Any]] = {
    "flash_attn.v4.sinks": sinks,
    "flash_attn.v4.lse": attention_lse,
    "flash_attn.v4.lse.varlen": packed_lse,
    "flash_attn.v4.varlen": packed,
    "flash_attn.v4.paged.prefill": paged_prefill,
    "flash_attn.v4.paged.prefill.gqa": paged_prefill,
}
