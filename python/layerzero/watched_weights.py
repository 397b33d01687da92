"""Whether the weights of a model are still those that were compiled."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

#: How many times as long as a look took no other is taken: looking costs 1% of the time at most.
_PAUSE = 100


class WatchedWeights:
    """The tensors and parts of a model as they were.

    Each tensor has a number that torch increments when it is changed in place, and an address. `tensor.data` changes neither.
    """

    def __init__(self, model: Any, constants: Iterable[torch.Tensor], changing: Iterable[torch.Tensor]) -> None:
        modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
        self._parts = [one._modules for one in modules]
        self._tensors = [held for one in modules for held in (one._parameters, one._buffers) if held]
        #: What the model changes itself.
        self._left_out = frozenset(one.data_ptr() for one in changing)
        known = (one for one in constants if not one.is_inference())
        self._constants = [one for one in known if _address(one) not in self._left_out]
        self._before = self._seen()
        #: When to look again, by the clock of `time.perf_counter`.
        self.next_look = 0.0

    def _seen(self) -> tuple[int, int]:
        """The number of changes in place, and a hash of what there is."""
        versions, places = 0, 0
        for part in self._parts:
            for module in part.values():
                places = hash((places, id(module)))
        for held in self._tensors:
            for tensor in held.values():
                if tensor is None or (at := _address(tensor)) in self._left_out:
                    continue
                places = hash((places, at))
                versions += 0 if tensor.is_inference() else tensor._version
        for tensor in self._constants:
            versions += tensor._version
        return versions, places

    def look(self) -> str:
        """What changed: ``""``, ``"in place"`` or ``"replaced"``. Tells it once."""
        begin = time.perf_counter()
        before = self._before
        try:
            seen = self._seen()
        except RuntimeError:
            # Another thread adds or removes a module now: the next look sees all of it.
            seen = before
        self._before = seen
        end = time.perf_counter()
        self.next_look = end + _PAUSE * (end - begin)
        if seen[1] != before[1]:
            return "replaced"
        return "in place" if seen[0] != before[0] else ""


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        # Sparse tensors, and those without memory.
        return id(tensor)
