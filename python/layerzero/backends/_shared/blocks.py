"""Work on large tensors in pieces, so that what one step writes is still in the cache when the next one reads it.

A temporary of a whole large tensor costs more than that: its memory is new, and every page of it a fault.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
"""The dtypes of half a float32's width."""

ELEMENTS = 1 << 18
"""How many elements a piece has, about: its temporaries fit into the second-level cache, and two cores have enough to do."""


def rows_of(tensor: Tensor) -> Tensor:
    """The tensor as a matrix of its rows."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def blocks(*tensors: Tensor, whole: int) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same piece of each tensor, piece after piece. The tensors have the same leading dimensions; the last
    `whole` of each are never cut."""
    first = tensors[0]
    if first.numel() <= ELEMENTS or first.dim() == whole:
        yield tensors
        return
    inner = first.numel() // first.shape[0]
    if inner > ELEMENTS and first.dim() > whole + 1:
        for parts in zip(*(tensor.unbind(0) for tensor in tensors), strict=True):
            yield from blocks(*parts, whole=whole)
        return
    count = max(ELEMENTS // inner, 1)
    for start in range(0, first.shape[0], count):
        yield tuple(tensor[start : start + count] for tensor in tensors)
