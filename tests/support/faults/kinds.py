"""Ways in which a kernel goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: What a kernel of an operation that updates in place leaves behind when it breaks off.
HALF_WRITTEN = 7.0
ILLEGAL_ACCESS = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call."
)
NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB."


@dataclass(frozen=True)
class Fault:
    """A way to go wrong: what is made of the right results of the nth call, counted from 0.

    ``spoil`` gets the results as a tuple, and whether the operation gives just one; it returns what the kernel returns,
    or raises.
    """

    name: str
    spoil: Callable[[tuple[Tensor, ...], int], Any]
    #: Whether it breaks off before it is done: what is updated in place is then half written.
    breaks_off: bool = False
    #: Whether what it returns is right after all.
    harmless: bool = False
    #: Whether it is only found in checked mode.
    checked: bool = False


def _packed(results: tuple[Tensor, ...]) -> Any:
    """Results as a kernel returns them."""
    return None if not results else results[0] if len(results) == 1 else results


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[tuple[Tensor, ...], int], Any]:
    # What updates in place returns nothing; here it returns something, of the kind in question.
    return lambda results, n: _packed(tuple(map(change, results or (torch.zeros(2),))))


def _raise(error: Callable[[], BaseException]) -> Callable[[tuple[Tensor, ...], int], Any]:
    def spoil(results: tuple[Tensor, ...], n: int) -> Any:
        raise error()

    return spoil


def _sometimes(spoil: Callable[[tuple[Tensor, ...], int], Any]) -> Callable[[tuple[Tensor, ...], int], Any]:
    """The third call goes wrong, and every third after it."""
    return lambda results, n: spoil(results, n) if n % 3 == 2 else _packed(results)


def _slow(results: tuple[Tensor, ...], n: int) -> Any:
    time.sleep(0.005)
    return _packed(results)


def _other_dtype(t: Tensor) -> Tensor:
    return t.to(torch.float64 if t.dtype != torch.float64 else torch.float32)


def _with_nan(t: Tensor) -> Tensor:
    spoilt = t.clone()
    if t.is_floating_point():
        spoilt.view(-1)[0] = float("nan")
    return spoilt


def _other_number(results: tuple[Tensor, ...], n: int) -> Any:
    match results:
        case ():
            return (torch.zeros(2), torch.zeros(2))
        case (one,):
            return (one, one)
        case _:
            return results[:-1]


def _longer(t: Tensor) -> Tensor:
    return torch.cat((t, t)) if t.dim() else t.reshape(1)


def _broken() -> Exception:
    return RuntimeError("broken on purpose")


FAULTS = [
    Fault("raises", _raise(_broken), breaks_off=True),
    Fault("raises_at_times", _sometimes(_raise(_broken)), breaks_off=True),
    Fault("wrong_shape", _each(_longer)),
    Fault("wrong_shape_at_times", _sometimes(_each(_longer))),
    Fault("wrong_rank", _each(lambda t: t.unsqueeze(-1))),
    Fault("wrong_dtype", _each(_other_dtype)),
    Fault("wrong_dtype_at_times", _sometimes(_each(_other_dtype))),
    Fault("wrong_device", _each(lambda t: t.to("meta"))),
    Fault("wrong_device_at_times", _sometimes(_each(lambda t: t.to("meta")))),
    Fault("nan", _each(_with_nan), checked=True),
    Fault("nan_at_times", _sometimes(_each(_with_nan)), checked=True),
    Fault("no_memory", _raise(MemoryError), breaks_off=True),
    Fault("no_device_memory", _raise(lambda: torch.OutOfMemoryError(NO_MEMORY)), breaks_off=True),
    Fault("slow", _slow, harmless=True),
    Fault("returns_none", lambda results, n: None),
    Fault("returns_none_at_times", _sometimes(lambda results, n: None)),
    Fault("wrong_number", _other_number),
    Fault("no_tensor", lambda results, n: "all done"),
    Fault("interrupted", _raise(KeyboardInterrupt), breaks_off=True),
]
BY_NAME = {fault.name: fault for fault in FAULTS}
