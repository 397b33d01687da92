"""Upkeep of a paged key/value cache, in place, without a step that waits for the device.

Of several tokens for one slot the last one must win, and writes to one place happen in any order. So all of them write
what the last one brings. A token that is skipped writes to slot 0, with the tokens of that slot; if it has none, all
write what is there.
"""

import torch
from torch import Tensor

from ..torch_functions.kv_cache import rounded

_FEW = 1024
"""Tokens whose slots are compared pair by pair; more of them find each other in a table of all slots."""


def append(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, layout: str
) -> None:
    """Writes new keys and values into their slots."""
    tokens = slot_mapping.shape[0]
    if tokens == 0 or key_cache.numel() == 0:
        return
    if key.requires_grad or value.requires_grad or key_cache.requires_grad or value_cache.requires_grad:
        # A cache is no part of a graph. `torch.no_grad` would take every call longer than this.
        key, value, key_cache, value_cache = (one.detach() for one in (key, value, key_cache, value_cache))
    if layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    pages, size, heads, head_dim = key_cache.shape
    key, value = _bytes(rounded(key, key_cache.dtype)), _bytes(rounded(value, value_cache.dtype))
    key_cache, value_cache = _bytes(key_cache), _bytes(value_cache)
    slots = slot_mapping if slot_mapping.dtype == torch.int64 else slot_mapping.long()
    places = slots.clamp(min=0)
    sources = _sources(slots, places, pages * size)
    # What slot 0 holds, then the tokens: of keys, and of values.
    rows = torch.cat((key_cache[0, :1], key, value_cache[0, :1], value))
    new_keys, new_values = rows.view(2, tokens + 1, heads, head_dim)[:, sources]
    if is_one_row_a_slot(key_cache) and is_one_row_a_slot(value_cache):
        # Assigned to, not by `index_put_`: torch reads the arguments of an assignment in half the time.
        key_cache.flatten(0, 1)[places] = new_keys
        value_cache.flatten(0, 1)[places] = new_values
        return
    page, slot = places.div(size, rounding_mode="floor"), places.remainder(size)
    key_cache[page, slot] = new_keys
    value_cache[page, slot] = new_values


def _sources(slots: Tensor, places: Tensor, capacity: int) -> Tensor:
    """For each token, the number (from 1) of the last token with the slot it writes to, or 0 where no token has it."""
    tokens = slots.shape[0]
    numbers = torch.arange(1, tokens + 1, device=slots.device)
    if tokens <= _FEW:
        return (places[:, None] == slots).mul(numbers).amax(1)
    # Only the entries of places are ever written or read.
    last = torch.empty(capacity, dtype=torch.int64, device=slots.device)
    last.scatter_reduce_(0, places, numbers.mul_(slots >= 0), "amax", include_self=False)
    return last[places]


def is_one_row_a_slot(cache: Tensor) -> bool:
    """Whether pages and slots are one dimension as they lie."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


def _last_of_each(numbers: Tensor, wanted: Tensor) -> Tensor:
    """For each wanted number, the place of the last of the largest numbers up to it."""
    ordered, order = numbers.sort(stable=True)
    return order[torch.searchsorted(ordered, wanted, right=True) - 1]


def _bytes(tensor: Tensor) -> Tensor:
    """8-bit floats as bytes: they are only moved."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@torch.no_grad()
def compact(key_cache: Tensor, value_cache: Tensor, moves: Tensor) -> None:
    """Moves pages; every source is read before anything is written."""
    if moves.shape[0] == 0 or key_cache.numel() == 0:
        return
    source, target = moves.long().unbind(1)
    target = target.contiguous()
    source = source[_last_of_each(target, target)]
    for cache in (key_cache, value_cache):
        stored = _bytes(cache)
        stored.index_put_((target,), stored.index_select(0, source))
