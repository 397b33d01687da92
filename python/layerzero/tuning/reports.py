"""What measuring found out: the answers of ``lz.tune`` and ``lz.regret``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from layerzero.results import KeyedResult, Result, Rows, Table, rows
from layerzero.tuning.forward import Forward


@dataclass(frozen=True, slots=True, repr=False)
class TimingStats(KeyedResult):
    """Latencies of one kernel, in microseconds per call."""

    median_us: float
    """The median, relative to the level of the rounds."""
    p95_us: float
    """The 95th percentile, as measured."""
    variance_us: float
    """The variance, as measured."""
    spread_us: float
    """The noise of the median: a smaller difference between two kernels is a tie."""
    samples: int
    """How many samples there were."""


@dataclass(frozen=True, slots=True, repr=False)
class Timing(KeyedResult):
    """A kernel that was timed for one call."""

    candidate: str
    """The kernel."""
    baseline: bool
    """Whether it is what plain torch runs."""
    stats: TimingStats | None
    """Its latencies; ``None`` where it failed or was never timed."""
    warmup_us: float | None
    """Its first call, in microseconds, with all that happens only once."""
    retired: bool
    """Whether it was left out of the later rounds, since it could not win."""
    error: str | None
    """Why it failed."""

    @classmethod
    def _from(cls, data: Mapping[str, Any]) -> Timing:
        return cls(**{**data, "stats": data["stats"] and TimingStats(**data["stats"])})


class Excluded(NamedTuple):
    """A kernel that was not timed, because it gave a wrong result or failed."""

    kernel_id: str
    why: str


class Unmeasured(NamedTuple):
    """A call that could not be measured."""

    call: dict[str, Any]
    why: str


@dataclass(frozen=True, slots=True, repr=False)
class TuneRow(KeyedResult):
    """What was found out about one call."""

    _columns: ClassVar[tuple[str, ...]] = ("label", "chosen", "runner_up", "times_baseline")

    op: str
    """The operation."""
    call: dict[str, Any]
    """The call, as it is written down."""
    label: str
    """The call in a few words."""
    mode: str
    """``eager`` or ``graph``."""
    baseline: str | None
    """What plain torch runs."""
    timings: Rows[Timing]
    """Every kernel that was timed."""
    out: list[Excluded]
    """Kernels that gave wrong results or failed, each with what was seen."""
    loss: float
    """The relative loss that is to be expected of choosing by these times."""
    chosen: str | None
    """The kernel that serves such calls from now on."""
    basis: str | None
    """What that choice goes by."""
    runner_up: str | None
    """The kernel that would serve without it."""
    times_baseline: float | None
    """How many times faster than plain torch the chosen one is."""

    @classmethod
    def _from(cls, data: Mapping[str, Any]) -> TuneRow:
        timings = rows(map(Timing._from, data["timings"]), "timings")
        return cls(**{**data, "timings": timings, "out": [Excluded(*one) for one in data["out"]]})


@dataclass(frozen=True, slots=True, repr=False)
class TuneReport(Result):
    """What tuning found out."""

    device: str
    """What torch calls the device it was measured on."""
    tuned: Rows[TuneRow]
    """One row for each call that was measured."""
    left: list[dict[str, Any]]
    """Calls the budget did not suffice for."""
    impossible: list[Unmeasured]
    """Calls that could not be measured, each with why."""
    known: int
    """How many calls were measured before, well enough."""
    spent_s: float
    """Seconds spent."""
    forward: Forward | None
    """Of a model: how long its calls take before and after."""
    left_out: list[str]
    """Of a model: what is not among the calls, and why."""
    _document: dict[str, Any] = field(compare=False)

    @classmethod
    def _from(
        cls, document: dict[str, Any], forward: Forward | None = None, left_out: Sequence[str] = ()
    ) -> TuneReport:
        return cls(
            device=document["device"],
            tuned=rows(map(TuneRow._from, document["tuned"]), "tuned"),
            left=document["left"],
            impossible=[Unmeasured(*one) for one in document["impossible"]],
            known=document["known"],
            spent_s=document["spent_s"],
            forward=forward,
            left_out=list(left_out),
            _document=document,
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        if self.forward is None:
            return self._document
        return {**self._document, "forward": self.forward.to_dict(), "left_out": self.left_out}

    def _table(self) -> Table:
        lines = []
        for t in self.tuned:
            times = f"{t.times_baseline:.2f}" if t.times_baseline else "–"
            lines.append((t.label, t.chosen or "–", t.runner_up or "–", times))
        notes = [f"out: {kernel}: {why}" for t in self.tuned for kernel, why in t.out]
        notes += _unmeasured(self.impossible)
        notes += [f"left out: {text}" for text in self.left_out]
        notes.append(f"{len(self.tuned)} measured on {self.device} in {self.spent_s:.1f} s, {self.known} known")
        if self.left:
            notes.append(f"{len(self.left)} not measured: the budget was spent; tune again to go on")
        notes += [str(self.forward)] if self.forward is not None else []
        return Table("", ("call", "chosen", "runner-up", "×baseline"), lines, notes)


@dataclass(frozen=True, slots=True, repr=False)
class RegretRow(KeyedResult):
    """One call: what was chosen, what would have been best, what plain torch does. Times are in microseconds."""

    _columns: ClassVar[tuple[str, ...]] = ("label", "chosen", "basis", "best", "over_best", "times_baseline")

    op: str
    """The operation."""
    call: dict[str, Any]
    """The call, as it is written down."""
    label: str
    """The call in a few words."""
    chosen: str
    """The kernel that was chosen."""
    basis: str
    """What the choice went by."""
    chosen_us: float
    """Its time."""
    best: str
    """The fastest kernel."""
    best_us: float
    """Its time."""
    baseline: str | None
    """What plain torch runs."""
    baseline_us: float | None
    """Its time."""
    over_best: float
    """``chosen_us / best_us``."""
    times_baseline: float | None
    """``baseline_us / chosen_us``: how many times faster than plain torch."""
    noise: float
    """The relative noise of the comparison."""


@dataclass(frozen=True, slots=True, repr=False)
class RegretReport(KeyedResult):
    """How much slower the choices are than the best kernels in hindsight."""

    device: str
    """What torch calls the device it was measured on."""
    rows: Rows[RegretRow]
    """One row for each call."""
    geomean: float
    """The geometric mean of chosen time ÷ best time."""
    worst: float
    """The largest chosen time ÷ best time."""
    times_baseline: float
    """The geometric mean of how many times faster than plain torch the choices are."""
    least_times_baseline: float
    """The least of these."""
    times_baseline_where_other: float
    """The geometric mean where another kernel than torch's own was chosen; 1 when none was."""
    impossible: list[Unmeasured]
    """Calls that could not be measured, each with why."""
    left: int
    """How many calls the budget did not suffice for."""
    interrupted: bool
    """Whether somebody stopped it."""

    @classmethod
    def _from(cls, document: dict[str, Any]) -> RegretReport:
        found = rows((RegretRow(**row) for row in document["rows"]), "rows")
        return cls(**{**document, "rows": found, "impossible": [Unmeasured(*one) for one in document["impossible"]]})

    def _table(self) -> Table:
        lines = []
        for row in self.rows:
            times = f"{row.times_baseline:.2f}" if row.times_baseline else "–"
            lines.append((row.label, row.chosen, row.best, f"{row.over_best:.3f}", times))
        notes = _unmeasured(self.impossible)
        notes.append(
            f"chosen ÷ best on {self.device}: geometric mean {self.geomean:.3f}, worst {self.worst:.3f}; "
            f"× plain torch: {self.times_baseline:.2f}, least {self.least_times_baseline:.2f}"
        )
        return Table("", ("call", "chosen", "best", "÷best", "×baseline"), lines, notes, ("÷best", "×baseline"))


def _unmeasured(impossible: Sequence[Unmeasured]) -> list[str]:
    return [f"not measured: {one.call['op']}: {one.why}" for one in impossible]
