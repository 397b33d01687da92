"""FlashInfer's attention of many queries: dense, ragged, over pages and by cascade, latent, and in blocks.

Run on an H200 at 0.7.2 with bfloat16, heads of 128, no window and no softcap; other kinds are compiled
from the same sources, and all were tested against functions and classes of the library's signatures. Priorities are below
those of every other kernel, so that these serve only calls for which they were measured, and compared with the reference,
on the machine at hand.

The library's kernel for Hopper takes sizes for those of the other layout when keys come heads first, and ends the process
(see `_shared/flashinfer/attention.py`, `single`). It is not asked for that layout.
"""

from collections.abc import Callable
from typing import Any

from .._shared.flashinfer import attention, cascade, mla, paged, sparse
from .._shared.flashinfer.detection import detect

__all__ = ["KERNELS", "detect"]

KERNELS: dict[str, Callable[..., Any]] = {
    name: run for module in (attention, paged, cascade, mla, sparse) for name, run in module.PREFILL.items()
}
