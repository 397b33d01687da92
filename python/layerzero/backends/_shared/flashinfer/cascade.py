"""Attention over a paged cache whose sequences begin with the same pages: those are read once for all of them.

The first of two levels is one request of all queries over the shared pages, which come before every query; the second has
each sequence's own pages. The library puts the levels together by the sums of their exponentials. Every sequence keeps a
token of its own, and all of its queries where they are causal, so that no level leaves a row without keys.

On Hopper the library's class runs its kernel for that device, which gives every head tiles of its own for 128 queries and
goes over the keys of a sequence in one piece: much of it idle when each sequence has one query. The kernels `fa2` are made
of the same parts with the kernel for other devices, which puts the heads of a group into one tile and the keys in pieces.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data_errors import bad_data
from ..operands import positive, tileable
from ..torch_functions.paged import check_segments
from .paged import Pages, check_pair, listed, pages_of, sizes_of
from .plans import plans
from .rows import Rows, rows_of

_HINT = "pass no more than all sequences share; with shared_prefix=0 the call is right for any tables"

# The library's classes and its function, once it is found.
_Cascade: Any = None
_Prefill: Any = None
_merge: Any = None


def bind(library: Any) -> None:
    """Takes what is used out of the library."""
    global _Cascade, _Prefill, _merge
    _Cascade, _Prefill = library.MultiLevelCascadeAttentionWrapper, library.BatchPrefillWithPagedKVCacheWrapper
    _merge = library.merge_state_in_place


class _Fa2Levels:
    """What the library's class does, by the kernel that is not for Hopper."""

    def __init__(self, levels: int, workspace: Tensor, layout: str) -> None:
        self._levels = [_Prefill(workspace, layout, backend="fa2") for _ in range(levels)]

    def plan(
        self,
        rows: list[Tensor],
        indptr: list[Tensor],
        indices: list[Tensor],
        last: list[Tensor],
        *sizes: int,
        causal: bool,
        **keywords: Any,
    ) -> None:
        """Plans the levels, of which the last is causal where any is."""
        for level, *arrays in zip(self._levels, rows, indptr, indices, last, strict=True):
            level.plan(*arrays, *sizes, causal=causal and level is self._levels[-1], **keywords)

    def run(self, query: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        """The levels put together."""
        output: Tensor
        output, sums = self._levels[-1].run(query, caches, return_lse=True)
        for level in self._levels[:-1]:
            _merge(output, sums, *level.run(query, caches, return_lse=True))
        return output


class _Wrappers:
    """A wrapper of two levels, and of one for sequences that have too little of their own; made when they are needed."""

    def __init__(self, workspace: Tensor, layout: str, fa2: bool) -> None:
        self._workspace, self._layout, self._fa2 = workspace, layout, fa2
        self._made: dict[int, Any] = {}

    def of(self, levels: int) -> Any:
        """The one of so many levels."""
        if levels not in self._made:
            make = _Fa2Levels if self._fa2 else _Cascade
            self._made[levels] = make(levels, self._workspace, self._layout)
        return self._made[levels]


@dataclass(frozen=True)
class _Planned:
    """A wrapper that can run, and the rows it computes."""

    wrapper: Any
    rows: Rows


@dataclass(frozen=True)
class _Call:
    """What is the same for every plan of a kind."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    causal: bool
    scale: float | None
    softcap: float
    fa2: bool

    def plan(
        self, wrappers: _Wrappers, ends: list[int], block_tables: Tensor, context_lens: Tensor, shared_prefix: int
    ) -> _Planned | None:
        """Plans rows `ends[b]` to `ends[b + 1]` of each sequence; `None` when all rows are zeros."""
        size = self.block_size
        pages = pages_of(block_tables, context_lens, size, self.num_blocks)
        _check_promise(block_tables, pages.lengths, shared_prefix, size)
        computed = rows_of(ends, pages.lengths, self.causal, block_tables.device)
        if computed is None:
            return None
        rows = torch.tensor(ends, dtype=torch.int32) - computed.first
        queries = [end - start for start, end in itertools.pairwise(ends)]
        own = [max(count, 1) if self.causal else 1 for count in queries]
        free = min(length - least for length, least in zip(pages.lengths, own, strict=True))
        shared = min(shared_prefix, max(free, 0)) // size
        levels = [(rows, pages)]
        if shared:
            first = Pages(_ints(0, shared), pages.indices[:shared], _ints(size), [shared * size])
            rest = listed(block_tables[:, shared:], [length - shared * size for length in pages.lengths], size)
            levels = [(_ints(0, int(rows[-1])), first), (rows, rest)]
        wrapper = wrappers.of(len(levels))
        wrapper.plan(
            [rows for rows, _ in levels],
            [pages.indptr for _, pages in levels],
            [pages.indices for _, pages in levels],
            [pages.last for _, pages in levels],
            self.heads,
            self.kv_heads,
            self.head_dim,
            size,
            causal=self.causal,
            sm_scale=self.scale,
            logits_soft_cap=self.softcap,
            q_data_type=self.q_dtype,
            kv_data_type=self.kv_dtype,
        )
        return _Planned(wrapper, computed)


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _check_promise(block_tables: Tensor, lengths: list[int], shared_prefix: int, block_size: int) -> None:
    """Raises unless all sequences begin with so many tokens, in the same pages."""
    for sequence, length in enumerate(lengths):
        if length < shared_prefix:
            expected = f"expected {shared_prefix} or more, as shared_prefix promises"
            raise bad_data(f"context_lens[{sequence}]", length, expected, _HINT)
    pages = block_tables[:, : shared_prefix // block_size]
    differ = pages != pages[:1]
    if bool(differ.any()):
        sequence, column = differ.nonzero()[0].tolist()
        expected = f"expected {int(pages[0, column])} as in sequence 0: shared_prefix={shared_prefix} promises the same"
        raise bad_data(f"block_tables[{sequence}, {column}]", int(pages[sequence, column]), expected, _HINT)


def _decoding(fa2: bool) -> Callable[..., Tensor]:
    def decode(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float | None,
        softcap: float,
        shared_prefix: int,
        layout: str,
    ) -> Tensor:
        # One query at the end of its sequence sees all of it, causal or not.
        rows = query.view(query.shape[0], *query.shape[-2:])
        settings = (False, scale, softcap, shared_prefix, layout, fa2)
        return _run(rows, key_cache, value_cache, block_tables, context_lens, None, *settings).view(query.shape)

    return decode


decode = _decoding(False)
"""One query per sequence."""
decode_fa2 = _decoding(True)
"""One query per sequence, by the kernel that is not for Hopper."""


def prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    causal: bool,
    scale: float | None,
    softcap: float,
    shared_prefix: int,
    layout: str,
) -> Tensor:
    """Packed queries."""
    settings = (causal, scale, softcap, shared_prefix, layout, False)
    return _run(query, key_cache, value_cache, block_tables, context_lens, cu_seqlens_q, *settings)


def _run(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float,
    shared_prefix: int,
    layout: str,
    fa2: bool,
) -> Tensor:
    check_pair(key_cache, value_cache)
    num_blocks, kv_heads, block_size = sizes_of(key_cache, layout)
    rows, heads, head_dim = query.shape
    query, scale = positive(query, scale)
    call = _Call(
        heads,
        kv_heads,
        head_dim,
        block_size,
        num_blocks,
        query.dtype,
        key_cache.dtype,
        causal,
        scale,
        softcap,
        fa2,
    )

    def make(workspace: Tensor) -> _Wrappers:
        return _Wrappers(workspace, layout, fa2)

    def plan(wrappers: _Wrappers) -> _Planned | None:
        ends = list(range(rows + 1))
        if cu_seqlens_q is not None:
            segments = check_segments("cu_seqlens_q", cu_seqlens_q, rows)
            ends = [segments[0][0], *(end for _, end in segments)]
        return call.plan(wrappers, ends, block_tables, context_lens, shared_prefix)

    tensors: tuple[Tensor, ...] = (block_tables, context_lens)
    if cu_seqlens_q is not None:
        tensors = (*tensors, cu_seqlens_q)
    kind = ("cascade", layout, rows, len(tensors), call)
    planned: _Planned | None = plans.get(kind, query.device, make, plan, tensors, shared_prefix).found
    if planned is None:
        return torch.zeros_like(query, memory_format=torch.contiguous_format)
    # The library writes results in the order of the queries' memory and merges them as contiguous ones.
    given = tileable(planned.rows.of(query).contiguous())
    return planned.rows.whole(planned.wrapper.run(given, (key_cache, value_cache)), rows)


KERNELS: dict[str, Callable[..., Any]] = {
    "flashinfer.paged.cascade.decode": decode,
    "flashinfer.paged.cascade.decode.fa2": decode_fa2,
    "flashinfer.paged.cascade.decode.gqa": decode,
    "flashinfer.paged.cascade.decode.gqa.fa2": decode_fa2,
}
PREFILL: dict[str, Callable[..., Any]] = {
    "flashinfer.paged.cascade.prefill": prefill,
    "flashinfer.paged.cascade.prefill.gqa": prefill,
}
