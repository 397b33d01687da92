"""Random sequences of calls whose kernels fail, and what must happen: one sequential model of the call path.

Every caller (host tensors in Rust, Python objects) replays these and must do the same: try the same kernels in the same
order, give the same answer, and leave the same circuits open.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

#: What a kernel does when it is called. One that fails has written half of what it updates in place.
BEHAVIOURS = ("serves", "fails", "runs out of memory", "refuses the data")
OPERATIONS = ("norm.rms", "kv_cache.append", "kv_cache.compact")
REFERENCE = "reference"
#: Failures in a row that open a kernel's circuit.
THRESHOLD = 5


@dataclass
class Model:
    """Kernels ``k0``, ``k1``, … in the order of their priority, and the reference, which always serves."""

    workspaces: dict[str, int]
    fallback: bool
    in_a_row: dict[str, int] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)

    def call(self, behaviour: dict[str, str]) -> dict[str, Any]:
        """Makes a call: which kernels run, in order, and which serves it."""
        left = [*self.workspaces, REFERENCE]
        if not self.fallback:
            left = left[:1]
        ran: list[str] = []
        failed: list[str] = []
        while left:
            kernel = left.pop(0)
            if kernel in self.open:
                continue
            ran.append(kernel)
            match behaviour.get(kernel, "serves"):
                case "serves":
                    self._count(failed)
                    self.in_a_row[kernel] = 0
                    return {"ran": ran, "served": kernel, "end": "served"}
                case "refuses the data":
                    # The call itself is wrong: nobody is to blame.
                    return {"ran": ran, "served": None, "end": "refused"}
                case "runs out of memory":
                    # Says nothing about the kernel. Who needs the least goes next, the reference last.
                    self._count(failed)
                    failed = []
                    left.sort(key=lambda k: (k == REFERENCE, self.workspaces.get(k, 0)))
                case _:
                    failed.append(kernel)
            if not self.fallback:
                break
        self._count(failed)
        return {"ran": ran, "served": None, "end": "unserved"}

    def _count(self, failed: list[str]) -> None:
        for kernel in failed:
            self.in_a_row[kernel] = self.in_a_row.get(kernel, 0) + 1
            if self.in_a_row[kernel] >= THRESHOLD:
                self.open.add(kernel)


def sequence(seed: int) -> dict[str, Any]:
    """One sequence of calls."""
    draw = random.Random(seed)
    kernels = [f"k{i}" for i in range(draw.randint(1, 3))]
    model = Model({kernel: draw.choice((0, 64, 4096)) for kernel in kernels}, fallback=draw.random() < 0.8)
    # Each kernel is good or bad for a while, so that failures come in rows.
    habits = {kernel: draw.choice(BEHAVIOURS) for kernel in kernels}
    calls = []
    for _ in range(draw.randint(5, 25)):
        if draw.random() < 0.2:
            habits[draw.choice(kernels)] = draw.choice(BEHAVIOURS)
        behaviour = dict(habits)
        calls.append({"kernels": behaviour, "expected": model.call(behaviour)})
    return {
        "seed": seed,
        "op": OPERATIONS[seed % len(OPERATIONS)],
        "fallback": model.fallback,
        "workspaces": model.workspaces,
        "calls": calls,
        "open": sorted(model.open),
    }


def text(count: int = 120) -> str:
    """Sequences as a file: one per line, so that diffs can be read."""
    lines = ",\n".join(json.dumps(sequence(seed)) for seed in range(count))
    return f'{{"threshold": {THRESHOLD}, "sequences": [\n{lines}\n]}}\n'
