"""A kernel, run once on inputs made up for a call that is only written down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from layerzero import _native, devices
from layerzero.checks import synchronize


def once(kernel: str, call: str, device: int) -> float:
    """Runs a kernel and waits for it. Gives the milliseconds that took, its compilation among them."""
    from layerzero.tuning import inputs

    with quietly(device):
        made = inputs.make(call, device)
        begun = time.perf_counter()
        _native.Subject(made.function, made.drawn_apart()).run(kernel)
        _wait_for(device)
        return (time.perf_counter() - begun) * 1e3


@contextmanager
def quietly(device: int) -> Iterator[None]:
    """Without gradients, and on a stream of its own where there are streams. For threads of ours: on CUDA, no capture of
    another thread is disturbed by this one from then on."""
    import torch

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if (index := devices.cuda_index(device)) is not None:
            _native.leave_captures_alone()
            stack.enter_context(torch.cuda.device(index))
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(index)))  # type: ignore[no-untyped-call]
        yield


def _wait_for(device: int) -> None:
    """An error of a kernel that runs later is an error of this one."""
    import torch

    if (index := devices.cuda_index(device)) is not None:
        torch.cuda.current_stream(index).synchronize()
    elif device > 0:
        synchronize()
