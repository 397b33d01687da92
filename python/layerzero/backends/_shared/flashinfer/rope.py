"""Rotary embedding.

The library turns queries and keys together, from one table of cosines and sines in float32. The table is kept for as long
as ours hold the same; the tensor's own first head stands for the keys.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..data_errors import bad_data
from ..tensor_contents import Remembered

# The library, once it is found.
_library: Any = None


def bind(library: Any) -> None:
    """Keeps the library."""
    global _library
    _library = library


def _joined(cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((cos.float(), sin.float()), -1)


def _joined_halves(cos: Tensor, sin: Tensor) -> Tensor:
    """Of tables that hold everything twice."""
    half = cos.shape[1] // 2
    return _joined(cos[:, :half], sin[:, :half])


_tables, _halves = Remembered(_joined), Remembered(_joined_halves)


@lru_cache(maxsize=64)
def _in_order(batch: int, seq: int, device: torch.device) -> Tensor:
    return torch.arange(seq, dtype=torch.int32, device=device).repeat(batch)


def rope(input: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, layout: str) -> Tensor:
    """Turns all heads of packed or batched tokens."""
    head_dim, (table, rot) = input.shape[-1], cos.shape
    batch, seq = (1, input.shape[0]) if layout == "NHD" else (input.shape[0], input.shape[1])
    if positions is None:
        if seq > table:
            raise bad_data(f"positions[{table}]", table, f"but cos and sin have rows 0 to below {table}")
        positions = _in_order(batch, seq, input.device)
    else:
        if layout == "NHD" and positions.dim() == 2 and positions.shape[0] != 1:
            raise bad_data("the number of rows of positions", positions.shape[0], "but the input is one sequence")
        positions = (positions if positions.dim() == 2 else positions[None]).expand(batch, seq).reshape(-1)
    both = (_halves if rot == head_dim else _tables).of(cos, sin)
    tokens = input.view(batch * seq, -1)
    turned: tuple[Tensor, Tensor] = _library.apply_rope_with_cos_sin_cache(
        positions, tokens, tokens[:, :head_dim], head_dim, both, is_neox=not interleaved
    )
    return turned[0].view(input.shape)


KERNELS: dict[str, Callable[..., Any]] = {"flashinfer.rope": rope}
