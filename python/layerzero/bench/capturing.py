"""A call in a CUDA graph, captured as torch's documentation says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Calls before a capture: libraries allocate and compile in the first ones.
WARMUP_CALLS = 3


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """The graph, and the result of the call, which every replay writes anew."""
    import torch

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result
