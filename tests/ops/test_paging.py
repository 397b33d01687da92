"""Pages in compressed rows, and slots, as other servers have them."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples


def listed(tables: list[list[int]], lasts: list[int], dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, ...]:
    """Page tables as compressed rows."""
    indptr = torch.tensor([0, *(len(pages) for pages in tables)]).cumsum(0).to(dtype)
    indices = torch.tensor([page for pages in tables for page in pages], dtype=dtype)
    return indptr, indices, torch.tensor(lasts, dtype=dtype)


@examples(100)
@given(st.data())
def test_tables_name_the_same_tokens(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    counts = data.draw(st.lists(st.integers(0, 3), max_size=4))
    tables = [[data.draw(st.integers(0, 9)) for _ in range(count)] for count in counts]
    lasts = [data.draw(st.integers(1, size)) if count else 0 for count in counts]
    dtype = data.draw(st.sampled_from((torch.int32, torch.int64)))
    for width in (None, max(counts, default=0) + 2):
        got = lz.page_tables(*listed(tables, lasts, dtype), size, max_pages=width)
        assert got.block_tables.dtype == got.context_lens.dtype == dtype
        assert got.block_tables.shape == (len(tables), max(counts, default=0) if width is None else width)
        for sequence, (pages, last) in enumerate(zip(tables, lasts, strict=True)):
            assert got.block_tables[sequence, : len(pages)].tolist() == pages
            assert not got.block_tables[sequence, len(pages) :].any()
            assert got.context_lens[sequence] == ((len(pages) - 1) * size + last if pages else 0)


def test_attention_over_listed_pages_is_attention_over_their_tokens() -> None:
    torch.manual_seed(0)
    query, key_cache, value_cache = torch.randn(3, 4, 8), torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 8)
    csr = listed([[5, 0], [2], [3, 4, 1]], [1, 4, 3])
    tables = lz.page_tables(*csr, page_size=4)
    got = lz.paged_attention(query, key_cache, value_cache, *tables)
    for sequence, (pages, length) in enumerate((([5, 0], 5), ([2], 4), ([3, 4, 1], 11))):
        keys, values = (cache[pages].flatten(0, 1)[:length].double() for cache in (key_cache, value_cache))
        for head in range(4):
            weights = torch.softmax(keys[:, head // 2] @ query[sequence, head].double() * 8**-0.5, 0)
            torch.testing.assert_close(
                got[sequence, head].double(), weights @ values[:, head // 2], atol=1e-5, rtol=1e-5
            )
    # The layers of a model share the tables, until something else is written.
    assert lz.page_tables(*csr, page_size=4) is tables
    csr[2][1] = 2
    assert lz.page_tables(*csr, page_size=4).context_lens.tolist() == [5, 2, 11]


def edit(place: int, index: int, value: int) -> tuple[torch.Tensor, ...]:
    made = listed([[5, 0], [2]], [1, 4])
    made[place][index] = value
    return made


@pytest.mark.parametrize(
    ("arguments", "size", "text"),
    [
        (edit(0, 2, 4), 4, r"kv_indptr\[2\] is 4, expected 2 to 3, ascending"),
        (edit(0, 1, -1), 4, r"kv_indptr\[1\] is -1, expected 0 to 3, ascending"),
        (edit(2, 1, 5), 4, r"kv_last_page_len\[1\] is 5, expected 1 to 4"),
        (edit(2, 0, 0), 4, r"kv_last_page_len\[0\] is 0, expected 1 to 4"),
        (edit(2, 0, 1), 0, r"page_size is 0, expected 1 or more"),
        ((*edit(2, 0, 1)[:2], torch.ones(3, dtype=torch.int32)), 4, "kv_indptr has 3 numbers, kv_last_page_len has 3"),
        ((torch.zeros(3), *edit(2, 0, 1)[1:]), 4, "'kv_indptr' is torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, size: int, text: str) -> None:
    with pytest.raises(lz.InvalidCallError, match=text):
        lz.page_tables(*arguments, size)


def test_no_tensor_is_refused() -> None:
    with pytest.raises(lz.errors.ArgumentTypeError, match="'kv_indptr' is a list"):
        lz.page_tables([0, 1], torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 4)  # type: ignore[arg-type]


def test_slot_mapping_is_that_of_vllm() -> None:
    """vLLM's `slot_mapping`: slot s is place s % block_size of block s // block_size, and -1 is padding."""
    torch.manual_seed(0)
    key, value = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    key_cache, value_cache = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    slots = torch.tensor([9, -1, 0, 7])
    lz.kv_append(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slots)
    for cache, given_ in ((key_cache, key), (value_cache, value)):
        want = torch.zeros(12, 2, 8)
        want[[9, 0, 7]] = given_[[0, 2, 3]]
        assert torch.equal(cache.flatten(0, 1), want)


def test_tables_that_were_written_to_are_made_again() -> None:
    pointers, pages, last = torch.tensor([0, 2, 3]), torch.tensor([4, 1, 7]), torch.tensor([3, 2])
    tables = lz.page_tables(pointers, pages, last, 16)
    tables.context_lens.add_(1)
    assert lz.page_tables(pointers, pages, last, 16).context_lens.tolist() == [19, 2]
