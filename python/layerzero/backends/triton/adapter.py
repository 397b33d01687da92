"""Kernels of our own in Triton (`triton`), written for version 3.6.

Run on an H200 with Triton 3.6.0: every kernel against float64, and captured in graphs. Tests on other machines use
Triton's interpreter.
"""

from collections.abc import Callable
from typing import Any

import triton

from . import activation, caching, check, norm, position
from .decoding import decode, mla, paged
from .quantization import dequantize, quantize
from .sampling import sampling

_MODULES: tuple[Any, ...] = (norm, activation, position, caching, sampling, decode, paged, mla, quantize, dequantize)


def detect() -> str:
    """The version of Triton; raises `RuntimeError` where there is no device it compiles for."""
    check()
    return str(triton.__version__)


KERNELS: dict[str, Callable[..., Any]] = {name: run for module in _MODULES for name, run in module.KERNELS.items()}
