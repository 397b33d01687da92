"""Pages of sequences as compressed rows (CSR), as FlashInfer and SGLang have them, turned into block tables."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from layerzero.errors import ArgumentTypeError, InvalidCallError

if TYPE_CHECKING:
    from torch import Tensor

    from layerzero.backends._shared.tensor_contents import Remembered

__all__ = ["PageTables", "page_tables"]


class PageTables(NamedTuple):
    """The pages of sequences, as :func:`layerzero.paged_attention` takes them."""

    block_tables: Tensor
    """The pages of each sequence, one row each; 0 behind the last."""
    context_lens: Tensor
    """How many tokens each sequence has."""


# By page size and width. What was made of tensors is made again when they hold something else.
_MOST = 8
_known: OrderedDict[tuple[int, int | None], Remembered[tuple[PageTables, tuple[int | None, ...]]]] = OrderedDict()


def page_tables(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    page_size: int,
    *,
    max_pages: int | None = None,
) -> PageTables:
    """Block tables and context lengths out of pages in compressed rows (CSR).

    Sequence b has the pages ``kv_indices[kv_indptr[b] : kv_indptr[b + 1]]``, all full but the last, which has
    ``kv_last_page_len[b]`` tokens. The result goes to :func:`layerzero.paged_attention`, and works with
    :func:`layerzero.mla_attention` too::

        tables = lz.page_tables(kv_indptr, kv_indices, kv_last_page_len, page_size=16)
        out = lz.paged_attention(query, key_cache, value_cache, *tables)

    Tensors that hold the same give the same tables, so that the layers of a model share them.

    Args:
        kv_indptr: where the pages of each sequence begin and end in `kv_indices`: one more than there are sequences.
        kv_indices: the pages of all sequences. There may be more than `kv_indptr` names.
        kv_last_page_len: how many tokens are in the last page of each sequence, 1 to `page_size`. Not looked at for a
            sequence without pages.
        page_size: how many tokens a page holds.
        max_pages: no sequence has more pages. Without it, `kv_indptr` is read by the host, which waits for the GPU. With it
            nothing is read, so that it works in a CUDA graph, and what the tensors hold is not checked.

    Raises:
        InvalidCallError: shapes, dtypes or contents do not fit together.
    """
    from layerzero.backends._shared.tensor_contents import Remembered

    _check(kv_indptr, kv_indices, kv_last_page_len, page_size)
    if max_pages is not None:
        return _tables(page_size, max_pages, kv_indptr, kv_indices, kv_last_page_len)
    known = _known.get((page_size, max_pages))
    if known is None:
        known = _known[page_size, max_pages] = Remembered(partial(_with_versions, page_size))
        while len(_known) > _MOST:
            _known.popitem(last=False)
    tables, versions = known.of(kv_indptr, kv_indices, kv_last_page_len)
    if _versions(tables) == versions:
        return tables
    # Whoever got them has written to them.
    del _known[page_size, max_pages]
    return page_tables(kv_indptr, kv_indices, kv_last_page_len, page_size)


def _with_versions(page_size: int, *given: Tensor) -> tuple[PageTables, tuple[int | None, ...]]:
    tables = _checked(page_size, *given)
    return tables, _versions(tables)


def _versions(tables: PageTables) -> tuple[int | None, ...]:
    """How often each was written to; torch does not count it for tensors of inference mode."""
    return tuple(None if one.is_inference() else one._version for one in tables)


def _check(kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, page_size: int) -> None:
    import torch

    given = {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "kv_last_page_len": kv_last_page_len}
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            text = f"page_tables: '{name}' is a {type(tensor).__name__}, expected a tensor"
            raise ArgumentTypeError(text, code="WRONG_TYPE", hint="pass a torch tensor of int32 or int64")
        if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
            text = f"page_tables: '{name}' is {tensor.dtype} of shape {list(tensor.shape)}"
            raise InvalidCallError(text, code="WRONG_SHAPE", hint="pass int32 or int64 with one dimension")
        if tensor.device != kv_indptr.device:
            text = f"page_tables: '{name}' is on {tensor.device} but 'kv_indptr' is on {kv_indptr.device}"
            raise InvalidCallError(text, code="MIXED_DEVICES", hint="move all of them to one device")
    if kv_indptr.shape[0] != kv_last_page_len.shape[0] + 1:
        text = (
            f"page_tables: kv_indptr has {kv_indptr.shape[0]} numbers, kv_last_page_len has {kv_last_page_len.shape[0]}"
        )
        raise InvalidCallError(text, code="WRONG_SIZE", hint="kv_indptr has one number more than there are sequences")
    if page_size < 1:
        raise InvalidCallError(f"page_tables: page_size is {page_size}, expected 1 or more", code="BAD_PARAM")


def _checked(page_size: int, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor) -> PageTables:
    """The tables of what the host has read and found right."""
    from layerzero.backends._shared.data_errors import bad_data

    ends, lasts = kv_indptr.tolist(), kv_last_page_len.tolist()
    previous = 0
    for place, end in enumerate(ends):
        if not previous <= end <= kv_indices.shape[0]:
            raise bad_data(f"kv_indptr[{place}]", end, f"expected {previous} to {kv_indices.shape[0]}, ascending")
        previous = end
    counts = [end - start for start, end in itertools.pairwise(ends)]
    for sequence, (count, last) in enumerate(zip(counts, lasts, strict=True)):
        if count and not 1 <= last <= page_size:
            raise bad_data(
                f"kv_last_page_len[{sequence}]", last, f"expected 1 to {page_size}, which is what a page holds"
            )
    return _tables(page_size, max(counts, default=0), kv_indptr, kv_indices, kv_last_page_len)


def _tables(
    page_size: int, max_pages: int, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor
) -> PageTables:
    import torch

    starts, counts = kv_indptr[:-1], kv_indptr.diff()
    column = torch.arange(max_pages, device=kv_indptr.device, dtype=kv_indptr.dtype)
    is_page = column < counts[:, None]
    if kv_indices.shape[0]:
        place = (starts[:, None] + column).clamp_(0, kv_indices.shape[0] - 1)
        tables = torch.where(is_page, kv_indices[place.long()], 0)
    else:
        tables = torch.zeros(is_page.shape, dtype=kv_indices.dtype, device=kv_indices.device)
    lengths = torch.where(counts > 0, (counts - 1) * page_size + kv_last_page_len, 0)
    # Tables and lengths have one dtype: kernels of some libraries take int32 alone.
    return PageTables(tables, lengths.to(kv_indices.dtype))
