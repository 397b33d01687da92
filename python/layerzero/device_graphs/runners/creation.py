"""Tensors out of nothing. They are made on the device of the program."""

from __future__ import annotations

import math

import torch

from layerzero.device_graphs.nodes import Node, Work
from layerzero.device_graphs.runners.registry import runs


@runs("iota")
def iota(node: Node) -> Work:
    """Numbers at equal distances."""
    start, step, count, dtype = int(node.start), node.step, int(node.len), node.dtype

    def run(device: torch.device) -> torch.Tensor:
        if step == 0:
            return torch.full((count,), start, dtype=dtype, device=device)
        return torch.arange(start, start + step * count, step, device=device).to(dtype)

    return Work(run, "torch.arange")


@runs("full")
def full(node: Node) -> Work:
    """One number everywhere."""
    value = node.value
    if isinstance(value, str):
        value = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[value]
    shape, dtype = node.shape, node.dtype
    if dtype == torch.bool:
        value = bool(value)
    elif not dtype.is_floating_point and not torch.iinfo(dtype).min <= int(value) <= torch.iinfo(dtype).max:
        # As a conversion wraps, which torch.full refuses.
        return Work(lambda device: torch.full(shape, int(value), device=device).to(dtype), "torch.full")
    return Work(lambda device: torch.full(shape, value, dtype=dtype, device=device), "torch.full")
