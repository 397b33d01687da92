"""Weights in the blocks of :func:`layerzero.pack`, read by code that knows no blocks."""

from torch import Tensor


def unpacked(blocks: Tensor, out_features: int, in_features: int) -> Tensor:
    """The weight behind blocks of 32 outputs: ``[blocks, groups of inputs, 32, inputs of a group]``. It may share memory."""
    return blocks.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:out_features, :in_features]
