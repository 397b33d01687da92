"""What torch's allocator holds of a GPU's memory.

LayerZero's core knows no torch: it asks :func:`held` through the native module, on a thread of its own.
"""

from __future__ import annotations

import sys
from typing import Any


def held(device: int) -> tuple[int, int, int] | None:
    """Of a device, in bytes: what the driver has left, what torch holds unused, and the largest block of that.

    Device 0 is the host, whose memory torch does not keep; CUDA's devices follow in CUDA's order. Unused is reserved − allocated. `None` where torch has reserved nothing: asking the driver through torch would then
    create a context on the device.
    """
    torch = sys.modules.get("torch")
    index = device - 1
    if index < 0 or torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return None
    stats = torch.cuda.memory_stats(index)
    reserved = int(stats.get("reserved_bytes.all.current", 0))
    if reserved == 0:
        return None
    unused = max(reserved - int(stats.get("allocated_bytes.all.current", 0)), 0)
    driver_free = int(torch.cuda.mem_get_info(index)[0])
    # A block of the cache is no larger than all of it: below the driver's figure it changes nothing, and the list of
    # blocks need not be made.
    largest = unused if unused <= driver_free else _largest_block(torch, index, unused)
    return driver_free, unused, largest


def _largest_block(torch: Any, index: int, unused: int) -> int:
    """The largest unused block of torch's cache on a device, in bytes."""
    if torch.cuda.get_allocator_backend() != "native":
        # CUDA's own pool maps pages wherever they are: any size up to all of it can be had in one piece.
        return unused
    segments = (
        segment
        for segment in torch.cuda.memory_snapshot()
        # What belongs to the pool of a captured graph is not given to anybody else.
        if segment["device"] == index and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
    )
    blocks = (block for segment in segments for block in segment["blocks"] if block["state"] == "inactive")
    return max((int(block["size"]) for block in blocks), default=0)
