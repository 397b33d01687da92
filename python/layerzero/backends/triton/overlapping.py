# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def"
"""Launches that overlap: one begins while the one before it still runs, and waits for its results by itself.

Part of what a launch takes the device is hidden that way. The kernel before calls `go_on` when the next may take up room
beside it, the kernel after calls `wait` before it touches memory, and its `Launch` is told that it overlaps.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from .launching import KNOWN, is_traced


def overlaps(device: torch.device) -> bool:
    """Whether launches can overlap on a device: on Hopper, where they were run, and on Blackwell for data centres, by versions of
    Triton whose launcher is known. Those that a compiler makes do not."""
    return not is_traced() and _can_overlap(device)


@cache
def _can_overlap(device: torch.device) -> bool:
    if not KNOWN or device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@triton.jit
def go_on(OVERLAPS: tl.constexpr):
    """Lets the next launch begin."""
    if OVERLAPS:
        cuda.gdc_launch_dependents()


@triton.jit
def wait(OVERLAPS: tl.constexpr):
    """Waits for the launch before to have ended, and for what it stored."""
    if OVERLAPS:
        cuda.gdc_wait()
