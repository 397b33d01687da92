"""Weights of layers that read the same value, moved into one block of memory, so that they are one product.

Each parameter stays, as a part of the block: its values are what they were, a write to it is a write to the block, and no memory is
added. It is what :func:`layerzero.optimize` does with ``fuse_qkv``, for every such layer of a graph: query, key and value, a gate and
what it gates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def beside(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors lie one behind the other in one block."""
    first = tensors[0]
    at = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    for one in tensors:
        if one.data_ptr() != at or one.untyped_storage().data_ptr() != storage or not one.is_contiguous():
            return False
        at += one.nbytes
    return True


def together(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors that lie beside each other, as one."""
    first = tensors[0]
    rows = sum(len(one) for one in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def move(tensors: Sequence[Tensor]) -> bool:
    """Moves parameters into one block, in order. False, and nothing is done, where one shares its memory or is no plain parameter."""
    first = tensors[0]
    for one in tensors:
        plain = type(one) is torch.nn.Parameter and type(one.data) is Tensor and one.is_contiguous()
        plain = plain and not one.is_inference()
        if not plain or one.untyped_storage().nbytes() != one.nbytes or _owners(one) > _ALONE:
            return False
        if (one.dtype, one.device, one.shape[1:]) != (first.dtype, first.device, first.shape[1:]):
            return False
    with torch.no_grad():
        try:
            block, at = torch.cat([one.data for one in tensors]), 0
        except torch.OutOfMemoryError:
            return False
        if first.is_cuda:
            # Others may still read the memory that is given back now, on streams of their own.
            torch.cuda.synchronize(first.device)
        for one in tensors:
            one.data = block[at : at + len(one)]
            at += len(one)
    return True


def _owners(tensor: Tensor) -> int:
    """How many tensors, and Python objects, hold the memory of a tensor."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


#: The owners of memory that one tensor has, while it is asked for.
_ALONE = _owners(torch.nn.Parameter(torch.empty(1)))
