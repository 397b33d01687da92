"""The classes that `explain`, `profile` and `report` of a compiled model return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from layerzero.results import Result, Rows, Table


@dataclass(frozen=True, slots=True, repr=False)
class GraphStep(Result):
    """A step of a compiled model: one call of a kernel, or several that belong together."""

    _columns: ClassVar[tuple[str, ...]] = ("op", "output", "kernel", "origin")

    op: str
    """The operation."""
    output: str
    """The name of the step's result in the graph."""
    kernel: str
    """The kernel that runs it."""
    candidates: list[str]
    """The kernels that can run it. If one fails, the next one is tried."""
    origin: str
    """The module of the model that it comes from."""
    flops: float
    """Floating-point operations."""
    bytes: float
    """Bytes read and written."""


@dataclass(frozen=True, slots=True, repr=False)
class TimedStep(Result):
    """A step of a compiled model, and how long it takes."""

    _columns: ClassVar[tuple[str, ...]] = ("op", "kernel", "us", "share", "gflops", "gbytes", "origin")

    op: str
    """The operation."""
    kernel: str
    """The kernel that runs it."""
    us: float
    """Its median time in microseconds."""
    share: float
    """Its share of the time of all steps."""
    gflops: float
    """Floating-point operations per second, in billions."""
    gbytes: float
    """Bytes read and written per second, in billions."""
    output: str
    """The name of the step's result in the graph."""
    origin: str
    """The module of the model that it comes from."""


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
    """Steps of a run. Views need none."""
    rewrites: dict[str, int]
    """How many changes each optimisation pass made."""
    kernels: dict[str, int]
    """How many steps each kernel runs."""
    torch_calls: dict[str, int]
    """Calls that stay torch's because the graph has no operation for them, and how many steps each has."""
    slow_steps: dict[str, int]
    """Operations that have only a slow reference kernel, and how many steps each has."""
    arena_bytes: int
    """Memory of the arena, which holds everything between inputs and results."""
    weights: str
    """The format of the weights of linear layers."""
    precision: str
    """How exactly float32 products are computed."""
    weight_bytes: int
    """Memory of the model's own weights that were packed."""
    packed_bytes: int
    """Memory of the packed copies of weights."""
    largest_error: float | None
    """With narrow weights: the largest difference to the model's results for the first inputs ÷ the largest of these."""
    exports: int
    """How many times the model was exported."""
    plans: int
    """How many combinations of sizes have a plan."""
    calls: int
    """Calls that the graph served."""
    model_calls: dict[str, int]
    """Calls that the model itself served, by reason."""
    device: str = "cpu"
    """Where the graph runs."""
    not_captured: list[str] = field(default_factory=list)
    """On a GPU: what runs outside of CUDA graphs for these inputs, and why."""

    def _table(self) -> Table:
        kernels = sorted(self.kernels.items(), key=lambda pair: (-pair[1], pair[0]))
        notes = self._notes()
        notes.append(f"{self.exports} exports, {self.plans} plans, {self.calls} calls")
        notes += [f"{count} calls left to the model: {why}" for why, count in self.model_calls.items()]
        where = "" if self.device == "cpu" else f" for {self.device}"
        return Table(
            f"{self.model}, compiled{where}", ("kernel", "steps"), [(k, str(n)) for k, n in kernels], notes, ("steps",)
        )

    def _notes(self) -> list[str]:
        """Nodes, memory, and steps that no fast kernel runs."""
        return [
            f"{self.nodes_exported} nodes exported, {self.nodes} after optimisation, {self.steps} steps",
            f"arena {_bytes(self.arena_bytes)}, packed weights {_bytes(self.packed_bytes)}",
            *self._narrow(),
            *(f"{count} steps of {name} stay torch's" for name, count in self.torch_calls.items()),
            *(f"{count} steps of {name} run by a slow reference" for name, count in self.slow_steps.items()),
            *(f"not in a CUDA graph: {what}" for what in self.not_captured),
        ]

    def _narrow(self) -> list[str]:
        if self.weights == "float32":
            return []
        error = "" if self.largest_error is None else f", largest error {self.largest_error:.1e}"
        return [f"weights in {self.weights}: {_bytes(self.packed_bytes)} for {_bytes(self.weight_bytes)}{error}"]


@dataclass(frozen=True, slots=True, repr=False)
class PlannedGraph(Result):
    """What a compiled model would run for some sizes: its steps, and the memory they need. Prints as a table."""

    steps: Rows[GraphStep]
    """The steps, in the order in which they run."""
    report: GraphReport
    """Nodes, memory, and calls that stay torch's."""

    def _table(self) -> Table:
        columns = ("op", "output", "kernel", "else", "module")
        shown = [(one.op, one.output, one.kernel, _others(one), one.origin) for one in self.steps]
        return Table(f"{self.report.model}, compiled", columns, shown, self.report._notes())


def _others(step: GraphStep) -> str:
    """The next candidate of a step, and how many more there are."""
    others = [one for one in step.candidates if one != step.kernel]
    return "" if not others else others[0] if len(others) == 1 else f"{others[0]}, {len(others) - 1} more"


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"
