"""Notices when the weights of a model are no longer those that were compiled."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

#: The pause after a look, in multiples of the time the look took: looking takes 1% of the time at most.
_PAUSE = 100


class WatchedWeights:
    """The state of a model's modules and tensors when it was compiled.

    Of each tensor it keeps the address and the version, which torch increments at each change in place. Changes through
    `tensor.data` change neither, and go unnoticed.
    """

    def __init__(self, model: Any, constants: Iterable[torch.Tensor], changing: Iterable[torch.Tensor]) -> None:
        modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
        self._parts = [one._modules for one in modules]
        self._tensors = [held for one in modules for held in (one._parameters, one._buffers) if held]
        #: Addresses of buffers that the model itself writes to.
        self._left_out = frozenset(one.data_ptr() for one in changing)
        known = (one for one in constants if not one.is_inference())
        self._constants = [one for one in known if _address(one) not in self._left_out]
        self._before = self._seen()
        #: When to look again, by the clock of `time.perf_counter`.
        self.next_look = 0.0

    def _seen(self) -> tuple[int, int]:
        """The sum of the versions of all tensors, and a hash of the modules and of the addresses of the tensors."""
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
        """What changed since the last look: ``""``, ``"in place"`` or ``"replaced"``."""
        begin = time.perf_counter()
        before = self._before
        try:
            seen = self._seen()
        except RuntimeError:
            # Another thread is adding or removing a module. The next look sees the change.
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
        # A sparse tensor, or one without memory.
        return id(tensor)
