"""Checks that torch's state is read right by the native side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: torch's numbers for the dtypes LayerZero has (``c10::ScalarType``).
_NUMBERS = {
    "uint8": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "float16": 5,
    "float32": 6,
    "float64": 7,
    "bool": 11,
    "bfloat16": 15,
    "float8_e5m2": 23,
    "float8_e4m3fn": 24,
}


def symbols_agree(look: Callable[[], tuple[bool, bool, bool]]) -> bool:
    """Puts this thread into each state in turn and compares what ``look`` sees: gradients, determinism, anything special.

    Symbols of torch's libraries are looked up by name; a version in which one of them means something else must be
    found out here, and is then read through torch's Python functions instead.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    special = bool(torch._C._len_torch_dispatch_stack()) or torch._C._is_any_autocast_enabled()
    answers = [look() == (torch.is_grad_enabled(), deterministic, special)]
    if special:
        # In the middle of something special nothing can be told apart.
        return False
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            answers.append(look() == (grad, deterministic, False))
    for device in ("cpu", "cuda"):
        was = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, True)
        try:
            answers.append(look()[2])
        finally:
            torch.set_autocast_enabled(device, was)
    with TorchDispatchMode():  # type: ignore[no-untyped-call]
        answers.append(look()[2])
    try:
        # Not through `use_deterministic_algorithms`, which imports the compiler.
        torch._C._set_deterministic_algorithms(not deterministic, warn_only=True)
        answers.append(look()[1] is not deterministic)
    finally:
        torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)
    answers.append(not look()[2])
    return all(answers)


def recorder() -> str | None:
    """Who is recording torch's operations and would miss what a native kernel does: forward derivatives, or a trace."""
    import torch
    from torch.autograd import forward_ad

    if forward_ad._current_level >= 0:
        return "forward-mode derivatives"
    return "torch.jit.trace" if torch._C._get_tracing_state() is not None else None


@dataclass
class Specimen:
    """A tensor and all that is known of it."""

    tensor: Any
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: int
    itemsize: int
    on_host: bool
    keys: int
    storage: int
    requires_grad: bool


def specimens() -> list[Specimen]:
    """Tensors whose every field is known, by which the native side finds out where torch keeps the fields.

    They differ in everything: a place that shows the right value for all of them holds that field. Empty when this
    torch cannot tell what is needed.
    """
    import torch

    dtypes = {getattr(torch, name): number for name, number in _NUMBERS.items()}
    shapes = [(), (7,), (3, 5), (2, 9, 4), (1, 6, 8, 3), (5, 2, 1, 7, 11)]
    made = []
    with torch.no_grad():
        for i, (dtype, number) in enumerate(dtypes.items()):
            sizes = shapes[i % len(shapes)]
            strides = tuple(13 + 101 * d + i for d in range(len(sizes)))
            offset = 17 + 3 * i
            reach = 1 + offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
            for device in ("cpu", "meta"):
                tensor = torch.empty(reach, dtype=dtype, device=device).as_strided(sizes, strides, offset)
                made.append((tensor, number))
    for tensor in (torch.empty(3, requires_grad=True), torch.nn.Parameter(torch.empty(2, 3))):
        made += [(tensor, dtypes[tensor.dtype]), (tensor * 2, dtypes[tensor.dtype])]
    try:
        return [_specimen(tensor, number) for tensor, number in made]
    except AttributeError:
        return []


def _specimen(tensor: torch.Tensor, number: int) -> Specimen:
    import torch

    on_host = tensor.device.type == "cpu"
    return Specimen(
        tensor=tensor,
        address=tensor._cdata,
        sizes=tuple(tensor.shape),
        strides=tensor.stride(),
        offset=int(tensor.storage_offset()),
        dtype=number,
        itemsize=tensor.element_size(),
        on_host=on_host,
        keys=torch._C._dispatch_keys(tensor).raw_repr(),
        storage=tensor.untyped_storage().data_ptr() if on_host else 0,
        requires_grad=tensor.requires_grad,
    )
