"""Upkeep of a paged key/value cache, in place, without a step that waits for the device.

Of several tokens for one slot the last one must win, and writes to one place happen in any order. So all of them write
what the last one brings. Tokens that are skipped write with another one that is not, or, if there is none, what is there.
"""

import torch
from torch import Tensor

from ..torch.kv_cache import rounded


@torch.no_grad()
def append(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, layout: str
) -> None:
    """Writes new keys and values into their slots."""
    if slot_mapping.shape[0] == 0 or key_cache.numel() == 0:
        return
    if layout == "HND":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    slots, size = slot_mapping.long(), key_cache.shape[1]
    written = slots >= 0
    slots = torch.where(written, slots, slots.amax().clamp(min=0))
    winner = _last_of_each(slots * 2 + written, slots * 2 + 1)
    written = written.any()[None, None, None]
    place = (slots.div(size, rounding_mode="floor"), slots.remainder(size))
    for new, cache in ((key, key_cache), (value, value_cache)):
        stored = _bytes(cache)
        stored.index_put_(place, torch.where(written, _bytes(rounded(new[winner], cache.dtype)), stored[place]))


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
