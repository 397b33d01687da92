"""A program as CUDA graphs. Inputs are copied into slots, graphs are replayed, results are copied out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from layerzero.device_graphs.program import Program
from layerzero.errors import named_line


class Graphs(Protocol):
    """What captures and replays: a device, or what stands for one in a test."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        """Captures it there: what replays it, and what it gave."""


@dataclass(frozen=True)
class Part:
    """Steps that are one graph, or a call that no graph could hold."""

    first: int
    end: int
    run: Callable[[], Any]
    captured: bool


class CapturedProgram:
    """A program whose steps are replayed. `held`: which inputs are the same tensors in every run."""

    def __init__(self, program: Program, inputs: Sequence[Tensor], held: Sequence[bool], graphs: Graphs) -> None:
        self._program = program
        # Outside of the graphs' pool: other graphs may not write there.
        self._slots: list[Any] = [one if stays else one.clone() for one, stays in zip(inputs, held, strict=True)]
        self._copied = [at for at, stays in enumerate(held) if not stays]
        self._held = {at: _place(inputs[at]) for at, stays in enumerate(held) if stays}
        self._values = program.values(self._slots)
        #: Why the program is not one graph.
        self.cut: str | None = None
        try:
            self.parts = [self._captured(0, len(program.steps), graphs)]
        except Exception as error:
            if not any(step.alone for step in program.steps):
                raise
            self.cut = named_line(error)
            self._values = program.values(self._slots)
            self.parts = self._cut(graphs)
        if self.cut is None:
            # A graph knows addresses. A cache that nobody else holds any more is not kept for it.
            for at in self._held:
                if self._values[at] is self._slots[at]:
                    self._values[at] = None
                self._slots[at] = None

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Whether inputs that are never copied are where they were."""
        return all(_place(inputs[at]) == place for at, place in self._held.items())

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs it for other contents of its inputs."""
        for at in self._copied:
            self._slots[at].copy_(inputs[at], non_blocking=True)
        for part in self.parts:
            part.run()
        results = [inputs[at] if self._values[at] is None else self._values[at] for at in self._program.outputs]
        return [one.clone() for one in results]

    def _captured(self, first: int, end: int, graphs: Graphs) -> Part:
        last = end == len(self._program.steps)

        def run() -> None:
            self._program.run_steps(self._values, first, end)
            if last:
                self._program.update(self._values)

        replay, _ = graphs.capture(run)
        return Part(first, end, replay, True)

    def _cut(self, graphs: Graphs) -> list[Part]:
        """Graphs around the calls of torch's, each of which runs by itself."""
        steps, parts, begun = self._program.steps, [], 0
        for at, step in enumerate([*steps, None]):
            if step is not None and not step.alone:
                continue
            if at > begun or step is None:
                parts.append(self._captured(begun, at, graphs))
            if step is not None:
                parts.append(Part(at, at + 1, self._alone(at), False))
            begun = at + 1
        return parts

    def _alone(self, at: int) -> Callable[[], None]:
        """A call that runs by itself. Its results are copied to where the graph behind it reads them.

        Parts are only recorded here. Nothing has run, so no value has contents yet.
        """
        before, step = list(self._values), self._program.steps[at]
        made = {}
        for name, node in zip(step.makes, step.nodes, strict=True):
            made[name] = torch.empty(node.shape, dtype=node.dtype, device=self._program.device)
        self._program.put(self._values, at, [made[name] for name in step.makes])

        def run() -> None:
            found = self._program.ran(before, at)
            for one, other in zip(made.values(), found, strict=True):
                one.copy_(other)

        return run


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.stride()
