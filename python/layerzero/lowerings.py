"""What became of calls in graphs that torch compiled: ``lz.compile_report()``."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any

from layerzero.lifecycle import open_in_forks
from layerzero.printing import aligned, visible

#: Calls that are remembered, at most; the oldest are forgotten.
_MOST = 1000
_LOCK = open_in_forks(threading.Lock())


@dataclass(frozen=True)
class LoweredCall:
    """A kind of call in a compiled graph, and what it became."""

    function: str
    """The public function."""
    call: str
    """Its tensors and parameters. A size that varies is shown as it was while the graph was compiled, with ``~`` before."""
    lowered_to: str
    """``torch``: plain torch code, part of the graph; ``kernel``: one kernel, called without selection; ``operator``: an
    operator that selects its kernel at every call."""
    kernel: str | None
    """The kernel that was chosen, or whose torch code was inlined."""
    why: str
    """Why."""

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        return asdict(self)


class CompileReport:
    """The calls of compiled graphs, in the order they were compiled in. Prints as a table."""

    def __init__(self, calls: list[LoweredCall]) -> None:
        #: The calls.
        self.calls = calls

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        return {"schema_version": "1.0", "calls": [call.to_dict() for call in self.calls]}

    def __repr__(self) -> str:
        return f"<CompileReport of {len(self.calls)} calls>"

    def __str__(self) -> str:
        if not self.calls:
            return "no graph with LayerZero calls was compiled in this process"
        rows = ((c.function, c.call, c.lowered_to, c.kernel or "", c.why) for c in self.calls)
        return visible("\n".join(aligned(("function", "call", "as", "kernel", "why"), rows, ())))


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
        calls = list(_calls)
        if clear:
            _calls.clear()
    return CompileReport(calls)
