"""What became of calls in graphs that torch compiled: ``lz.compile_report()``."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from layerzero.lifecycle import open_in_forks
from layerzero.results import Result, Rows, Table, rows

#: Calls that are remembered, at most; the oldest are forgotten.
_MOST = 1000
_LOCK = open_in_forks(threading.Lock())


@dataclass(frozen=True, slots=True, repr=False)
class LoweredCall(Result):
    """A kind of call in a compiled graph, and what it became."""

    function: str
    """The public function."""
    call: str
    """Its tensors and parameters. A size that varies is shown as it was while the graph was compiled, with ``~`` before."""
    lowered_to: str
    """``torch``: plain torch code, part of the graph; ``launch``: a Triton kernel that the compiled code launches by itself;
    ``kernel``: one kernel, called without selection; ``operator``: an operator that selects its kernel at every call."""
    kernel: str | None
    """The kernel that was chosen, or whose torch code was inlined."""
    why: str
    """Why."""


@dataclass(frozen=True, slots=True, repr=False)
class CompileReport(Result):
    """The calls of compiled graphs, in the order they were compiled in. Prints as a table."""

    calls: Rows[LoweredCall]
    """The calls."""

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        return {"schema_version": "1.0", **self.calls.to_dict()}

    def _table(self) -> Table:
        if not self.calls:
            return Table("no graph with LayerZero calls was compiled in this process", (), ())
        lines = [(c.function, c.call, c.lowered_to, c.kernel or "", c.why) for c in self.calls]
        return Table("", ("function", "call", "as", "kernel", "why"), lines)


_calls: dict[LoweredCall, None] = {}


def note(call: LoweredCall) -> None:
    """Takes note of a call. The compiler traces a call several times; it is listed once."""
    with _LOCK:
        _calls.setdefault(call)
        while len(_calls) > _MOST:
            del _calls[next(iter(_calls))]


def compile_report(*, clear: bool = False) -> CompileReport:
    """What became of the calls in graphs that ``torch.compile`` made in this process, each with why.

    A graph that torch took from its cache on disk was not compiled here, and is not listed. With ``clear`` what is listed
    is forgotten.
    """
    with _LOCK:
        calls = rows(_calls, "calls")
        if clear:
            _calls.clear()
    return CompileReport(calls)
