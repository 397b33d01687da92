"""FlashInfer as if it were installed: what the tests of its attention share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import described
from described import adapter

BACKEND, PREFILLS, VERSION = "flashinfer", "flashinfer_prefill", "0.6.18"
SINGLE, RAGGED = "flashinfer.single_prefill", "flashinfer.ragged_prefill"
DECODE, CORES = "flashinfer.paged.decode.gqa", "flashinfer.paged.decode.gqa.tensor_cores"
PREFILL = "flashinfer.paged.prefill.gqa"


@contextmanager
def both_registered() -> Iterator[None]:
    """Both backends, as if the library were installed."""
    with described.registered(BACKEND, VERSION), described.registered(PREFILLS, VERSION):
        yield


def kernel(name: str) -> Any:
    """A kernel's function."""
    return kernels()[name]


def kernels() -> dict[str, Any]:
    """What is loaded, and what is not."""
    return {**adapter(BACKEND).KERNELS, **adapter(PREFILLS).KERNELS}
