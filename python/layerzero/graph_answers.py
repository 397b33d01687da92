"""What a compiled model tells of itself: its steps, their times, and what became of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from layerzero.results import Result, Table


@dataclass(frozen=True, slots=True, repr=False)
class GraphStep(Result):
    """A step of a compiled model: a kernel call, or several that belong together."""

    _columns: ClassVar[tuple[str, ...]] = ("op", "output", "kernel", "origin")

    op: str
    """The operation of the graph."""
    output: str
    """The value it makes."""
    kernel: str
    """The kernel that runs it."""
    candidates: list[str]
    """All kernels that could, in the order they are tried when one fails."""
    origin: str
    """The module of the model it comes from."""
    flops: float
    """Floating-point operations."""
    bytes: float
    """Bytes read and written."""


@dataclass(frozen=True, slots=True, repr=False)
class TimedStep(Result):
    """A step of a compiled model, and how long it takes."""

    _columns: ClassVar[tuple[str, ...]] = ("op", "kernel", "us", "share", "gflops", "gbytes", "origin")

    op: str
    """The operation of the graph."""
    kernel: str
    """The kernel that runs it."""
    us: float
    """Its median time in microseconds."""
    share: float
    """Its part of the time of all steps."""
    gflops: float
    """Floating-point operations in a second, in billions."""
    gbytes: float
    """Bytes read and written in a second, in billions."""
    output: str
    """The value it makes."""
    origin: str
    """The module of the model it comes from."""


@dataclass(frozen=True, slots=True, repr=False)
class GraphReport(Result):
    """What became of a model. Prints as a table."""

    model: str
    """The model's class."""
    nodes_exported: int
    """Nodes of the graph as it was exported."""
    nodes: int
    """Nodes after optimisation."""
    steps: int
    """Steps that run: views take none."""
    rewrites: dict[str, int]
    """How often each pass changed something."""
    kernels: dict[str, int]
    """How many steps each kernel runs."""
    torch_calls: dict[str, int]
    """Calls that stay torch's because there is no operation for them, and how many steps each has."""
    slow_steps: dict[str, int]
    """Operations that only a slow reference runs, and how many steps each has."""
    arena_bytes: int
    """Memory for everything between inputs and results."""
    weights: str
    """The numbers that weights of linear layers are kept in."""
    precision: str
    """How exactly products of float32 are computed."""
    weight_bytes: int
    """Memory of the model's own weights that were packed."""
    packed_bytes: int
    """Memory of packed copies of weights."""
    largest_error: float | None
    """With narrow weights: the largest difference to the model's results for the first inputs ÷ the largest of these."""
    exports: int
    """How often the model was exported, for sizes that did not fit."""
    plans: int
    """For how many sizes there is a plan."""
    calls: int
    """Calls that the graph served."""
    model_calls: dict[str, int]
    """Calls that were left to the model, by the reason."""

    def _table(self) -> Table:
        kernels = sorted(self.kernels.items(), key=lambda pair: (-pair[1], pair[0]))
        notes = [
            f"{self.nodes_exported} nodes exported, {self.nodes} after optimisation, {self.steps} steps",
            f"arena {_bytes(self.arena_bytes)}, packed weights {_bytes(self.packed_bytes)}",
            *self._narrow(),
            f"{self.exports} exports, {self.plans} plans, {self.calls} calls",
        ]
        notes += [f"{count} steps of {name} stay torch's" for name, count in self.torch_calls.items()]
        notes += [f"{count} steps of {name} run by a slow reference" for name, count in self.slow_steps.items()]
        notes += [f"{count} calls left to the model: {why}" for why, count in self.model_calls.items()]
        return Table(
            f"{self.model}, compiled", ("kernel", "steps"), [(k, str(n)) for k, n in kernels], notes, ("steps",)
        )

    def _narrow(self) -> list[str]:
        if self.weights == "float32":
            return []
        error = "" if self.largest_error is None else f", largest error {self.largest_error:.1e}"
        return [f"weights in {self.weights}: {_bytes(self.packed_bytes)} for {_bytes(self.weight_bytes)}{error}"]


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"
