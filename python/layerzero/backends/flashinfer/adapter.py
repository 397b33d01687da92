"""FlashInfer (`flashinfer`), read from its sources at v0.6.0 to v0.6.18.

Run on an H200 at 0.7.2: rms_norm, layer_norm, rope, top-k, top-p, decoding from pages, latent attention from pages, as
tuning compares them, and the cascade, against float64. Its priority is below those of all others, so that it serves only
calls for which it was measured, and compared with the reference, on the machine at hand: there it never was the fastest.
Kernels for many queries are in `flashinfer_prefill`.

Its `silu_and_mul` takes both halves as one tensor. An operation is given two, and to join them takes longer than what is
gained, so it is not used.
"""

from collections.abc import Callable
from typing import Any

from .._shared.flashinfer import cascade, mla, norm, paged, rope, sampling
from .._shared.flashinfer.detection import detect

__all__ = ["KERNELS", "detect"]

KERNELS: dict[str, Callable[..., Any]] = {
    name: run for module in (paged, cascade, mla, norm, rope, sampling) for name, run in module.KERNELS.items()
}
