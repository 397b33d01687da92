"""The list of runners."""

from __future__ import annotations

from collections.abc import Callable

from layerzero.device_graphs.nodes import Node, Work

Runner = Callable[[Node], Work]

#: The runner of each operation.
RUNNERS: dict[str, Runner] = {}


def runs(op: str) -> Callable[[Runner], Runner]:
    """Makes a function the runner of an operation."""

    def add(runner: Runner) -> Runner:
        RUNNERS[op] = runner
        return runner

    return add
