"""A cache of keys or values, read and written as pages."""

from __future__ import annotations

import math

from torch import Tensor

#: Tokens of a page, where the capacity of a cache is a multiple of it.
_PAGE = 64


def pages_of(cache: Tensor) -> tuple[int, int] | None:
    """How many pages each sequence of a cache (batch, heads, capacity, width) has, and how many tokens each of them. None where the
    heads of a token do not lie beside each other."""
    if cache.dim() != 4 or not cache.transpose(1, 2).is_contiguous():
        return None
    size = math.gcd(cache.shape[2], _PAGE)
    return cache.shape[2] // size, size


def as_pages(cache: Tensor, pages: tuple[int, int]) -> Tensor:
    """A cache as (pages, tokens, heads, width), in the same memory."""
    count, size = pages
    return cache.transpose(1, 2).view(cache.shape[0] * count, size, cache.shape[1], cache.shape[3])
