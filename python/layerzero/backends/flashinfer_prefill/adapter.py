"""FlashInfer's attention of many queries: dense, ragged, over pages, latent, and in blocks.

Not loaded: not run on hardware as it is now. On an H200 with 0.7.2 the process ended with SIGFPE when
`flashinfer.single_prefill` was first called, heads first: the library's kernel for Hopper takes sizes for those of the other
layout (see `flashinfer.attention.single`), and is not asked for that layout any more. The others have never run. All were
tested against functions and classes of the library's signatures.
"""

from collections.abc import Callable
from typing import Any

from ..flashinfer import attention, mla, paged, sparse
from ..flashinfer.adapter import detect

__all__ = ["KERNELS", "detect"]

KERNELS: dict[str, Callable[..., Any]] = {
    name: run for module in (attention, paged, mla, sparse) for name, run in module.PREFILL.items()
}
