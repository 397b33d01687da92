"""A program as CUDA graphs. Inputs are copied into slots, graphs are replayed, results are copied out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from layerzero.device_graphs.program import Program


class Graphs(Protocol):
    """What captures and replays: a device, or what stands for one in a test."""

    def warm(self, run: Callable[[], Any], times: int) -> None:
        """Runs something so many times on the side stream, and has the current one wait for it."""

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
        self._slots = [
            one if stays else one.clone(memory_format=_contiguous(one)) for one, stays in zip(inputs, held, strict=True)
        ]
        self._copied = [at for at, stays in enumerate(held) if not stays]
        self._held = {at: inputs[at].data_ptr() for at, stays in enumerate(held) if stays}
        self._values = program.values(self._slots)
        #: Why the program is not one graph.
        self.cut: str | None = None
        try:
            self.parts = [self._captured(0, len(program.steps), graphs)]
        except Exception as error:
            if not any(step.alone for step in program.steps):
                raise
            self.cut = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            self._values = program.values(self._slots)
            self.parts = self._cut(graphs)

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Whether inputs that are never copied are where they were."""
        return all(inputs[at].data_ptr() == address for at, address in self._held.items())

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs it for other contents of its inputs."""
        for at in self._copied:
            self._slots[at].copy_(inputs[at], non_blocking=True)
        for part in self.parts:
            part.run()
        return [self._values[at].clone() for at in self._program.outputs]

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
        # What a capture reads has to be there: the parts ran for the first time while they were captured, without doing anything.
        return parts

    def _alone(self, at: int) -> Callable[[], None]:
        """A call that runs by itself. Its results are copied to where the graph behind it reads them."""
        before = list(self._values)
        self._program.run_steps(self._values, at, at + 1)
        made = {
            place: one
            for place, (one, other) in enumerate(zip(self._values, before, strict=True))
            if one is not other and one is not None
        }

        def run() -> None:
            values = list(before)
            self._program.run_steps(values, at, at + 1)
            for place, one in made.items():
                one.copy_(values[place])

        return run


def _contiguous(_: Tensor) -> Any:
    import torch

    return torch.contiguous_format
