"""The engine as it is at the start of a process, for tests that share one."""

from __future__ import annotations

from typing import Any

import layerzero as lz


def fresh(**settings: Any) -> None:
    """Closed breakers, the full level, nothing configured but this. What is disabled for good stays so."""
    # Other thresholds begin anew, whatever was counted before.
    lz.configure(breaker__failure_threshold=977, degradation__min_calls=977)
    lz.reset()
    if settings:
        lz.configure(**settings)


def failures(kernel: str) -> int:
    """How often a kernel has failed in this process."""
    return int(lz.health().kernels.get(kernel, {"failures": 0})["failures"])


def breaker(backend: str, op: str) -> dict[str, Any]:
    """A breaker, as the health shows it."""
    (found,) = (b for b in lz.health().breakers if b["backend"] == backend and b["op"] == op)
    return dict(found)


def events(since: int = 0) -> list[dict[str, Any]]:
    """What happened after the event of this number."""
    return [event for event in lz.health().events if event["number"] > since]


def last_event() -> int:
    """The number of the last event."""
    return max((event["number"] for event in lz.health().events), default=0)
