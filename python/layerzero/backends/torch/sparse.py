"""Block-sparse attention."""

import torch
from torch import Tensor

from .._shared.data_errors import bad_data, check_indices
from .._shared.torch_functions.attention import EVERYWHERE, attend, attend_flash
from .._shared.torch_functions.paged import check_segments


def block_gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indptr: Tensor,
    indices: Tensor,
    block_rows: int,
    block_cols: int,
    scale: float | None,
) -> Tensor:
    """Blocks of one size: gathers the listed blocks of each block row, then torch's flash attention."""
    col_blocks = key.shape[0] // block_cols
    check_indices("indices", indices, col_blocks)
    key_blocks = key.reshape(col_blocks, block_cols, *key.shape[1:])
    value_blocks = value.reshape(col_blocks, block_cols, *value.shape[1:])
    queries = query.contiguous().transpose(0, 1)[None]
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    for row, (start, end) in enumerate(check_segments("indptr", indptr, indices.shape[0])):
        if start == end:
            continue
        # A block that is listed twice counts once.
        listed = torch.tensor(sorted(set(indices[start:end].tolist())), device=key.device)
        rows = slice(row * block_rows, (row + 1) * block_rows)
        keys = key_blocks.index_select(0, listed).flatten(0, 1).transpose(0, 1)[None]
        values = value_blocks.index_select(0, listed).flatten(0, 1).transpose(0, 1)[None]
        output[rows] = attend_flash(queries[:, :, rows], keys, values, False, scale, EVERYWHERE)[0].transpose(0, 1)
    return output


def block_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indptr: Tensor,
    indices: Tensor,
    block_rows: int,
    block_cols: int,
    scale: float | None,
) -> Tensor:
    """Blocks of one size: dense attention under the mask they stand for."""
    row_blocks, col_blocks = indptr.shape[0] - 1, key.shape[0] // block_cols
    segments = check_segments("indptr", indptr, indices.shape[0])
    check_indices("indices", indices, col_blocks)
    listed = torch.zeros(row_blocks, col_blocks, dtype=torch.bool, device=query.device)
    for row, (start, end) in enumerate(segments):
        listed[row, indices[start:end].long()] = True
    allowed = listed.repeat_interleave(block_rows, 0).repeat_interleave(block_cols, 1)
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return attend(queries, keys, values, scale, allowed)[0].transpose(0, 1)


def variable_block_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Tensor,
    block_row_sizes: Tensor,
    block_col_sizes: Tensor,
    scale: float | None,
    layout: str,
) -> Tensor:
    """Blocks of many sizes: dense attention under the mask they stand for."""
    if layout == "NHD":
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    heads, kv_heads = query.shape[0], key.shape[0]
    rows = _block_of_each("block_row_sizes", block_row_sizes, query.shape[1])
    columns = _block_of_each("block_col_sizes", block_col_sizes, key.shape[1])
    head = torch.arange(kv_heads, device=query.device)[:, None, None]
    # Positions in no block look at a row or column of false.
    padded = torch.nn.functional.pad(block_mask, (0, 1, 0, 1))
    allowed = padded[head, rows[:, :, None], columns[:, None, :]]
    allowed = allowed.repeat_interleave(heads // max(kv_heads, 1), 0)
    output = attend(query[None], key[None], value[None], scale, allowed)[0]
    return output.transpose(0, 1) if layout == "NHD" else output


def _block_of_each(name: str, sizes: Tensor, length: int) -> Tensor:
    """For each head, the block each of `length` positions lies in; one past the last for those in none."""
    sizes = sizes.long()
    if sizes.numel() and (int(sizes.min()) < 0 or int(sizes.sum(1).max()) > length):
        head, block = _misfit(sizes, length)
        left = length - int(sizes[head, :block].sum())
        expected = f"expected 0 to {left}, the positions that are left"
        raise bad_data(f"{name}[{head}, {block}]", int(sizes[head, block]), expected)
    positions = torch.arange(length, device=sizes.device).expand(sizes.shape[0], length).contiguous()
    return torch.searchsorted(sizes.cumsum(1), positions, right=True)


def _misfit(sizes: Tensor, length: int) -> tuple[int, int]:
    """The first block that is negative or goes beyond the positions."""
    head, block = ((sizes < 0) | (sizes.cumsum(1) > length)).nonzero()[0].tolist()
    return head, block
