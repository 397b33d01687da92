"""Upkeep of a paged key/value cache, in place."""

import torch
from torch import Tensor

from ..data_errors import bad_data, check_indices

_LARGEST_E4M3 = 448.0
_LARGEST_E5M2 = 57344.0
_FEW = 128
"""Slots that are checked one by one."""


def append(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, layout: str
) -> None:
    """Writes new keys and values into their slots."""
    if key.requires_grad or value.requires_grad or key_cache.requires_grad or value_cache.requires_grad:
        # A cache is no part of a graph. `torch.no_grad` would take every call longer than this.
        key, value, key_cache, value_cache = (one.detach() for one in (key, value, key_cache, value_cache))
    if layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    pages, block_size, heads, head_dim = key_cache.shape
    capacity = pages * block_size
    tokens, slots = _writes(slot_mapping, capacity)
    if tokens is not None:
        key, value = key[tokens], value[tokens]
    if slots.shape[0] == 0:
        return
    key, value = rounded(key, key_cache.dtype), rounded(value, value_cache.dtype)
    # Assigned to, not by `index_put_`: torch reads the arguments of an assignment in half the time.
    if layout == "NHD" and key_cache.is_contiguous() and value_cache.is_contiguous():
        # One row for each slot.
        rows = capacity, heads, head_dim
        key_cache.view(rows)[slots] = key
        value_cache.view(rows)[slots] = value
        return
    place = slots.div(block_size, rounding_mode="floor"), slots.remainder(block_size)
    key_cache[place] = key
    value_cache[place] = value


def _writes(slots: Tensor, capacity: int) -> tuple[Tensor | None, Tensor]:
    """The tokens that are written (`None` for all) and their slots: no padding, and of each slot the last token."""
    if slots.numel() <= _FEW and not torch._is_functional_tensor(slots):
        # Few numbers are looked at sooner one by one than by operators.
        numbers: list[int] = slots.tolist()
        if not numbers or (0 <= min(numbers) and max(numbers) < capacity and len(set(numbers)) == len(numbers)):
            return None, slots if slots.dtype == torch.int64 else slots.long()
    slots = slots.long()
    if int(slots.max()) >= capacity:
        place = int((slots >= capacity).nonzero()[0])
        raise bad_data(f"slot_mapping[{place}]", int(slots[place]), f"but the cache has {capacity} slots")
    tokens = None
    if int(slots.min()) < 0:
        tokens = (slots >= 0).nonzero().flatten()
        slots = slots[tokens]
    last = last_of_each(slots)
    if last is not None:
        tokens, slots = (last if tokens is None else tokens[last]), slots[last]
    return tokens, slots


def last_of_each(places: Tensor) -> Tensor | None:
    """The last occurrence of every place, or `None` when no place occurs twice."""
    ordered, order = places.sort(stable=True)
    is_last = torch.ones(places.shape, dtype=torch.bool, device=places.device)
    torch.ne(ordered[1:], ordered[:-1], out=is_last[:-1])
    return None if is_last.all() else order[is_last]


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype; 8-bit floats saturate, where torch gives NaN or infinity."""
    if tensor.dtype == dtype:
        return tensor
    if dtype == torch.float8_e4m3fn:
        return tensor.clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(dtype)
    if dtype == torch.float8_e5m2:
        return torch.where(tensor.isinf(), tensor, tensor.clamp(-_LARGEST_E5M2, _LARGEST_E5M2)).to(dtype)
    return tensor.to(dtype)


@torch.no_grad()
def compact(key_cache: Tensor, value_cache: Tensor, moves: Tensor) -> None:
    """Moves pages; every source is read before anything is written."""
    if moves.shape[0] == 0:
        return
    check_indices("moves", moves, key_cache.shape[0])
    source, target = moves.long().unbind(1)
    last = last_of_each(target)
    if last is not None:
        source, target = source[last], target[last]
    for cache in (key_cache, value_cache):
        cache.index_put_((target,), cache.index_select(0, source))
