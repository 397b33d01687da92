"""Kernels of dense attention, of a function that makes one library's call.

What differs between libraries is the call itself. That a scale is positive, that operands are in the order batch,
sequence, heads, element and can be loaded from, and that the result is in the caller's layout, is the same for all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from layerzero.kernels import direct

from .operands import bshd, is_plain, positive
from .taking import named, taking


class Call(NamedTuple):
    """The arguments of a call. What a kernel does not take has its default."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool = False
    scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    layout: str = "BSHD"
    attn_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def window(self) -> tuple[int, int]:
        """How many earlier and later keys a query attends to; -1 for all."""
        return self.window_left, self.window_right

    def is_plain(self) -> bool:
        """Whether the library can be called with the arguments as they are."""
        return is_plain(self.layout, self.scale, *self.operands)

    def loaded(self, operand: Callable[[Tensor, str], Tensor]) -> "Call":
        """What :func:`lse_kernel` takes, with a positive scale and operands in the order batch, sequence, heads, element."""
        query, scale = positive(self.query, self.scale)
        operands = operand(query, self.layout), operand(self.key, self.layout), operand(self.value, self.layout)
        return Call(*operands, self.causal, scale, self.window_left, self.window_right, self.softcap)


def dense(
    attend: Callable[[Call], Tensor],
    *takes: str,
    operand: Callable[[Tensor, str], Tensor] = bshd,
    whole: Callable[[Call], tuple[Any, ...] | None] | None = None,
) -> Callable[..., Tensor]:
    """A kernel of dense attention.

    Args:
        attend: makes the library's call. Its operands are in the order batch, sequence, heads, element, and its scale is
            positive; so is the order of its result.
        takes: which arguments the kernel takes, besides query, key, value, scale and layout.
        operand: makes an operand out of a tensor and its layout.
        whole: the library's call alone, of the arguments as they are given (see :func:`layerzero.kernels.direct`); ``None``
            where they have to be changed first.
    """
    always = ("query", "key", "value", "scale", "layout")
    unknown = set(takes).difference(Call._fields)
    if unknown:
        raise TypeError(f"dense attention has no {', '.join(sorted(unknown))}")
    names = [name for name in Call._fields if name in always or name in takes]

    def run(*given: Any, **by_name: Any) -> Tensor:
        arguments = dict(zip(names, given, strict=False), **by_name)
        layout = arguments["layout"]
        query, arguments["scale"] = positive(arguments["query"], arguments["scale"])
        arguments["query"] = operand(query, layout)
        arguments["key"] = operand(arguments["key"], layout)
        arguments["value"] = operand(arguments["value"], layout)
        output = attend(Call(**arguments))
        return output.transpose(1, 2) if layout == "BHSD" else output

    def plan(*given: Any, **by_name: Any) -> tuple[Any, ...] | None:
        return whole(Call(**dict(zip(names, given, strict=False), **by_name))) if whole is not None else None

    named(run, names)
    return direct(plan)(run) if whole is not None else run


def lse_kernel(run: Callable[[Call], tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A kernel that also gives the logarithms of the softmaxes' sums: it takes neither a mask, nor slopes, nor dropout."""
    return taking(Call, Call._fields[: Call._fields.index("layout") + 1], run)
