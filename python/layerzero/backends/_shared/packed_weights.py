"""Weights in the blocks of :func:`layerzero.pack`, read by code that knows no blocks."""

import torch
from torch import Tensor


def unpacked(blocks: Tensor, out_features: int, in_features: int) -> Tensor:
    """The weight behind blocks of 32 outputs: ``[blocks, groups of inputs, 32, inputs of a group]``. It may share memory."""
    return blocks.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:out_features, :in_features]


def dequantized(
    blocks: Tensor,
    scales: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight behind blocks of integers and their scales: integer · scale. Bytes are two integers of 4 bits."""
    if blocks.dtype == torch.uint8:
        halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
        # From 0 to 15 to two's complement.
        blocks = (halves ^ 8).to(torch.int8) - 8
    weight = unpacked(blocks, out_features, in_features).to(dtype)
    scale = scales.permute(0, 2, 1).flatten(0, 1)[:out_features].to(dtype)
    if group_size:
        scale = scale.repeat_interleave(group_size, 1)[:, :in_features]
    return weight * scale
