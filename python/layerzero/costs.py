"""What torch's operators compute and move, counted while a model is traced."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Share(NamedTuple):
    """How much of a forward pass is in calls of operations LayerZero knows."""

    flops: int
    bytes: int
    covered_flops: int
    covered_bytes: int

    def __add__(self, other: Any) -> Share:
        """Of both together."""
        return Share(*(one + another for one, another in zip(self, other, strict=True)))

    @property
    def of_flops(self) -> float:
        """Between 0 and 1; 1 where there is nothing to compute."""
        return self.covered_flops / self.flops if self.flops else 1.0

    @property
    def of_bytes(self) -> float:
        """Between 0 and 1; 1 where nothing is moved."""
        return self.covered_bytes / self.bytes if self.bytes else 1.0


class Costs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch's operators compute and move: operations on numbers, and bytes of tensors read and written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _moves(func):
            made = result if isinstance(result, tuple | list) else (result,)
            given = [item for value in args for item in (value if isinstance(value, tuple | list) else (value,))]
            self.bytes += sum(value.nbytes for value in (*given, *made) if isinstance(value, Tensor))
            count = flop_registry.get(func._overloadpacket)
            self.flops += count(*args, **kwargs, out_val=result) if count is not None else 0
        return result


@cache
def _moves(func: OpOverload) -> bool:
    """Whether an operator reads or writes memory: views do not, nor questions, nor making room."""
    if func.namespace == "prim" or "empty" in func._schema.name:
        return False
    aliases = [result.alias_info for result in func._schema.returns]
    return not any(alias is not None and not alias.is_write for alias in aliases)


def flops_of(function: str, arguments: Mapping[str, Any]) -> int:
    """The operations on numbers of a call of ours that has many."""
    if function == "linear":
        rows, inner = arguments["input"].shape[:-1], arguments["input"].shape[-1]
        return int(2 * math.prod(rows) * inner * arguments["weight"].shape[0])
    if function in ("attention", "cross_attention"):
        sizes, value = arguments["query"].shape, arguments["value"].shape
        by_heads = len(sizes) == 4 and arguments.get("layout") == "BHSD"
        keys = value[-2] if by_heads else value[-3]
        return int(2 * math.prod(sizes[:-1]) * keys * (sizes[-1] + value[-1]))
    return 0
