"""A graph on a device: optimised once, a program for each size of its inputs, replayed as CUDA graphs."""

from __future__ import annotations

import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerzero import _native, graph_capture
from layerzero.device_graphs import joined_weights
from layerzero.device_graphs.captured import CapturedProgram, Graphs
from layerzero.device_graphs.fusions import LEFT_OUT
from layerzero.device_graphs.program import Program
from layerzero.errors import named_line
from layerzero.graph_variants import StepFailedError
from layerzero.lifecycle import open_in_forks

if TYPE_CHECKING:
    from layerzero.export.host_calls import HostCalls

#: Sizes of inputs that programs are kept for: those used last. Each keeps its graphs and what they work in.
MOST_PROGRAMS = 16
#: Captures that are kept for each of them: for other caches, or other inputs that are written.
MOST_CAPTURES = 4


@dataclass
class _Sizes:
    """What there is for inputs of exact sizes."""

    program: Program
    runs: int = 0
    captures: list[CapturedProgram] = field(default_factory=list)
    #: Where written inputs were in runs without a graph.
    seen: set[tuple[int, ...]] = field(default_factory=set)
    #: Why nothing is captured.
    refused: str | None = None
    #: For each step the calls of LayerZero it makes, as JSON, with the numbers of their devices.
    calls: list[list[tuple[str, int]]] = field(default_factory=list)
    #: The kernels of calls, where a capture fixed them.
    kernels: dict[str, str] = field(default_factory=dict)

    @property
    def captured(self) -> CapturedProgram | None:
        """The last capture, if there is one."""
        return self.captures[0] if self.captures else None

    def comes_again(self, written: Sequence[Tensor]) -> bool:
        """Whether inputs that are written were at these addresses before: those that are new in every call need no graph."""
        key = tuple(one.data_ptr() for one in written)
        if not key or key in self.seen:
            return True
        if len(self.seen) > 64:
            self.seen.clear()
        self.seen.add(key)
        return False


def graphs_of(device: torch.device) -> Graphs | None:
    """What captures on a device, if anything does. All graphs of a session share a pool."""
    if device.type != "cuda":
        return None
    from layerzero.graphs import CudaGraphs

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return CudaGraphs(device.index or 0, stream, torch.cuda.graph_pool_handle())


class DeviceSession:
    """Runs a graph on a device. It is used as the native session of graphs on the CPU is.

    The first run of some sizes is eager: kernels are compiled and chosen. The second is captured, all others are replayed. `held`
    says how many of the last inputs are the same tensors in every run: weights.
    """

    def __init__(
        self,
        graph: _native.Graph,
        device: torch.device,
        *,
        off: Sequence[str] = (),
        held: int = 0,
        host: HostCalls | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self._graph = _native.DeviceGraph(graph, off=[*dict.fromkeys([*off, *LEFT_OUT])])
        self._device, self._host = device, host
        written = {old for old, _ in self._graph.updates}
        names = self._graph.inputs
        first_held = self._first_held = len(names) - held
        #: As on the CPU, where the pass of this name does it.
        self._joins = "merge_linear" not in off
        #: Inputs that a graph reads and writes where they lie.
        self._stays = [at >= first_held or name in written for at, name in enumerate(names)]
        self._written = [at for at, name in enumerate(names) if name in written]
        self._known: OrderedDict[tuple[Any, ...], _Sizes] = OrderedDict()
        self._constants: dict[str, Tensor] = {}
        self._contents: dict[tuple[Any, ...], Tensor] = {}
        self._lock = open_in_forks(threading.RLock())
        self._graphs = graphs if graphs is not None else graphs_of(device)
        #: Behind the last run: graphs have one set of slots, and runs may be on several streams.
        self._done: Any = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def _alone(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """One thread at a time, without gradients, on the session's device."""
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            if not any(inputs[at].is_inference() for at in self._written):
                # What is kept for later calls must not be of inference mode.
                stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            if self._device.type == "cuda":
                stack.enter_context(torch.cuda.device(self._device))
            yield

    def run(self, inputs: Sequence[Tensor], host: Any = None) -> list[Tensor]:
        """Runs the graph. Inputs it updates are written; results are new tensors."""
        with self._alone(inputs):
            sizes = self._sizes(inputs)
            if self._done is None:
                return self._ran(sizes, inputs)
            if torch.cuda.is_current_stream_capturing():
                # The caller's own graph.
                return sizes.program.run(inputs)
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            results = self._ran(sizes, inputs)
            self._done.record(stream)
            return results

    def prepare(self, inputs: Sequence[Tensor]) -> None:
        """Makes the program for inputs of these sizes, and moves weights together that are read together."""
        with self._alone(inputs):
            self._sizes(inputs, joining=True)

    def _wait(self) -> None:
        """Waits for the last run: memory that it works in is about to be given back."""
        if self._done is not None:
            self._done.synchronize()

    def _sizes(self, inputs: Sequence[Tensor], joining: bool = False) -> _Sizes:
        key = tuple((one.dtype, one.shape) for one in inputs[: self._first_held])
        found = self._known.get(key)
        if found is None:
            rows = [(str(one.dtype).removeprefix("torch."), list(one.shape)) for one in inputs]
            held = dict(zip(self._graph.inputs[self._first_held :], inputs[self._first_held :], strict=True))

            def joins(names: Sequence[str]) -> bool:
                weights = [held[name] for name in names if name in held]
                if not self._joins or len(weights) != len(names):
                    return False
                # Later, other graphs may be captured that read the weights where they are.
                return joined_weights.beside(weights) or joining and joined_weights.move(weights)

            found = _Sizes(Program(self._graph, rows, self._device, self._host, self._constant, joins))
            self._known[key] = found
            while len(self._known) > MOST_PROGRAMS:
                self._wait()
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return found

    def _constant(self, name: str) -> Tensor:
        """A value that is known before a run, on the device. Those of the same contents are one: tables of each layer."""
        if name not in self._constants:
            on_host = self._graph.constant(name).contiguous()
            what = (on_host.dtype, on_host.shape, on_host.reshape(-1).view(torch.uint8).numpy().tobytes())
            self._constants[name] = self._contents.setdefault(what, on_host.to(self._device))
        return self._constants[name]

    def _ran(self, sizes: _Sizes, inputs: Sequence[Tensor]) -> list[Tensor]:
        sizes.runs += 1
        if self._graphs is None or sizes.refused is not None:
            return sizes.program.run(inputs)
        if sizes.runs == 1:
            return self._first(sizes, inputs)
        captured = next((one for one in sizes.captures if one.fits(inputs)), None)
        if captured is None:
            if not sizes.comes_again([inputs[at] for at in self._written]):
                return sizes.program.run(inputs)
            try:
                captured = CapturedProgram(sizes.program, inputs, self._stays, self._graphs)
            except Exception as error:  # noqa: BLE001 - whatever a capture refuses runs without one
                if not isinstance(error, torch.OutOfMemoryError):
                    sizes.refused = named_line(error)
                return sizes.program.run(inputs)
            self._wait()
            sizes.captures = [captured, *sizes.captures[: MOST_CAPTURES - 1]]
        return captured.run(inputs)

    def _first(self, sizes: _Sizes, inputs: Sequence[Tensor]) -> list[Tensor]:
        """An eager run, after which the kernels of all calls are ready for a capture."""
        try:
            results = self._noted(sizes, inputs)
        except Exception as error:
            sizes.runs = 0
            raise StepFailedError(named_line(error)) from error
        sizes.comes_again([inputs[at] for at in self._written])
        try:
            for call, device in dict.fromkeys(one for calls in sizes.calls for one in calls):
                recorded = graph_capture.ready(call, device, None)
                if recorded.kernel is not None:
                    sizes.kernels[call] = recorded.kernel
        except Exception as error:  # noqa: BLE001 - no kernel may be captured: the run was right, and later ones are like it
            sizes.refused = named_line(error)
        return results

    def _noted(self, sizes: _Sizes, inputs: Sequence[Tensor]) -> list[Tensor]:
        noting, calls = graph_capture.Noting(), []
        noting.begin()
        try:
            results = sizes.program.run(inputs, lambda: calls.append(noting.calls()))
        finally:
            noting.end()
        sizes.calls = _for_each(sizes.program, calls)
        return results

    # What it tells of itself.

    def steps(self, inputs: Sequence[Tensor]) -> list[dict[str, Any]]:
        """The steps for inputs of these sizes. Where they have not run yet, they run once, on copies of what they write."""
        with self._alone(inputs):
            sizes = self._sizes(inputs)
            if not sizes.calls:
                self._noted(sizes, self._copies(inputs))
            return [row for _, row in self._rows(sizes)]

    def _rows(self, sizes: _Sizes) -> list[tuple[int, dict[str, Any]]]:
        found = []
        for at, step in enumerate(sizes.program.steps):
            if step.work.view:
                continue
            kernel, candidates = step.work.kernel, [step.work.kernel]
            if step.work.chosen:
                kernel, candidates = _chosen(sizes.calls[at], sizes.kernels, step.work.kernel)
            ops = "+".join(node.op for node in step.nodes) if not step.alone else "host"
            row: dict[str, Any] = {"op": ops, "output": step.last.output, "origin": step.last.origin, "kernel": kernel}
            row |= {"candidates": candidates, "flops": sum(node.flops for node in step.nodes)}
            found.append((at, {**row, "bytes": sum(node.bytes for node in step.nodes)}))
        return found

    def profile(self, inputs: Sequence[Tensor], rounds: int, host: Any = None) -> list[dict[str, Any]]:
        """The steps with their median times in microseconds, over some runs without a graph. Inputs it updates are written."""
        with self._alone(inputs):
            sizes = self._sizes(inputs)
            if not sizes.calls:
                self._noted(sizes, inputs)
            times: list[list[float]] = [[] for _ in sizes.program.steps]
            for _ in range(max(rounds, 1)):
                for seen, us in zip(times, _times(sizes.program, inputs, self._device), strict=True):
                    seen.append(us)
            return [{**row, "us": median(times[at])} for at, row in self._rows(sizes)]

    def _copies(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [one.clone() if at in self._written else one for at, one in enumerate(inputs)]

    def arena(self, inputs: Sequence[Tensor]) -> int:
        """Bytes of everything between inputs and results, where most of it is there."""
        with self._lock:
            return self._sizes(inputs).program.peak_bytes()

    def failures(self, inputs: Sequence[Tensor]) -> list[tuple[str, str, str]]:
        """Kernels that failed are replaced by the engine, whose circuits know them."""
        return []

    def not_captured(self, inputs: Sequence[Tensor]) -> list[str]:
        """What runs outside of graphs for inputs of these sizes: calls of torch's between them, or all, and why."""
        with self._lock:
            sizes = self._sizes(inputs)
        if sizes.refused is not None:
            return [f"everything: {sizes.refused}"]
        if sizes.captured is None or sizes.captured.cut is None:
            return []
        outside = [part for part in sizes.captured.parts if not part.captured]
        return [f"{sizes.program.steps[part.first].work.kernel}: {sizes.captured.cut}" for part in outside]

    def text(self) -> str:
        """The optimised graph as text, a node a line."""
        return self._graph.text()

    def dot(self) -> str:
        """The optimised graph in Graphviz' language."""
        return self._graph.dot()

    @property
    def optimised(self) -> dict[str, Any]:
        """Nodes before and after optimisation, and how often each pass changed something."""
        return self._graph.optimised

    @property
    def plans(self) -> int:
        """For how many sizes of inputs there is a program."""
        return len(self._known)

    @property
    def packed_bytes(self) -> int:
        """Weights are read where the model has them."""
        return 0

    @property
    def source_bytes(self) -> int:
        """As above."""
        return 0


def _for_each(program: Program, calls: list[list[tuple[str, int]]]) -> list[list[tuple[str, int]]]:
    """The calls of each step. A kind of call is noted once: steps of the same sizes and attributes make the same."""
    first: dict[str, list[tuple[str, int]]] = {}
    for step, noted in zip(program.steps, calls, strict=True):
        if noted:
            first.setdefault(program.signature(step), noted)
    return [
        noted or (first.get(program.signature(step), []) if step.work.chosen else [])
        for step, noted in zip(program.steps, calls, strict=True)
    ]


def _chosen(calls: Sequence[tuple[str, int]], held: dict[str, str], function: str) -> tuple[str, list[str]]:
    """The kernels of a step's calls, and those that could run the last of them."""
    names: list[str] = []
    candidates: list[str] = []
    for call, device in calls:
        report = json.loads(_native.explain_call(call, device)[0])
        names.append(held.get(call) or report["chosen"] or f"lz.{function}")
        candidates = [one["kernel_id"] for one in report["candidates"] if not one["reasons"]]
    return " + ".join(names) or f"lz.{function}", candidates or [f"lz.{function}"]


def _times(program: Program, inputs: Sequence[Tensor], device: torch.device) -> list[float]:
    """Microseconds of each step in one run."""
    if device.type != "cuda":
        seen = [perf_counter()]
        program.run(inputs, lambda: seen.append(perf_counter()))
        return [(b - a) * 1e6 for a, b in itertools.pairwise(seen)]
    event: Any = torch.cuda.Event
    events = [event(enable_timing=True) for _ in range(len(program.steps) + 1)]
    left = iter(events)
    # The device waits until all steps are queued: what is timed are kernels, not the host.
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    next(left).record()
    program.run(inputs, lambda: next(left).record())
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]
