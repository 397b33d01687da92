"""Attention over a paged cache: the tokens of each sequence are gathered, then attended to as dense keys and values.

Nothing waits for the device: every sequence is taken to be as long as its pages are, and what lies beyond its context is
masked. In the place of a slot beyond the context its first token is read, so that no page is looked at that is not the
sequence's, and nothing that was never written reaches a result.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..operands import loadable, positive
from ..torch_functions.attention import with_sinks
from .caches import is_one_row_a_slot
from .unfused import attend, attend_lse

_sdpa = torch._C._nn.scaled_dot_product_attention
_flash_packed = torch.ops.aten._flash_attention_forward.default
_MOST_INT32 = 2**31 - 1
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Contexts:
    """The tokens of every sequence, as many as its pages hold."""

    def __init__(self, block_tables: Tensor, context_lens: Tensor, block_size: int) -> None:
        self.lengths = context_lens[:, None]
        self.capacity = block_tables.shape[1] * block_size
        self.positions = torch.arange(self.capacity, dtype=block_tables.dtype, device=block_tables.device)
        """Where tokens stand in their sequence."""
        self.is_there = self.positions < self.lengths
        self.is_empty = self.lengths == 0
        self.tables, self.block_size = block_tables, block_size
        self._rows: Tensor | None = None
        self._places: tuple[Tensor, Tensor] | None = None

    def within(self, window_left: int) -> Tensor:
        """Which tokens the last position of each sequence reaches."""
        if window_left < 0:
            return self.is_there
        return self.is_there & (self.positions >= self.lengths.long() - (1 + window_left))

    def nothing_is_zero(self, output: Tensor) -> Tensor:
        """A sequence without tokens gives zeros, whatever the first page holds."""
        return output.masked_fill(self.is_empty.view(-1, *(1,) * (output.dim() - 1)), 0.0)

    def read(self, cache: Tensor, dtype: torch.dtype) -> Tensor:
        """The tokens of a cache in the order page, slot, …: batch, token, …."""
        narrow = cache.dtype in _FLOAT8
        stored = cache.view(torch.uint8) if narrow else cache
        if is_one_row_a_slot(stored):
            rows = stored.flatten(0, 1).index_select(0, self._slots(stored.shape[0]).reshape(-1))
            found = rows.view(*self.is_there.shape, *stored.shape[2:])
        else:
            found = stored[self._pages_and_slots(stored.shape[0])]
        return (found.view(cache.dtype) if narrow else found).to(dtype)

    def _slots(self, pages: int) -> Tensor:
        """The slots of all tokens, counted through the cache. What is not there is read from the sequence's first slot, and by
        a sequence without tokens, which may have any pages, from the first of all."""
        if self._rows is None:
            tables = self.tables if pages * self.block_size <= _MOST_INT32 else self.tables.long()
            starts = tables * self.block_size
            slots = (starts[:, :, None] + self.positions[: self.block_size]).reshape(
                self.tables.shape[0], self.capacity
            )
            self._rows = torch.where(self.is_there, slots, starts[:, :1].masked_fill(self.is_empty, 0))
        return self._rows

    def _pages_and_slots(self, pages: int) -> tuple[Tensor, Tensor]:
        """The same as page and slot within it."""
        if self._places is None:
            slots = self._slots(pages)
            self._places = slots.div(self.block_size, rounding_mode="floor"), slots.remainder(self.block_size)
        return self._places


def _dtype(query: Tensor, cache: Tensor) -> torch.dtype:
    """An 8-bit cache widens exactly to whatever the query is."""
    return query.dtype if cache.dtype in _FLOAT8 else torch.promote_types(query.dtype, cache.dtype)


def _gathered(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, context_lens: Tensor, layout: str
) -> tuple[Contexts, Tensor, Tensor]:
    """The contexts, and their keys and values as batch, token, head, element."""
    if layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    contexts = Contexts(block_tables, context_lens, key_cache.shape[1])
    dtype = _dtype(query, key_cache)
    return contexts, contexts.read(key_cache, dtype), contexts.read(value_cache, dtype)


def _by_shared_head(query: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """One query per head: the heads that share a key/value head stand where its queries would."""
    batch, heads, head_dim = query.shape[0], query.shape[-2], query.shape[-1]
    return query.reshape(batch, kv_heads, heads // kv_heads, head_dim).to(dtype)


def decode_sdpa(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None,
    window_left: int,
    layout: str,
) -> Tensor:
    """One query per sequence: gathers its tokens, then torch's function under a mask."""
    query, scale = positive(query, scale)
    contexts, key, value = _gathered(query, key_cache, value_cache, block_tables, context_lens, layout)
    queries = loadable(_by_shared_head(query, key.shape[2], key.dtype))
    reached = contexts.within(window_left)[:, None, None]
    output = _sdpa(queries, key.transpose(1, 2), value.transpose(1, 2), reached, scale=scale)
    return contexts.nothing_is_zero(output).reshape(query.shape).to(query.dtype)


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
    """One query per sequence: gathers its tokens, then torch's FlashAttention 2, which is told how many there are."""
    query, scale = positive(query, scale)
    contexts, key, value = _gathered(query, key_cache, value_cache, block_tables, context_lens, layout)
    batch = context_lens.shape[0]
    rows = loadable(query.reshape(batch, query.shape[-2], query.shape[-1]))
    ends = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    output, lse = _packed(rows, key, value, ends, context_lens, 1, contexts.capacity, False, scale, window_left)
    return (output if sinks is None else with_sinks(output, lse, sinks)).reshape(query.shape)


def _packed(
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    context_lens: Tensor,
    longest: int,
    capacity: int,
    causal: bool,
    scale: float | None,
    window_left: int,
) -> tuple[Tensor, Tensor]:
    """Packed rows over gathered keys and values, each sequence of which has its own length; and the logarithms of the
    softmaxes' sums, in the order row, head."""
    starts = torch.arange(key.shape[0] + 1, dtype=torch.int32, device=rows.device) * capacity
    output, lse = _flash_packed(
        rows,
        loadable(key.flatten(0, 1)),
        loadable(value.flatten(0, 1)),
        ends,
        starts,
        longest,
        capacity,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=window_left,
        window_size_right=-1,
        seqused_k=context_lens.to(torch.int32).contiguous(),
    )[:2]
    lse = lse.reshape(rows.shape[1], rows.shape[0]).transpose(0, 1)
    # It gives plus infinity for a query that attends to nothing.
    return output, lse.masked_fill(lse == torch.inf, -torch.inf)


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
    """One query per sequence: gathers its tokens, then matrix products."""
    contexts, key, value = _gathered(query, key_cache, value_cache, block_tables, context_lens, layout)
    queries = _by_shared_head(query, key.shape[2], key.dtype)
    reached = contexts.within(window_left)[:, None, None]
    columns = None if sinks is None else sinks.view(key.shape[2], -1)[..., None]
    heads_first = queries, key.transpose(1, 2), value.transpose(1, 2)
    output = attend(*heads_first, scale, reached, softcap=softcap, sinks=columns)
    return contexts.nothing_is_zero(output).reshape(query.shape).to(query.dtype)


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
    layout: str,
) -> Tensor:
    """Packed queries: gathers each sequence's tokens, then torch's FlashAttention 2 for packed sequences."""
    gathered = _gathered(query, key_cache, value_cache, block_tables, context_lens, layout)
    output, lse = _prefill_flash(query, *gathered, context_lens, cu_seqlens_q, causal, scale, window_left)
    return output if sinks is None else with_sinks(output, lse, sinks)


def _prefill_flash(
    query: Tensor,
    contexts: Contexts,
    key: Tensor,
    value: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int,
) -> tuple[Tensor, Tensor]:
    query, scale = positive(query, scale)
    ends = cu_seqlens_q.to(torch.int32).contiguous()
    # Told that no sequence has two queries, it takes for granted that each has one.
    longest = max(query.shape[0], 2)
    rows = loadable(query)
    output, lse = _packed(rows, key, value, ends, context_lens, longest, contexts.capacity, causal, scale, window_left)
    # Rows of no sequence are left as they were.
    row = torch.arange(query.shape[0], device=query.device)
    outside = ((row < ends[0]) | (row >= ends[-1]))[:, None]
    return output.masked_fill_(outside[..., None], 0.0), lse.masked_fill(outside, -torch.inf)


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
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Gathers each sequence's tokens, then torch's FlashAttention 2 with the logarithms of the softmaxes' sums."""
    given, query = query, _one_row_each(query)
    gathered = _gathered(query, key_cache, value_cache, block_tables, context_lens, layout)
    ends = torch.arange(query.shape[0] + 1, device=query.device) if cu_seqlens_q is None else cu_seqlens_q
    output, lse = _prefill_flash(query, *gathered, context_lens, ends, causal, scale, window_left)
    return output.reshape(given.shape), lse.reshape(given.shape[:-1])


def _one_row_each(query: Tensor) -> Tensor:
    """Queries as rows, heads, elements: without the axis of one query per sequence, where there is one."""
    return query[:, 0] if query.dim() == 4 else query


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
    """Packed queries: gathers each sequence's tokens, then matrix products of all rows with each sequence."""
    columns = None if sinks is None else sinks[:, None, None]
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    gathered = _gathered(query, key_cache, value_cache, block_tables, context_lens, layout)
    for own, reached, queries, keys, values in _each(query, *gathered, cu_seqlens_q, causal, window_left, window_right):
        attended = attend(queries, keys, values, scale, reached, softcap=softcap, sinks=columns)[0].transpose(0, 1)
        output = torch.where(own[:, :, None], attended.to(query.dtype), output)
    return output


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
    """The same with the logarithms of the softmaxes' sums. Without bounds each sequence has one query."""
    given, query = query, _one_row_each(query)
    ends = torch.arange(query.shape[0] + 1, device=query.device) if cu_seqlens_q is None else cu_seqlens_q
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    logarithms = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    gathered = _gathered(query, key_cache, value_cache, block_tables, context_lens, layout)
    for own, reached, queries, keys, values in _each(query, *gathered, ends, causal, window_left, window_right):
        attended, lse = attend_lse(queries, keys, values, scale, reached, softcap)
        output = torch.where(own[:, :, None], attended[0].transpose(0, 1).to(query.dtype), output)
        logarithms = torch.where(own, lse[0].transpose(0, 1), logarithms)
    return output.reshape(given.shape), logarithms.reshape(given.shape[:-1])


def _each(
    query: Tensor,
    contexts: Contexts,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    causal: bool,
    window_left: int,
    window_right: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """For each sequence: which rows are its own, what each of them reaches; all queries, its keys and values, heads first."""
    queries = query.to(key.dtype).transpose(0, 1)[None]
    ends = cu_seqlens_q.long()
    row = torch.arange(query.shape[0], device=query.device)[:, None]
    for sequence in range(key.shape[0]):
        own = (row >= ends[sequence]) & (row < ends[sequence + 1]) & (contexts.lengths[sequence] > 0)
        # The rows of a sequence are its last positions.
        position = row - ends[sequence + 1] + contexts.lengths[sequence]
        reached = own & contexts.is_there[sequence]
        if causal:
            reached &= contexts.positions <= position
        if window_left >= 0:
            reached &= contexts.positions >= position - window_left
        if window_right >= 0:
            reached &= contexts.positions <= position + window_right
        yield own, reached, queries, key[sequence].transpose(0, 1)[None], value[sequence].transpose(0, 1)[None]
