"""Counts what a call launches: operators of aten that compute something, seen on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: They only allocate, or make a number on the host.
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "scalar_tensor", "_unsafe_view", "detach")


class Launches(TorchDispatchMode):
    """The operators that ran within, by name, and the bytes they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # What gives an alias of an argument and writes to none is a view.
        view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)]
        if not view and name not in _FREE and tensors:
            self.names.append(name)
            self.bytes += sum(one.numel() * one.element_size() for one in tensors)
        return result


def launches(call: Callable[[], Any]) -> Launches:
    """What a call launches."""
    with Launches() as seen:
        call()
    return seen
