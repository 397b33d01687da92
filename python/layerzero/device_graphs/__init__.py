"""Compiled models on a CUDA device: the same graph and passes as on the CPU, run by the device's kernels in a CUDA graph.

| files | what is there |
|---|---|
| `session.py` | `DeviceSession`: a graph that was optimised, with a program for each size of its inputs |
| `program.py` | `Program`: the steps of a graph for exact sizes; which values live how long; what is written in place |
| `captured.py` | `CapturedProgram`: a program as CUDA graphs, which are replayed, and what cannot be captured between them |
| `nodes.py` | `Node`: an operation for exact sizes; `Step`: what runs one or several nodes |
| `fusions.py` | nodes that run as one step |
| `cache_pages.py` | caches of keys and values as pages |
| `appends.py` | keys and values of new tokens, written to a cache by one kernel |
| `joined_weights.py` | weights of layers that read the same value, as one block |
| `runners/` | how each operation runs: a function, and a line `@runs(...)` before it |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def serves(device: torch.device) -> bool:
    """Whether graphs on a device are run by its own kernels."""
    return device.type == "cuda"
