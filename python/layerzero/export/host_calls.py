"""Calls that stay torch's. An op without a handler becomes one host node for each of its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Slot:
    """Stands for an argument that is an input of the node. A number is passed as a tensor of one element."""

    at: int
    is_number: bool = False


@dataclass(frozen=True)
class HostCall:
    """A function of torch and its arguments. Those that are inputs of the node are a `Slot`."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    origin: str = ""

    @property
    def name(self) -> str:
        """The function, for reports."""
        return str(self.target)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Any:
        def filled(argument: Any) -> Any:
            if isinstance(argument, Slot):
                given = inputs[argument.at]
                return int(given.item()) if argument.is_number else given
            return argument

        args, kwargs = pytree.tree_map(filled, (self.args, self.kwargs), is_leaf=lambda one: isinstance(one, Slot))
        return self.target(*args, **kwargs)

    def with_numbers(self, names: Sequence[str | None], number: Callable[[str], int]) -> HostCall:
        """The same with the numbers among its inputs, by the names of those, which are known once sizes are."""

        def filled(argument: Any) -> Any:
            known = isinstance(argument, Slot) and argument.is_number
            return number(str(names[argument.at])) if known else argument

        args, kwargs = pytree.tree_map(filled, (self.args, self.kwargs), is_leaf=lambda one: isinstance(one, Slot))
        return HostCall(self.target, args, kwargs, self.origin)


@dataclass
class HostCalls:
    """All calls of a model that stay torch's. A host node has the index of its call."""

    calls: list[HostCall] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.calls)

    def __call__(self, call: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Makes a call and returns all its results. The graph makes each call once in a run."""
        # If the model uses autocast itself, the casts are calls in the graph already.
        with torch.no_grad(), torch._C._DisableAutocast():
            results = self.calls[call](inputs)
        several = results if isinstance(results, (tuple, list)) else [results]
        return [one.contiguous() if isinstance(one, torch.Tensor) else None for one in several]
