"""Linear layers on a CPU that multiply with packed copies of their weights, which may be rounded to integers.

Few rows are multiplied with the copy, many with the weight itself: which is faster is measured when a layer is packed, at
:data:`ROWS`. A copy is made again when its weight was written to or moved. Where gradients of the weight are wanted, under autocast,
while a graph is compiled, and for tensors that are not plain ones, the layer runs as before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from layerzero._native import linear
from layerzero.bench.rounds import interleaved
from layerzero.errors import InvalidCallError
from layerzero.integrations.models.replacing import is_replaced
from layerzero.packing import PackedWeight, pack

__all__ = ["Packed", "forward", "packed", "release"]

#: Rows of the input at which both products are timed.
ROWS = (1, 4, 16, 64)
#: How much faster the copy must be to be kept.
_GAIN = 1.05
#: Rounds of a measurement, and microseconds of one of them.
_ROUNDS, _ROUND_US = 5, 2_000.0
#: What weights may be.
_DTYPES = frozenset([torch.float32, torch.bfloat16, torch.float16])
#: Where a module keeps its copy.
_COPY = "_lz_packed"


@dataclass
class Packed:
    """A copy of the weight of a layer."""

    weight: PackedWeight
    #: Of the weight that was copied: where it was, and how often it had been written to.
    address: int
    version: int
    #: The copy is used up to so many rows.
    most_rows: int
    #: How many times faster it is, by rows.
    gain: dict[int, float]
    #: The integers it is rounded to, if it is.
    dtype: str | None = None

    def follow(self, weight: torch.Tensor) -> bool:
        """Copies a weight again that was written to or moved. Whether the copy is one of it: integers are never NaN."""
        if weight._version != self.version or weight.data_ptr() != self.address:
            try:
                self.weight = pack(weight.detach(), dtype=self.dtype)
            except InvalidCallError:
                return False
            self.version, self.address = weight._version, weight.data_ptr()
        return True


#: Times the product with a weight and the product with its copy, in microseconds, at a number of rows.
Timing = Callable[[torch.Tensor, PackedWeight, int], tuple[float, float]]
#: What was measured, by shape, dtype and threads of the weight.
Known = dict[tuple[Any, ...], dict[int, float]]


def packed(
    module: nn.Module, known: Known, timing: Timing | None = None, dtype: str | None = None
) -> Packed | str | None:
    """Packs the weight of a layer; why not; None where it is no linear layer.

    Args:
        module: any module.
        known: what was measured for layers of this size before; what is measured now is added.
        timing: how to measure.
        dtype: the integers to round to, ``"int8"`` or ``"int4"``.
    """
    if not isinstance(module, nn.Linear):
        return None
    weight: Any = module._parameters.get("weight")
    if (why := _not_packable(module, weight)) is not None:
        return f"packed weight: {why}"
    key = (*weight.shape, weight.dtype, dtype, torch.get_num_threads())
    copied = None
    if dtype is not None and not weight.isfinite().all():
        return "packed weight: it has numbers that are not finite, which no integer is"
    if key not in known:
        copied = pack(weight.detach(), dtype=dtype)
        known[key] = _gains(weight.detach(), copied, timing or _timed)
    gain = {rows: times for rows, times in known[key].items() if times >= _GAIN}
    if not gain:
        return "packed weight: the product with the weight as it is was as fast here"
    copied = copied or pack(weight.detach(), dtype=dtype)
    copy = Packed(copied, weight.data_ptr(), weight._version, max(gain), gain, dtype)
    module.__dict__[_COPY] = copy
    return copy


def release(module: nn.Module) -> None:
    """Frees the copy of a layer."""
    module.__dict__.pop(_COPY, None)


def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """The forward of a layer that has a copy of its weight."""
    copy: Packed | None = self.__dict__.get(_COPY)
    weight, bias = self._parameters["weight"], self._parameters["bias"]
    if copy is None or not _fits(copy, weight, bias, input) or not copy.follow(weight):
        return F.linear(input, weight, bias)
    product: torch.Tensor = linear(input, copy.weight, bias)
    return product


def _fits(copy: Packed, weight: Any, bias: Any, input: torch.Tensor) -> bool:
    return not (
        torch.compiler.is_compiling()
        # torch.func.functional_call puts other tensors in the place of parameters.
        or type(weight) is not nn.Parameter
        or type(input) is not torch.Tensor
        or weight.dtype is not input.dtype
        or weight.dtype not in _DTYPES
        or (copy.dtype is None and weight.dtype is not copy.weight.dtype)
        or weight.device.type != "cpu"
        or input.device.type != "cpu"
        or input.dim() == 0
        or input.shape[-1] != copy.weight.in_features
        or input.numel() > copy.most_rows * copy.weight.in_features
        or torch.is_autocast_enabled("cpu")
        or (torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad)))
    )


def _not_packable(module: nn.Linear, weight: Any) -> str | None:
    if type(module) is not nn.Linear or is_replaced(module):
        return f"it is a {type(module).__name__} with a forward of its own"
    if type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor:
        return f"its weight is {type(weight).__name__}, not a plain parameter"
    if weight.device.type != "cpu":
        return f"its weight is on {weight.device}, and packed weights are for the CPU"
    if weight.dtype not in _DTYPES:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if weight.is_inference():
        return "its weight was made in inference mode, where torch does not count writes"
    return None


def _gains(weight: torch.Tensor, copy: PackedWeight, timing: Timing) -> dict[int, float]:
    """How many times faster the copy is, by rows, as far as it is."""
    gains: dict[int, float] = {}
    for rows in ROWS:
        plain_us, copied_us = timing(weight, copy, rows)
        gains[rows] = round(plain_us / copied_us, 2)
        if gains[rows] < _GAIN:
            break
    return gains


def _timed(weight: torch.Tensor, copy: PackedWeight, rows: int) -> tuple[float, float]:
    input = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
    with torch.no_grad():
        calls = {"plain": lambda: F.linear(input, weight), "copied": lambda: linear(input, copy)}
        once = min(interleaved(calls, rounds=1, count=1)["plain"])
        times = interleaved(calls, rounds=_ROUNDS, count=max(int(_ROUND_US / max(once, 1.0)), 1))
    return statistics.median(times["plain"]), statistics.median(times["copied"])
