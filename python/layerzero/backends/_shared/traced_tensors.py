"""Tensors of a graph that is being compiled: they have shapes and strides, and neither values nor memory."""

import torch
from torch import Tensor

_mode = torch._C._get_dispatch_mode
_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL


def is_traced() -> bool:
    """Whether a graph is being compiled here."""
    return _mode(_FUNCTIONAL) is not None


def start_of(tensor: Tensor) -> int:
    """The address of the first element. One of a graph counts from the start of its memory, which compilers align."""
    return int(tensor.storage_offset()) * tensor.element_size() if is_traced() else tensor.data_ptr()
