"""Attention over a paged cache. FlashInfer wants the pages of all sequences in one list: they are gathered on the device
when a plan is made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data_errors import bad_index
from ..operands import check_caches, loadable, positive, tileable
from ..torch_functions.paged import check_lengths, check_segments
from .plans import plans
from .rows import Rows, rows_of

# The library's classes, once it is found.
_Decode: Any = None
_Prefill: Any = None


def bind(library: Any) -> None:
    """Takes what is used out of the library."""
    global _Decode, _Prefill
    _Decode, _Prefill = library.BatchDecodeWithPagedKVCacheWrapper, library.BatchPrefillWithPagedKVCacheWrapper


@dataclass(frozen=True)
class Pages:
    """Page tables as FlashInfer has them: sequence b has the pages `indices[indptr[b] : indptr[b + 1]]`, the last of
    which holds `last` tokens. All but the indices are on the host."""

    indptr: Tensor
    indices: Tensor
    last: Tensor
    lengths: list[int]


def pages_of(block_tables: Tensor, context_lens: Tensor, block_size: int, num_blocks: int) -> Pages:
    """The pages in use; raises for lengths and pages that cannot be."""
    # The only reading that stops the host, but for the check of the indices.
    lengths = check_lengths(context_lens, block_tables, block_size)
    pages = listed(block_tables, lengths, block_size)
    if pages.indices.numel():
        least, most = torch.stack(pages.indices.aminmax()).tolist()
        if least < 0 or most >= num_blocks:
            device = block_tables.device
            counts = torch.tensor(lengths, device=device).add_(block_size - 1) // block_size
            used = torch.arange(block_tables.shape[1], device=device) < counts[:, None]
            raise bad_index("block_tables", torch.where(used, block_tables, 0), num_blocks)
    return pages


def listed(block_tables: Tensor, lengths: list[int], block_size: int) -> Pages:
    """The pages of contexts of these lengths, whatever they are."""
    device = block_tables.device
    tokens = torch.tensor(lengths, dtype=torch.int32)
    counts = (tokens + (block_size - 1)) // block_size
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    total = int(indptr[-1])
    sequences = torch.arange(len(lengths), device=device)
    rows = torch.repeat_interleave(sequences, counts.to(device), output_size=total)
    columns = torch.arange(total, device=device) - indptr.to(device)[rows]
    indices = block_tables[rows, columns].to(torch.int32)
    return Pages(indptr, indices, torch.where(tokens > 0, (tokens - 1) % block_size + 1, 0), lengths)


def check_pair(key_cache: Tensor, value_cache: Tensor) -> None:
    """Raises `RuntimeError` for caches that FlashInfer cannot read."""
    check_caches(key_cache, value_cache)
    if key_cache.stride() != value_cache.stride():
        raise RuntimeError("FlashInfer reads keys and values by the same strides, and these caches have their own")


def decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None,
    window_left: int,
    softcap: float,
    layout: str,
) -> Tensor:
    """One query per sequence, by the kernel that multiplies without tensor cores."""
    return _decode(
        query, key_cache, value_cache, block_tables, context_lens, scale, window_left, softcap, layout, False
    )


def decode_tensor_cores(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None,
    window_left: int,
    softcap: float,
    layout: str,
) -> Tensor:
    """One query per sequence, by the kernel that multiplies the heads of a group on tensor cores."""
    return _decode(query, key_cache, value_cache, block_tables, context_lens, scale, window_left, softcap, layout, True)


def _decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None,
    window_left: int,
    softcap: float,
    layout: str,
    tensor_cores: bool,
) -> Tensor:
    check_pair(key_cache, value_cache)
    num_blocks, kv_heads, block_size = sizes_of(key_cache, layout)
    batch, heads, head_dim = query.shape[0], query.shape[-2], query.shape[-1]
    rows, scale = positive(query.view(batch, heads, head_dim), scale)

    def make(workspace: Tensor) -> Any:
        return _Decode(workspace, layout, use_tensor_cores=tensor_cores)

    def plan(wrapper: Any) -> Rows | None:
        pages = pages_of(block_tables, context_lens, block_size, num_blocks)
        computed = rows_of(range(batch + 1), pages.lengths, False, query.device)
        if computed is not None:
            wrapper.plan(
                pages.indptr,
                pages.indices,
                pages.last,
                heads,
                kv_heads,
                head_dim,
                block_size,
                window_left=window_left,
                logits_soft_cap=softcap,
                q_data_type=query.dtype,
                kv_data_type=key_cache.dtype,
                sm_scale=scale,
            )
        return computed

    sizes = (batch, heads, kv_heads, head_dim, block_size, num_blocks)
    kind = ("decode", tensor_cores, layout, sizes, query.dtype, key_cache.dtype, scale, window_left, softcap)
    planned = plans.get(kind, query.device, make, plan, (block_tables, context_lens))
    if planned.found is None:
        return torch.zeros_like(query)
    computed: Rows = planned.found
    output = planned.wrapper.run(loadable(rows), (key_cache, value_cache))
    return computed.whole(output, batch).view(query.shape)


def sizes_of(key_cache: Tensor, layout: str) -> tuple[int, int, int]:
    """Pages, heads and slots in a page."""
    pages, first, second = key_cache.shape[:3]
    return (pages, second, first) if layout == "NHD" else (pages, first, second)


def prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
    softcap: float,
    layout: str,
) -> Tensor:
    """Packed queries."""
    check_pair(key_cache, value_cache)
    num_blocks, kv_heads, block_size = sizes_of(key_cache, layout)
    rows, heads, head_dim = query.shape
    query, scale = positive(query, scale)

    def make(workspace: Tensor) -> Any:
        return _Prefill(workspace, layout)

    def plan(wrapper: Any) -> Rows | None:
        pages = pages_of(block_tables, context_lens, block_size, num_blocks)
        segments = check_segments("cu_seqlens_q", cu_seqlens_q, rows)
        ends = [segments[0][0], *(end for _, end in segments)]
        computed = rows_of(ends, pages.lengths, causal, query.device)
        if computed is not None:
            wrapper.plan(
                torch.tensor(ends, dtype=torch.int32) - computed.first,
                pages.indptr,
                pages.indices,
                pages.last,
                heads,
                kv_heads,
                head_dim,
                block_size,
                causal=causal,
                sm_scale=scale,
                window_left=window_left,
                logits_soft_cap=softcap,
                q_data_type=query.dtype,
                kv_data_type=key_cache.dtype,
            )
        return computed

    sizes = (rows, heads, kv_heads, head_dim, block_size, num_blocks)
    kind = ("prefill", layout, sizes, query.dtype, key_cache.dtype, causal, scale, window_left, softcap)
    planned = plans.get(kind, query.device, make, plan, (block_tables, context_lens, cu_seqlens_q))
    if planned.found is None:
        return torch.zeros_like(query, memory_format=torch.contiguous_format)
    computed: Rows = planned.found
    output = planned.wrapper.run(tileable(computed.of(query)), (key_cache, value_cache))
    return computed.whole(output, rows)


KERNELS: dict[str, Callable[..., Any]] = {
    "flashinfer.paged.decode": decode,
    "flashinfer.paged.decode.gqa": decode,
    "flashinfer.paged.decode.gqa.tensor_cores": decode_tensor_cores,
}
PREFILL: dict[str, Callable[..., Any]] = {
    "flashinfer.paged.prefill": prefill,
    "flashinfer.paged.prefill.gqa": prefill,
}
