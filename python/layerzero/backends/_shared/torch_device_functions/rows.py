"""Embeddings and rotary embeddings as one calls them on a GPU."""

from typing import Any

import torch
from torch import Tensor

from layerzero.kernels import direct

from ..blocks import HALF
from ..torch_functions.position import _at_positions, _pairs
from ..torch_functions.position import rope as composed
from ..traced_tensors import is_traced

_embedding = torch._C._VariableFunctions.embedding


def _embedding_call(indices: Tensor, weight: Tensor) -> tuple[Any, ...]:
    return _embedding, (weight, indices)


@direct(_embedding_call)
def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table; an index outside it stops the device, as everywhere in torch."""
    return _embedding(weight, indices)


def rope(input: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, layout: str) -> Tensor:
    """Rotary embedding in three launches, rounded once: kernels of torch widen what they load and round what they store."""
    wanted = torch.is_grad_enabled() and (input.requires_grad or cos.requires_grad or sin.requires_grad)
    head_dim, pairs = input.shape[-1], _pairs(input, cos)
    if wanted or pairs == 0 or input.numel() == 0 or is_traced():
        return composed(input, cos, sin, positions, interleaved, layout)
    if cos.shape[-1] != pairs:
        cos, sin = cos[:, :pairs], sin[:, :pairs]
    cos, sin = _at_positions(cos, input, positions, layout), _at_positions(sin, input, positions, layout)
    output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    first, second = _of_pairs(input, pairs, interleaved)
    turned_first, turned_second = _of_pairs(output, pairs, interleaved)
    # A view: the last dimension is cut in two.
    both = input[..., : 2 * pairs].view(*input.shape[:-1], *((pairs, 2) if interleaved else (2, pairs)))
    beside = cos.unsqueeze(-1 if interleaved else -2)
    if cos.dtype == input.dtype and input.dtype in HALF:
        # Products of half-width floats are float32 numbers where they are added to one.
        products = torch.addcmul(both.new_zeros((1,) * both.dim(), dtype=torch.float32), both, beside)
    else:
        products = both * beside
    of_first, of_second = products.unbind(-1 if interleaved else -2)
    torch.addcmul(of_first, second, sin, value=-1, out=turned_first)
    torch.addcmul(of_second, first, sin, out=turned_second)
    if 2 * pairs != head_dim:
        output[..., 2 * pairs :] = input[..., 2 * pairs :]
    return output


def _of_pairs(tensor: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second dimension of every pair."""
    if interleaved:
        return tensor[..., 0 : 2 * pairs : 2], tensor[..., 1 : 2 * pairs : 2]
    return tensor[..., :pairs], tensor[..., pairs : 2 * pairs]


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
