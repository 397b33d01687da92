"""A kernel, run once on inputs made up for a call that is only written down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from layerzero import _native, devices
from layerzero.checks import synchronize

#: `cudaStreamCaptureModeThreadLocal`: what other threads capture is nothing to this one.
OF_THIS_THREAD = 1


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
    """Without gradients, and on a stream of its own where there are streams. On CUDA no capture of another thread is disturbed
    meanwhile."""
    import torch

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if (index := devices.cuda_index(device)) is not None:
            stack.enter_context(beside_captures(device))
            stack.enter_context(torch.cuda.device(index))
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(index)))  # type: ignore[no-untyped-call]
        yield


@contextmanager
def beside_captures(device: int) -> Iterator[None]:
    """On a CUDA device, has the driver let this thread take memory, load code and ask about events while another one captures a
    graph: by default that fails, and breaks the capture. What this thread captures itself is checked as before."""
    before = None if devices.cuda_index(device) is None else _native.exchange_capture_mode(OF_THIS_THREAD)
    try:
        yield
    finally:
        if before is not None:
            _native.exchange_capture_mode(before)


def _wait_for(device: int) -> None:
    """An error of a kernel that runs later is an error of this one."""
    import torch

    if (index := devices.cuda_index(device)) is not None:
        torch.cuda.current_stream(index).synchronize()
    elif device > 0:
        synchronize()
