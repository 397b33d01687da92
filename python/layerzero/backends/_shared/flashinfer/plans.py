"""FlashInfer's wrappers, which are planned before they run.

A plan is made on the host from what tensors hold (lengths, page tables, block lists): reading them stops the host. The
layers of a model are all given the same tensors, so a plan is kept for as long as those hold what they held; where that
cannot be told (see `flash_attn.contents`), it is made again. Wrappers keep their plan in memory of their own and share a
workspace. Both belong to one thread and one stream, where calls follow one another.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tensor_contents import State, states_of

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for the workspace."""

MOST = 16
"""Wrappers a thread keeps; each holds 8 MiB on the device and as much on the host, or as many times that as it has levels."""


def stream_of(device: torch.device) -> int:
    """The stream that calls on a device go to."""
    return 0 if device.type == "cpu" else int(torch._C._cuda_getCurrentRawStream(device.index))


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type != "cpu" and torch.cuda.is_current_stream_capturing()


@dataclass
class Planned:
    """A wrapper that can run, and what planning found out besides."""

    wrapper: Any
    found: Any = None


@dataclass
class _Entry:
    planned: Planned
    tensors: tuple[weakref.ref[Tensor], ...] = ()
    states: tuple[State, ...] | None = None
    told: Hashable = None

    def holds(self, tensors: tuple[Tensor, ...], states: tuple[State, ...] | None, told: Hashable) -> bool:
        """Whether the plan was made from just these tensors, holding what they hold, and told the same."""
        if states is None or states != self.states or told != self.told:
            return False
        return all(ref() is tensor for ref, tensor in zip(self.tensors, tensors, strict=True))


class Plans(threading.local):
    """The wrappers of a thread."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        # Held by the wrappers that use them.
        self._workspaces: weakref.WeakValueDictionary[Hashable, Tensor] = weakref.WeakValueDictionary()

    def get(
        self,
        kind: Hashable,
        device: torch.device,
        make: Callable[[Tensor], Any],
        plan: Callable[[Any], Any],
        tensors: tuple[Tensor, ...],
        told: Hashable = None,
    ) -> Planned:
        """A wrapper that is planned for the tensors.

        `kind` is everything else the wrapper depends on, and `told` what only the plan does: one wrapper serves whatever
        it is told, one after the other. `make` makes a wrapper around a workspace, `plan` plans it from the tensors and
        returns what else it found out.
        """
        if is_capturing(device):
            # Not even a finished plan: a later one would overwrite what the graph reads when it is replayed.
            raise RuntimeError("FlashInfer's wrappers are planned on the host, which a CUDA graph cannot capture")
        # Before anything is read: a write in the meantime must be noticed the next time.
        states = states_of(tensors)
        place = (device.index, stream_of(device), kind)
        entry = self._entries.get(place)
        if entry is not None:
            if entry.holds(tensors, states, told):
                self._entries.move_to_end(place)
                return entry.planned
            wrapper = entry.planned.wrapper
        else:
            wrapper = make(self._workspace(place[:2], device))
        # A plan that fails half-way must not be taken for the one before it.
        self._entries.pop(place, None)
        planned = Planned(wrapper)
        planned.found = plan(wrapper)
        self._entries[place] = _Entry(planned, tuple(weakref.ref(tensor) for tensor in tensors), states, told)
        while len(self._entries) > MOST:
            self._entries.popitem(last=False)
        return planned

    def _workspace(self, place: Hashable, device: torch.device) -> Tensor:
        workspace = self._workspaces.get(place)
        if workspace is None:
            # Its first user must find zeros.
            workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self._workspaces[place] = workspace
        return workspace


plans = Plans()
