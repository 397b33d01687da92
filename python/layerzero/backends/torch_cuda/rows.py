"""Embeddings and rotary embeddings as one calls them on a GPU."""

from typing import Any

import torch
from torch import Tensor

from layerzero.kernels import direct

from ..torch.position import _at_positions, _pairs

_embedding = torch._C._VariableFunctions.embedding


def _embedding_call(indices: Tensor, weight: Tensor) -> tuple[Any, ...]:
    return _embedding, (weight, indices)


@direct(_embedding_call)
def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table; an index outside it stops the device, as everywhere in torch."""
    return _embedding(weight, indices)


def rope_complex(input: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, layout: str) -> Tensor:
    """Rotary embedding of neighbouring pairs as complex numbers: turning them is one product."""
    head_dim, pairs = input.shape[-1], _pairs(input, cos)
    work = torch.float64 if input.dtype == torch.float64 else torch.float32
    cos = _at_positions(cos[:, :pairs], input, positions, layout).to(work)
    sin = _at_positions(sin[:, :pairs], input, positions, layout).to(work)
    # Complex numbers lie two floats apart, which only a copy is sure to.
    rotated = input[..., : 2 * pairs].to(work, copy=True, memory_format=torch.contiguous_format)
    numbers = torch.view_as_complex(rotated.view(*rotated.shape[:-1], pairs, 2))
    turned = torch.view_as_real(numbers * torch.complex(cos, sin)).flatten(-2).to(input.dtype)
    return turned if 2 * pairs == head_dim else torch.cat((turned, input[..., 2 * pairs :]), -1)
