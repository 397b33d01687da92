# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Upkeep of a paged key/value cache, in one launch."""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .launching import Launch, planned, power

# Slots of later tokens that are looked at together, and elements that are moved together.
_LATER = 1024
_BLOCK = 2048


@triton.jit
def _append(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slots_ptr,
    tokens, slot_step, width, head_dim, page_size, capacity,
    key_token, key_head, value_token, value_head,
    key_page, key_slot, key_cache_head, value_page, value_slot, value_cache_head,
    LATER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token * slot_step).to(tl.int64)
    # Of several tokens for one slot the last one wins: this one writes nothing if a later one has the same slot.
    beaten = 0
    for first in range(token + 1, tokens, LATER):
        later = first + tl.arange(0, LATER)
        others = tl.load(slots_ptr + later * slot_step, mask=later < tokens, other=-1).to(tl.int64)
        beaten = tl.maximum(beaten, tl.max((others == slot).to(tl.int32), 0))
    # Slots below zero are padding. One beyond the cache cannot be reported from here, and is not written.
    writes = (slot >= 0) & (slot < capacity) & (beaten == 0)
    page, place = slot // page_size, slot % page_size
    row = token.to(tl.int64)
    for first in range(0, width, BLOCK):
        element = first + tl.arange(0, BLOCK)
        there = (element < width) & writes
        head, column = (element // head_dim).to(tl.int64), element % head_dim
        key = tl.load(key_ptr + row * key_token + head * key_head + column, mask=there)
        value = tl.load(value_ptr + row * value_token + head * value_head + column, mask=there)
        key_at = page * key_page + place * key_slot + head * key_cache_head + column
        value_at = page * value_page + place * value_slot + head * value_cache_head + column
        tl.store(key_cache_ptr + key_at, key.to(key_cache_ptr.dtype.element_ty), mask=there)
        tl.store(value_cache_ptr + value_at, value.to(value_cache_ptr.dtype.element_ty), mask=there)


def _steps(cache: Tensor, layout: str) -> tuple[int, int, int]:
    """How far apart pages, slots and heads of a cache are."""
    page, first, second, _ = cache.stride()
    return (page, first, second) if layout == "NHD" else (page, second, first)


@planned
def append(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, layout: str
) -> Any:
    """Writes new keys and values into their slots."""
    tokens, heads, head_dim = key.shape
    size = key_cache.shape[1 if layout == "NHD" else 2]
    width = heads * head_dim
    launch = Launch(
        _append,
        tokens if width else 0,
        key.device,
        (
            *(tokens, slot_mapping.stride(0), width, max(head_dim, 1), max(size, 1), key_cache.shape[0] * size),
            *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
            *_steps(key_cache, layout),
            *_steps(value_cache, layout),
        ),
        (min(power(max(tokens, 2)), _LATER), min(power(max(width, 2)), _BLOCK)),
    )

    def call(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        launch(key, value, key_cache, value_cache, slots)

    return call, (key, value, key_cache, value_cache, slot_mapping)


KERNELS: dict[str, Callable[..., Any]] = {"triton.kv_append": append}
