"""Embeddings and positional encodings."""

import torch
from torch import Tensor

from .attention import distances
from .faults import bad_data, bad_index

_embedding = torch._C._VariableFunctions.embedding


def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table."""
    try:
        return _embedding(weight, indices)
    except IndexError:
        raise bad_index("indices", indices, weight.shape[0]) from None


def rope(input: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, layout: str) -> Tensor:
    """Rotary embedding, composed; rounded once."""
    head_dim, rot = input.shape[-1], cos.shape[-1]
    pairs = head_dim // 2 if rot == head_dim else rot
    work = torch.float64 if input.dtype == torch.float64 else torch.float32
    cos = _at_positions(cos[:, :pairs], input, positions, layout).to(work)
    sin = _at_positions(sin[:, :pairs], input, positions, layout).to(work)
    rotated = input[..., : 2 * pairs].to(work)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs:]
    turned = (first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin)
    output = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    output = output.to(input.dtype)
    return output if 2 * pairs == head_dim else torch.cat((output, input[..., 2 * pairs :]), -1)


def _at_positions(table: Tensor, input: Tensor, positions: Tensor | None, layout: str) -> Tensor:
    """The rows of a table that belong to the tokens of the input, broadcast over its heads."""
    seq = input.shape[2] if layout == "BHSD" else input.shape[-3]
    if positions is None:
        if seq > table.shape[0]:
            raise bad_data(f"positions[{table.shape[0]}]", table.shape[0], _beyond(table))
        rows = table[:seq]
    else:
        try:
            rows = table.index_select(0, positions.reshape(-1)).reshape(*positions.shape, table.shape[1])
        except IndexError:
            raise bad_index("positions", positions, table.shape[0]) from None
    if layout == "NHD":
        if rows.dim() == 3:
            if rows.shape[0] != 1:
                raise bad_data("the number of rows of positions", rows.shape[0], "but the input is one sequence")
            rows = rows[0]
        return rows[:, None]
    return rows.unsqueeze(-3 if layout == "BHSD" else -2)


def _beyond(table: Tensor) -> str:
    return f"but cos and sin have rows 0 to below {table.shape[0]}"


def alibi(slopes: Tensor, seq_q: int, seq_k: int) -> Tensor:
    """Linear bias by distance."""
    work = torch.float64 if slopes.dtype == torch.float64 else torch.float32
    distance = distances(seq_q, seq_k, slopes.device).to(work)
    return (slopes.to(work)[:, None, None] * -distance).to(slopes.dtype)
