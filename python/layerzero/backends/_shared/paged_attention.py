"""Kernels of attention over pages, of a function that makes one library's call: for libraries whose caches are in the order
page, slot, heads, element (NHD)."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .operands import check_caches, loadable, positive
from .packed_rows import Rows, rows_of


class Pages(NamedTuple):
    """What both kinds of calls give to a library."""

    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    scale: float | None
    window_left: int
    softcap: float

    @property
    def slots(self) -> int:
        """How many tokens the pages of a sequence have room for."""
        return self.block_tables.shape[1] * self.key_cache.shape[1]


#: Makes a library's call for queries (batch, 1, heads, element).
Decode = Callable[[Tensor, Pages], Tensor]
#: The same for packed queries (rows, heads, element): with the rows of the sequences, their bounds, and whether it is causal.
Prefill = Callable[[Tensor, Pages, Rows, Tensor, bool], Tensor]


def _in_order(pages: Pages, layout: str) -> Pages:
    check_caches(pages.key_cache, pages.value_cache)
    if layout != "HND":
        return pages
    return pages._replace(key_cache=pages.key_cache.transpose(1, 2), value_cache=pages.value_cache.transpose(1, 2))


def decode(attend: Decode, operand: Callable[[Tensor], Tensor] = loadable) -> Callable[..., Tensor]:
    """A kernel for one query per sequence."""

    def paged_decode(
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
        query, scale = positive(query, scale)
        rows = operand(query if query.dim() == 4 else query.unsqueeze(1))
        pages = Pages(key_cache, value_cache, block_tables, context_lens, scale, window_left, softcap)
        return attend(rows, _in_order(pages, layout)).view(query.shape)

    return paged_decode


def prefill(attend: Prefill, operand: Callable[[Tensor], Tensor] = loadable) -> Callable[..., Tensor]:
    """A kernel for queries that are packed along the first dimension. Rows of no sequence are zeros."""

    def paged_prefill(
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
        rows = rows_of("cu_seqlens_q", cu_seqlens_q, query.shape[0])
        query, scale = positive(query, scale)
        pages = _in_order(
            Pages(key_cache, value_cache, block_tables, context_lens, scale, window_left, softcap), layout
        )
        return rows.zero_others(attend(operand(query), pages, rows, cu_seqlens_q, causal))

    return paged_prefill
