"""Block-sparse attention: torch's dense attention under the mask the blocks stand for, which is built on the device."""

import torch
from torch import Tensor

from ..operands import loadable, positive

_sdpa = torch._C._nn.scaled_dot_product_attention


def block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indptr: Tensor,
    indices: Tensor,
    block_rows: int,
    block_cols: int,
    scale: float | None,
) -> Tensor:
    """Blocks of one size."""
    row_blocks, col_blocks = indptr.shape[0] - 1, key.shape[0] // block_cols
    entry = torch.arange(indices.shape[0], device=indices.device)
    row = torch.searchsorted(indptr.long().contiguous(), entry, right=True) - 1
    # Entries of no row are listed in a row of their own.
    row = row.masked_fill_(row < 0, row_blocks)
    listed = torch.zeros(row_blocks + 1, col_blocks, dtype=torch.bool, device=query.device)
    listed.index_put_((row, indices.long()), torch.ones((), dtype=torch.bool, device=query.device))
    shape = row_blocks, block_rows, col_blocks, block_cols
    allowed = listed[:-1, None, :, None].expand(shape).reshape(row_blocks * block_rows, col_blocks * block_cols)
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return _attend(queries, keys, values, allowed, scale)[0].transpose(0, 1)


def variable_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Tensor,
    block_row_sizes: Tensor,
    block_col_sizes: Tensor,
    scale: float | None,
    layout: str,
) -> Tensor:
    """Blocks of many sizes."""
    if layout == "NHD":
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    heads, kv_heads = query.shape[0], key.shape[0]
    rows = _block_of_each(block_row_sizes, query.shape[1])
    columns = _block_of_each(block_col_sizes, key.shape[1])
    head = torch.arange(kv_heads, device=query.device)[:, None, None]
    # Positions in no block look at a row or column of false.
    padded = torch.nn.functional.pad(block_mask, (0, 1, 0, 1))
    allowed = padded[head, rows[:, :, None], columns[:, None, :]]
    if heads != kv_heads:
        allowed = allowed[:, None].expand(-1, heads // kv_heads, -1, -1).flatten(0, 1)
    output = _attend(query[None], key[None], value[None], allowed[None], scale)[0]
    return output.transpose(0, 1) if layout == "NHD" else output


def _attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float | None) -> Tensor:
    query, scale = positive(query, scale)
    query, key, value = loadable(query), loadable(key), loadable(value)
    output = _sdpa(query, key, value, allowed, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    # A row with no block gives zeros.
    return output.masked_fill(~allowed.any(-1, keepdim=True), 0.0)


def _block_of_each(sizes: Tensor, length: int) -> Tensor:
    """For each head, the block each of `length` positions lies in; one past the last for those in none."""
    positions = torch.arange(length, device=sizes.device).expand(sizes.shape[0], length).contiguous()
    return torch.searchsorted(sizes.long().cumsum(1), positions, right=True)
