"""The list of handlers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from layerzero.export import sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from layerzero.export.building import Builder
    from layerzero.export.sizes import Size

    Handler = Callable[..., Any]

Some = TypeVar("Some", bound="Handler")


@dataclass(frozen=True)
class Call:
    """What torch says of the results of a call."""

    #: The results without memory: a tensor, or several.
    results: Any
    #: Which results something reads.
    used: frozenset[int]
    #: The names of the arguments, in the order of the op's schema.
    names: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the only result."""
        found: torch.dtype = self.results.dtype
        return found

    @property
    def shape(self) -> tuple[Size, ...]:
        """The sizes of the only result."""
        return tuple(map(sizes.size, self.results.shape))

    def shape_of(self, result: int) -> tuple[Size, ...]:
        """The sizes of one of several results."""
        return tuple(map(sizes.size, self.results[result].shape))


#: Each op's handler, by the op's name with its overload.
HANDLERS: dict[str, Handler] = {}


def handles(*ops: str) -> Callable[[Some], Some]:
    """Registers the handler of some ops."""

    def register(handler: Some) -> Some:
        for op in ops:
            if op in HANDLERS:
                raise ValueError(f"two handlers for {op}")
            HANDLERS[op] = handler
        return handler

    return register


def passes_on(builder: Builder, call: Call, value: Any, *_: Any) -> Any:
    """The handler of ops whose result is their first argument."""
    return builder.cast(value, call.dtype)
