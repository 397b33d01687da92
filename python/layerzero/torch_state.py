"""Checks that torch's state is read right by the native side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Made = TypeVar("Made")

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


#: torch's implementations of attention, in the order of their numbers (``torch.nn.attention.SDPBackend``).
SDPA_NAMES = ("math", "flash", "mem_efficient", "cudnn", "overrideable")


def sdpa_allowed() -> int:
    """Which of torch's implementations of attention are allowed here, a bit each: all of them outside of
    ``torch.nn.attention.sdpa_kernel``."""
    import torch

    return sum(getattr(torch._C, f"_get_{name}_sdp_enabled")() << at for at, name in enumerate(SDPA_NAMES))


def sdpa_choice() -> str:
    """The same with torch's order of preference, as a short text; empty where all are allowed."""
    import torch

    allowed = sdpa_allowed()
    if allowed == (1 << len(SDPA_NAMES)) - 1:
        return ""
    order = torch._C._get_sdp_priority_order()
    return " sdpa " + ",".join(SDPA_NAMES[at] for at in order if at < len(SDPA_NAMES) and allowed >> at & 1)


def symbols_agree(look: Callable[[], tuple[bool, bool, bool, int, int | None]]) -> bool | None:
    """Puts this thread into each state in turn and compares what ``look`` sees of gradients and of anything special. (Its
    answer is gradients, determinism, anything special, threads, the allowed implementations of attention where they are
    read by symbols.)

    Symbols of torch's libraries are looked up by name; a version in which one of them means something else must be
    found out here, and is then read through torch's Python functions instead. Only state of this thread is changed:
    determinism belongs to the whole process, and is read by torch's own function; so do the number of threads and the
    implementations of attention, of which only the present ones are compared. Returns ``None`` under autocast or a dispatch mode: the states cannot be
    distinguished there.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    special = bool(torch._C._len_torch_dispatch_stack()) or torch._C._is_any_autocast_enabled()
    if special:
        return None
    answers = [look()[:3:2] == (torch.is_grad_enabled(), False), look()[3] == torch.get_num_threads()]
    answers.append(look()[4] in (None, sdpa_allowed()))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            answers.append(look()[:3:2] == (grad, False))
    for device in ("cpu", "cuda"):
        was = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, True)
        try:
            answers.append(look()[2])
        finally:
            torch.set_autocast_enabled(device, was)
    with TorchDispatchMode():  # type: ignore[no-untyped-call]
        answers.append(look()[2])
    answers.append(not look()[2])
    return all(answers)


def recorder() -> str | None:
    """Who is recording torch's operations and would miss what a native kernel does: forward derivatives, or a trace."""
    import torch

    if torch.autograd.forward_ad._current_level >= 0:
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
    holder: int
    storage: int
    requires_grad: bool


def _plain(make: Callable[[], Made]) -> Callable[[], Made]:
    """A function that makes tensors, run as if there were no transform of ``torch.func`` around it: inside of one, new tensors
    are wrappers, which have no memory to look at."""

    @functools.wraps(make)
    def outside() -> Made:
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with temporarily_clear_interpreter_stack():
            return make()

    return outside


@_plain
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
        holder=tensor.untyped_storage()._cdata if on_host else 0,
        storage=tensor.untyped_storage().data_ptr() if on_host else 0,
        requires_grad=tensor.requires_grad,
    )


@_plain
def negative_keys() -> int:
    """The dispatch keys that say that a tensor's memory holds the negative, or the conjugate, of what the tensor is."""
    import torch

    def keys(tensor: torch.Tensor) -> int:
        return int(torch._C._dispatch_keys(tensor).raw_repr())

    plain, pair = torch.empty(1), torch.empty(1, dtype=torch.complex64)
    return (keys(plain) ^ keys(torch._neg_view(plain))) | (keys(pair) ^ keys(torch._conj(pair)))


def is_new_tensor(tensor: Any, dtype: str, address: int) -> bool:
    """Whether a tensor is what was asked of torch's allocator: new, two by three, contiguous, on the host, and nobody
    else's."""
    import sys

    import torch

    return (
        type(tensor) is torch.Tensor
        and tensor.shape == (2, 3)
        and tensor.stride() == (3, 1)
        and tensor.dtype is getattr(torch, dtype)
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.is_leaf
        and tensor.data_ptr() == address
        # The caller's reference, this function's argument, and the call's own.
        and sys.getrefcount(tensor) <= 4
        and getattr(tensor, "_use_count", lambda: 1)() == 1
    )


@_plain
def to_turn() -> torch.Tensor:
    """A tensor of four dimensions that does not begin where its memory does."""
    import torch

    return torch.arange(123.0)[3:].view(2, 3, 4, 5)


def is_turned(tensor: torch.Tensor, turned: Any) -> bool:
    """Whether the second is a view of the first with its two middle dimensions exchanged."""
    import torch

    expected = tensor.transpose(1, 2)
    return (
        type(turned) is torch.Tensor
        and turned.shape == expected.shape
        and turned.stride() == expected.stride()
        and turned.data_ptr() == tensor.data_ptr()
        and turned.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        and torch.equal(turned, expected)
    )
