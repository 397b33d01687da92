"""cuDNN's graphs of attention, built once for each kind of call, and the handles they run with.

A plan holds for the sizes, strides, dtype, bounds and scale it was built for. Building one takes cuDNN tens of
milliseconds and is not done while a CUDA graph is captured; running one is. A handle belongs to a thread and a device
and follows the current stream. Workspaces come from torch's allocator with each call, which knows streams and captures.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_PLANS = 512
QUERY, KEY, VALUE, OUTPUT = 1, 2, 3, 4

_NOT_WHILE_CAPTURING = "while a CUDA graph is captured; run the call once before"


class Kind(NamedTuple):
    """What a plan is built for; operands are in the order batch, heads, sequence, element."""

    device: int
    dtype: torch.dtype
    causal: bool
    left: int
    scale: float
    operands: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class Plan(NamedTuple):
    """A graph that is ready to run, and the bytes it needs besides its operands."""

    execute: Callable[..., None]
    workspace: int


def operand(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides; where there is one of a kind its stride is the largest, which cuDNN makes the least of."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if 1 in shape[:-1]:
        largest = max(size * stride for size, stride in zip(shape, strides, strict=True) if size > 1 or stride == 1)
        strides = (*(largest if n == 1 else s for n, s in zip(shape[:-1], strides[:-1], strict=True)), strides[-1])
    return shape, strides


def build(library: Any, kind: Kind, handle: int) -> Plan:
    """cuDNN's plan for a kind of call; raises what cuDNN raises where it has none."""
    types = library.data_type
    graph = library.pygraph(
        io_data_type=types.HALF if kind.dtype == torch.float16 else types.BFLOAT16,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
    )
    tensors = []
    for uid, (shape, strides) in zip((QUERY, KEY, VALUE), kind.operands, strict=False):
        tensor = graph.tensor(dim=list(shape), stride=list(strides))
        tensor.set_uid(uid)
        tensors.append(tensor)
    bounds: dict[str, Any] = {}
    if kind.causal:
        square = kind.operands[0][0][2] == kind.operands[1][0][2]
        aligned = library.diagonal_alignment
        bounds["diagonal_alignment"] = aligned.TOP_LEFT if square else aligned.BOTTOM_RIGHT
        bounds["diagonal_band_right_bound"] = 0
        if kind.left:
            bounds["diagonal_band_left_bound"] = kind.left
    output, _ = graph.sdpa(*tensors, is_inference=True, attn_scale=kind.scale, **bounds)
    shape, strides = kind.operands[3]
    output.set_output(True)
    output.set_dim(list(shape))
    output.set_stride(list(strides))
    output.set_uid(OUTPUT)
    graph.build([library.heur_mode.A, library.heur_mode.FALLBACK])
    return Plan(graph.execute, int(graph.get_workspace_size()))


class Plans:
    """The plans of one library, and its handles."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._plans: dict[Kind, Plan] = {}
        self._building = threading.Lock()
        self._own = threading.local()

    def handle(self, device: int) -> int:
        """This thread's handle for the device, on its current stream."""
        handles: dict[int, list[int]] | None = getattr(self._own, "handles", None)
        if handles is None:
            handles = self._own.handles = {}
        known = handles.get(device)
        stream = current_stream(device)
        if known is None:
            if is_capturing():
                raise RuntimeError(f"cuDNN's handle cannot be made {_NOT_WHILE_CAPTURING}")
            known = handles[device] = [self._library.create_handle(), -1]
        if known[1] != stream:
            self._library.set_stream(handle=known[0], stream=stream)
            known[1] = stream
        return known[0]

    def plan(self, kind: Kind, handle: int) -> Plan:
        """The plan for a kind of call, built if there is none."""
        plan = self._plans.get(kind)
        if plan is not None:
            return plan
        if is_capturing():
            raise RuntimeError(f"cuDNN's plan cannot be built {_NOT_WHILE_CAPTURING}")
        with self._building:
            plan = self._plans.get(kind)
            if plan is None:
                while len(self._plans) >= MOST_PLANS:
                    del self._plans[next(iter(self._plans))]
                plan = self._plans[kind] = build(self._library, kind, handle)
        return plan

    def run(self, kind: Kind, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Runs the plan of the kind on its operands."""
        if not is_current(kind.device):
            with torch.cuda.device(kind.device):
                self._run(kind, query, key, value, output)
        else:
            self._run(kind, query, key, value, output)

    def _run(self, kind: Kind, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        handle = self.handle(kind.device)
        plan = self.plan(kind, handle)
        pointers = {
            QUERY: query.data_ptr(),
            KEY: key.data_ptr(),
            VALUE: value.data_ptr(),
            OUTPUT: output.data_ptr(),
        }
        if plan.workspace == 0:
            plan.execute(pointers, 0, handle)
            return
        workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=query.device)
        plan.execute(pointers, workspace.data_ptr(), handle)


def current_stream(device: int) -> int:
    """The stream that work on the device is queued on."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def is_current(device: int) -> bool:
    """Whether the device is the one CUDA works on now."""
    return bool(torch._C._cuda_getDevice() == device)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_current_stream_capturing()
