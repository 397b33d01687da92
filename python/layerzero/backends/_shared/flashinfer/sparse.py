"""Block-sparse attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..data_errors import bad_data, check_indices
from ..operands import loadable, positive, tileable
from ..torch_functions.paged import check_segments
from .plans import plans

# The library's classes, once it is found.
_Block: Any = None
_VariableBlock: Any = None


def bind(library: Any) -> None:
    """Takes what is used out of the library."""
    global _Block, _VariableBlock
    _Block, _VariableBlock = library.BlockSparseAttentionWrapper, library.VariableBlockSparseAttentionWrapper


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
    (seq_q, heads, head_dim), (seq_k, kv_heads, _) = query.shape, key.shape
    query, scale = positive(query, scale)

    def plan(wrapper: Any) -> tuple[bool, Tensor | None]:
        segments = check_segments("indptr", indptr, indices.shape[0])
        columns = seq_k // block_cols
        check_indices("indices", indices, columns)
        first, end = segments[0][0], segments[-1][1]
        lengths = (indptr[1:] - indptr[:-1]).long()
        rows = torch.repeat_interleave(torch.arange(len(segments), device=lengths.device), lengths)
        # A block that is listed twice counts once.
        blocks = torch.unique(rows * columns + indices[first:end])
        counts = torch.bincount(blocks // columns, minlength=len(segments))
        if end > first:
            wrapper.plan(
                torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
                (blocks % columns).int(),
                seq_q,
                seq_k,
                block_rows,
                block_cols,
                heads,
                kv_heads,
                head_dim,
                sm_scale=scale,
                q_data_type=query.dtype,
                kv_data_type=key.dtype,
                o_data_type=query.dtype,
            )
        zeros = (counts == 0).repeat_interleave(block_rows).nonzero().flatten()
        return end > first, zeros if zeros.numel() else None

    sizes = (seq_q, seq_k, heads, kv_heads, head_dim, block_rows, block_cols)
    planned = plans.get(("block", sizes, query.dtype, scale), query.device, _Block, plan, (indptr, indices))
    some, zeros = planned.found
    if not some:
        return torch.zeros_like(query)
    output: Tensor = planned.wrapper.run(tileable(query), loadable(key), loadable(value))
    if zeros is not None:
        output[zeros] = 0.0
    return output


def variable_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: Tensor,
    block_row_sizes: Tensor,
    block_col_sizes: Tensor,
    scale: float | None,
) -> Tensor:
    """Blocks of many sizes, heads first."""
    (heads, seq_q, head_dim), (kv_heads, seq_k, _) = query.shape, key.shape
    query, scale = positive(query, scale)

    def plan(wrapper: Any) -> tuple[bool, Tensor | None]:
        rows = _cover("block_row_sizes", block_row_sizes, seq_q)
        columns = _cover("block_col_sizes", block_col_sizes, seq_k)
        # Positions of no block lie in one that attends to nothing, and that nothing attends to.
        mask = torch.nn.functional.pad(
            block_mask, (0, columns.shape[1] - block_mask.shape[2], 0, rows.shape[1] - block_mask.shape[1])
        )
        keys = (mask * columns[:, None, :]).sum(-1)
        some = bool(keys.any())
        if some:
            wrapper.plan(
                mask,
                rows,
                columns,
                heads,
                kv_heads,
                head_dim,
                sm_scale=scale,
                q_data_type=query.dtype,
                kv_data_type=key.dtype,
            )
        nothing = torch.repeat_interleave((keys == 0).flatten(), rows.flatten()).view(kv_heads, seq_q)
        nothing = nothing.repeat_interleave(heads // kv_heads, 0).unsqueeze(-1)
        return some, nothing if bool(nothing.any()) else None

    sizes = (heads, seq_q, kv_heads, seq_k, head_dim)
    tensors = (block_mask, block_row_sizes, block_col_sizes)
    planned = plans.get(("variable block", sizes, query.dtype, scale), query.device, _VariableBlock, plan, tensors)
    some, nothing = planned.found
    if not some:
        return torch.zeros_like(query)
    output: Tensor = planned.wrapper.run(loadable(query), loadable(key), loadable(value))
    return output if nothing is None else output.masked_fill(nothing, 0.0)


def _cover(name: str, sizes: Tensor, length: int) -> Tensor:
    """The sizes of blocks that cover all positions of every head."""
    sizes = sizes.to(torch.int32)
    for head, row in enumerate(sizes.tolist()):
        left = length
        for place, size in enumerate(row):
            if not 0 <= size <= left:
                raise bad_data(f"{name}[{head}, {place}]", size, f"expected 0 to {left}, the positions that are left")
            left -= size
    rest = length - sizes.sum(1, keepdim=True, dtype=torch.int32)
    return torch.cat((sizes, rest), 1) if bool(rest.any()) else sizes


PREFILL: dict[str, Callable[..., Any]] = {
    "flashinfer.sparse.block": block,
    "flashinfer.sparse.variable_block": variable_block,
}
