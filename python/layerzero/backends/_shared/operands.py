"""Operands as attention libraries want them: batch, sequence, heads, element, in memory those for CUDA can load from."""

import torch
from torch import Tensor

from .traced_tensors import start_of

_LOAD = 16
"""Bytes the kernels load at a time."""


def readable(tensor: Tensor) -> bool:
    """Whether it can be loaded 16 bytes at a time: its start and its rows lie on such bounds. A row that does not stops
    the whole device with an error that cannot be recovered from, and the libraries do not look."""
    step = _LOAD // tensor.element_size()
    if tensor.stride(-1) != 1 or start_of(tensor) % _LOAD:
        return False
    return all(stride % step == 0 for stride, size in zip(tensor.stride(), tensor.shape[:-1], strict=False) if size > 1)


def loadable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where kernels could not load from it."""
    return tensor if readable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def is_tileable(tensor: Tensor) -> bool:
    """Whether Hopper's copy engine can read it: for that, strides of dimensions of one count too, and none is zero. A
    library that cannot describe a tensor to the engine may launch its kernel all the same."""
    step = _LOAD // tensor.element_size()
    return readable(tensor) and all(stride > 0 and stride % step == 0 for stride in tensor.stride()[:-1])


def tileable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where Hopper's copy engine could not read it."""
    return tensor if is_tileable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def bshd(tensor: Tensor, layout: str) -> Tensor:
    """The tensor in the order batch, sequence, heads, element. A head size that has to be padded is copied anyway."""
    turned = tensor.transpose(1, 2) if layout == "BHSD" else tensor
    return turned if turned.shape[-1] * turned.element_size() % _LOAD else loadable(turned)


_TINY = 2.0**-126
"""The smallest normal float32: kernels take the scale as one, and what is smaller may become zero there."""


def is_positive(query: Tensor, scale: float | None) -> bool:
    """Whether kernels may mask products, or find the largest, before they scale them: by zero, minus infinity would
    become NaN."""
    return scale is None or scale >= _TINY or (scale > 0.0 and query.dtype == torch.float64)


def positive(query: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """Query and scale with a scale that is positive in the kernel too. One too small for that goes into the query."""
    if is_positive(query, scale):
        return query, scale
    assert scale is not None
    if is_positive(query, -scale):
        return -query, -scale
    return query * scale, 1.0


def is_plain(layout: str, scale: float | None, *tensors: Tensor) -> bool:
    """Whether the library can be called with the arguments as they are."""
    return layout == "BSHD" and all(readable(tensor) for tensor in tensors) and is_positive(tensors[0], scale)


def check_caches(*caches: Tensor) -> None:
    """Raises `RuntimeError` for a cache kernels cannot load from; one is too large to be copied."""
    for cache in caches:
        if not readable(cache):
            raise RuntimeError(f"a cache with strides {tuple(cache.stride())} does not lie on bounds of {_LOAD} bytes")
