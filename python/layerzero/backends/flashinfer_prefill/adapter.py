"""FlashInfer's attention of many queries: dense, ragged, over pages, latent, and in blocks.

Not loaded. On an H200 with 0.7.2 the process ended with SIGFPE when `flashinfer.single_prefill` was first called, after its
module for Hopper had been compiled (bfloat16, heads of 128); whether the library or the call is at fault was not found out.
The others were not run on hardware. All were tested against functions and classes of the library's signatures.
"""

from collections.abc import Callable
from typing import Any

from ..flashinfer import attention, mla, paged, sparse
from ..flashinfer.adapter import detect

__all__ = ["KERNELS", "detect"]

KERNELS: dict[str, Callable[..., Any]] = {
    name: run for module in (attention, paged, mla, sparse) for name, run in module.PREFILL.items()
}
