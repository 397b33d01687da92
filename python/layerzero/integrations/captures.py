"""Steps that a server captures in CUDA graphs: the calls of each kind of step are prepared before its capture."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import layerzero as lz

__all__ = ["prepared"]


def prepared(kind: tuple[Any, ...], ready: set[tuple[Any, ...]]) -> AbstractContextManager[Any]:
    """``lz.capture`` around the first run of a kind of step. Servers run a step before they capture it.

    Args:
        kind: what the kernels of the step depend on.
        ready: the kinds that were run before; this one is added.
    """
    if kind in ready or torch.cuda.is_current_stream_capturing():
        return nullcontext()
    ready.add(kind)
    return lz.capture(stream=torch.cuda.current_stream())
