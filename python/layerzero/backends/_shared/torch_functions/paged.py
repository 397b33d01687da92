"""Attention over a paged cache: the pages of a sequence are gathered, then attended to as dense keys and values."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..data_errors import bad_data, bad_index
from .attention import EVERYWHERE, attend, attend_flash, attend_flash_lse, attend_lse, reachable

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_lengths(context_lens: Tensor, block_tables: Tensor, block_size: int) -> list[int]:
    """The context lengths, each of which the sequence's pages can hold."""
    lengths: list[int] = context_lens.tolist()
    capacity = block_tables.shape[1] * block_size
    for sequence, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            expected = f"expected 0 to {capacity}, which is what its pages hold"
            raise bad_data(f"context_lens[{sequence}]", length, expected)
    return lengths


def check_segments(name: str, indptr: Tensor, limit: int) -> list[tuple[int, int]]:
    """The stretches `indptr[i]` to `indptr[i + 1]`, which ascend within 0 to `limit`."""
    ends: list[int] = indptr.tolist()
    previous = 0
    for place, end in enumerate(ends):
        if not previous <= end <= limit:
            raise bad_data(f"{name}[{place}]", end, f"expected {previous} to {limit}, ascending")
        previous = end
    return list(itertools.pairwise(ends))


def gather_pages(cache: Tensor, pages: Tensor) -> Tensor:
    """Copies of pages, one after another."""
    try:
        return cache.index_select(0, pages)
    except IndexError:
        raise bad_index("block_tables", pages, cache.shape[0]) from None


class _Contexts:
    """The keys and values of each sequence, in the order batch, heads, sequence, element."""

    def __init__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        hnd: bool,
    ) -> None:
        self.key_cache, self.value_cache, self.block_tables, self.hnd = key_cache, value_cache, block_tables, hnd
        self.block_size = key_cache.shape[2] if hnd else key_cache.shape[1]
        self.lengths = check_lengths(context_lens, block_tables, self.block_size)
        # An 8-bit cache widens exactly to whatever the query is.
        self.dtype = query.dtype if key_cache.dtype in _FLOAT8 else torch.promote_types(query.dtype, key_cache.dtype)

    def read(self, sequence: int, first: int) -> tuple[Tensor, Tensor]:
        """The keys and values from token `first` on; pages before it and beyond the context are not looked at."""
        length = self.lengths[sequence]
        page = first // self.block_size
        pages = self.block_tables[sequence, page : -(-length // self.block_size)]
        start, end = first - page * self.block_size, length - page * self.block_size
        return self._tokens(self.key_cache, pages, start, end), self._tokens(self.value_cache, pages, start, end)

    def _tokens(self, cache: Tensor, pages: Tensor, start: int, end: int) -> Tensor:
        gathered = gather_pages(cache, pages).to(self.dtype)
        if self.hnd:
            heads, _, width = gathered.shape[1:]
            return gathered.transpose(0, 1).reshape(1, heads, -1, width)[:, :, start:end]
        return gathered.flatten(0, 1)[start:end].transpose(0, 1)[None]


def _first_key(length: int, queries: int, window_left: int) -> int:
    """The first token that any of the last `queries` positions reaches."""
    if window_left < 0:
        return 0
    return min(max(length - queries - window_left, 0), length)


def decode_flash(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    window_left: int,
    layout: str,
) -> Tensor:
    """One query per sequence: gathers its pages, then torch's flash attention."""
    return _decode(
        query, key_cache, value_cache, block_tables, context_lens, sinks, scale, window_left, 0.0, layout, True
    )


def decode_unfused(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    window_left: int,
    softcap: float,
    layout: str,
) -> Tensor:
    """One query per sequence: gathers its pages, then matrix products."""
    return _decode(
        query, key_cache, value_cache, block_tables, context_lens, sinks, scale, window_left, softcap, layout, False
    )


def _decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    window_left: int,
    softcap: float,
    layout: str,
    flash: bool,
) -> Tensor:
    contexts = _Contexts(query, key_cache, value_cache, block_tables, context_lens, layout == "HND")
    kv_heads = key_cache.shape[1] if contexts.hnd else key_cache.shape[2]
    batch, heads, head_dim = query.shape[0], query.shape[-2], query.shape[-1]
    output = torch.zeros(batch, heads, head_dim, dtype=query.dtype, device=query.device)
    # The query heads that share a key/value head stand where its queries would.
    queries = query.contiguous().view(batch, 1, kv_heads, heads // max(kv_heads, 1), head_dim).to(contexts.dtype)
    rows = None if sinks is None else sinks.view(kv_heads, -1)
    for sequence, length in enumerate(contexts.lengths):
        if length == 0:
            continue
        key, value = contexts.read(sequence, _first_key(length, 1, window_left))
        if flash:
            attended = attend_flash(queries[sequence], key, value, False, scale, EVERYWHERE, rows)
        else:
            columns = None if rows is None else rows[..., None]
            attended = attend(queries[sequence], key, value, scale, softcap=softcap, sinks=columns)
        output[sequence] = attended.reshape(heads, head_dim)
    return output.view(query.shape)


def prefill_flash(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    sinks: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    layout: str,
) -> Tensor:
    """Packed queries: gathers each sequence's pages, then torch's flash attention."""
    contexts = _Contexts(query, key_cache, value_cache, block_tables, context_lens, layout == "HND")
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    for rows, queries, key, value in _segments(query, cu_seqlens_q, contexts, window_left):
        heads = None if sinks is None else sinks[:, None]
        attended = attend_flash(queries, key, value, causal, scale, (window_left, window_right), heads)
        output[rows] = attended[0].transpose(0, 1)
    return output


def prefill_unfused(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    sinks: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    layout: str,
) -> Tensor:
    """Packed queries: gathers each sequence's pages, then matrix products."""
    contexts = _Contexts(query, key_cache, value_cache, block_tables, context_lens, layout == "HND")
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    for rows, queries, key, value in _segments(query, cu_seqlens_q, contexts, window_left):
        allowed = reachable(queries, key, causal, (window_left, window_right))
        columns = None if sinks is None else sinks[:, None, None]
        attended = attend(queries, key, value, scale, allowed, softcap=softcap, sinks=columns)
        output[rows] = attended[0].transpose(0, 1)
    return output


def flash_lse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Gathers each sequence's pages, then torch's flash attention with its logarithms."""
    given, query = query, _one_row_each(query)
    contexts = _Contexts(query, key_cache, value_cache, block_tables, context_lens, layout == "HND")
    output, logarithms = _nothing(query)
    for rows, queries, key, value in _segments(query, cu_seqlens_q, contexts, window_left):
        attended, lse = attend_flash_lse(queries, key, value, causal, scale, (window_left, window_right))
        output[rows], logarithms[rows] = attended[0].transpose(0, 1), lse[0].transpose(0, 1)
    return output.view(given.shape), logarithms.view(given.shape[:-1])


def unfused_lse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Gathers each sequence's pages, then matrix products with the logarithms of the softmaxes' sums."""
    given, query = query, _one_row_each(query)
    contexts = _Contexts(query, key_cache, value_cache, block_tables, context_lens, layout == "HND")
    output, logarithms = _nothing(query)
    for rows, queries, key, value in _segments(query, cu_seqlens_q, contexts, window_left):
        allowed = reachable(queries, key, causal, (window_left, window_right))
        attended, lse = attend_lse(queries, key, value, scale, allowed, softcap)
        output[rows], logarithms[rows] = attended[0].transpose(0, 1), lse[0].transpose(0, 1)
    return output.view(given.shape), logarithms.view(given.shape[:-1])


def _one_row_each(query: Tensor) -> Tensor:
    """Queries as rows, heads, elements: without the axis of one query per sequence, where there is one."""
    return query[:, 0] if query.dim() == 4 else query


def _nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    """What rows give that attend to nothing."""
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    return output, query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)


def _segments(
    query: Tensor, cu_seqlens_q: Tensor | None, contexts: _Contexts, window_left: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """The rows of each sequence that has queries and a context, with their queries, keys and values. Without bounds each
    sequence has one row."""
    queries = query.contiguous().to(contexts.dtype).transpose(0, 1)[None]
    bounds = [(row, row + 1) for row in range(query.shape[0])]
    if cu_seqlens_q is not None:
        bounds = check_segments("cu_seqlens_q", cu_seqlens_q, query.shape[0])
    for sequence, (start, end) in enumerate(bounds):
        length = contexts.lengths[sequence]
        if start == end or length == 0:
            continue
        key, value = contexts.read(sequence, _first_key(length, end - start, window_left))
        yield slice(start, end), queries[:, :, start:end], key, value


def mla(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    qo_indptr: Tensor | None,
    kv_indptr: Tensor | None,
    scale: float,
    causal: bool,
) -> Tensor:
    """Latent attention over contiguous latent vectors."""
    dtype = _latent_dtype(q_nope, ckv)
    query = torch.cat((q_nope, q_pe), -1).to(dtype).transpose(0, 1)[None]
    latent = ckv.reshape(ckv.shape[0], ckv.shape[-1]).to(dtype)
    key = torch.cat((latent, kpe.reshape(kpe.shape[0], kpe.shape[-1]).to(dtype)), -1)
    key, value = key[None, None], latent[None, None]
    if qo_indptr is None or kv_indptr is None:
        allowed = reachable(query, key, causal, EVERYWHERE)
        return attend(query, key, value, scale, allowed)[0].transpose(0, 1).to(q_nope.dtype)
    tokens = check_segments("kv_indptr", kv_indptr, ckv.shape[0])
    rows = check_segments("qo_indptr", qo_indptr, q_nope.shape[0])
    # Rows that belong to no sequence are zeros.
    parts = [torch.zeros_like(query[:, :, : rows[0][0] if rows else None, : latent.shape[-1]])]
    for (row, row_end), (token, token_end) in zip(rows, tokens, strict=True):
        queries, keys = query[:, :, row:row_end], key[:, :, token:token_end]
        allowed = reachable(queries, keys, causal, EVERYWHERE)
        parts.append(attend(queries, keys, value[:, :, token:token_end], scale, allowed))
    if rows:
        parts.append(torch.zeros_like(query[:, :, rows[-1][1] :, : latent.shape[-1]]))
    return torch.cat(parts, 2)[0].transpose(0, 1).to(q_nope.dtype)


def mla_paged(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """Latent attention of one query per sequence over a paged cache."""
    rows = [(row, row + 1) for row in range(q_nope.shape[0])]
    return _mla_paged(q_nope, q_pe, ckv_cache, kpe_cache, block_tables, context_lens, rows, scale, False)


def mla_paged_packed(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    qo_indptr: Tensor,
    scale: float,
    causal: bool,
) -> Tensor:
    """Latent attention of several queries per sequence over a paged cache."""
    rows = check_segments("qo_indptr", qo_indptr, q_nope.shape[0])
    return _mla_paged(q_nope, q_pe, ckv_cache, kpe_cache, block_tables, context_lens, rows, scale, causal)


def _mla_paged(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    rows: list[tuple[int, int]],
    scale: float,
    causal: bool,
) -> Tensor:
    dtype = _latent_dtype(q_nope, ckv_cache)
    block_size = ckv_cache.shape[1]
    # All heads share the one latent head.
    query = torch.cat((q_nope, q_pe), -1).to(dtype)
    output = torch.zeros(q_nope.shape, dtype=q_nope.dtype, device=q_nope.device)
    lengths = check_lengths(context_lens, block_tables, block_size)
    for sequence, ((start, end), length) in enumerate(zip(rows, lengths, strict=True)):
        pages = block_tables[sequence, : math.ceil(length / block_size)]
        latent = gather_pages(ckv_cache, pages).flatten(0, 1)[:length].to(dtype)
        if length == 0 or start == end:
            continue
        key = torch.cat((latent, gather_pages(kpe_cache, pages).flatten(0, 1)[:length].to(dtype)), -1)
        queries = query[start:end].transpose(0, 1)[None]
        allowed = reachable(queries, key[None, None], causal, EVERYWHERE)
        output[start:end] = attend(queries, key[None, None], latent[None, None], scale, allowed)[0].transpose(0, 1)
    return output


def _latent_dtype(query: Tensor, latents: Tensor) -> torch.dtype:
    return query.dtype if latents.dtype in _FLOAT8 else torch.promote_types(query.dtype, latents.dtype)
