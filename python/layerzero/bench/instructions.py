"""How many instructions a call takes: a figure that does not move with the load of the machine.

The interpreter runs once with few calls and once with many, both counted by ``perf stat``; the difference is the calls'.
Virtual machines often have no counters. There ``valgrind --tool=callgrind --collect-atstart=no
'--toggle-collect=_native::front::entries::entry*'`` counts the same, in minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

#: Calls of the two runs whose difference is taken.
FEW, MANY = 20_000, 120_000

_SETUP = """
import torch, layerzero as lz
from layerzero.bench import overhead
torch.set_num_threads(1)
q, k, v = (torch.randn(1, 4, 33, 64) for _ in range(3))
x, w = torch.randn(4, 64), torch.randn(64)
overhead.register_kernels_that_do_nothing()
noop = overhead.noop_operator()
attend, norm = lz.attention, lz.rms_norm
nothing, nothing_norm = overhead.nothing, overhead.nothing_norm
"""

_CALLS = {
    "attention": "attend(q, k, v)",
    "attention direct": "nothing(q, k, v)",
    "rms_norm": "norm(x, w, 1e-6)",
    "rms_norm direct": "nothing_norm(x, w, 1e-6)",
    "torch.ops": "noop(q, k, v)",
}


def per_call() -> dict[str, float] | str:
    """Instructions of each call in user space, by name; or why they cannot be counted here."""
    perf = shutil.which("perf")
    if perf is None:
        return "perf is not installed"
    counts = {}
    for name, call in _CALLS.items():
        few, many = (_count(perf, call, n) for n in (FEW, MANY))
        if few is None or many is None:
            return "perf may not count instructions on this machine"
        counts[name] = (many - few) / (MANY - FEW)
    return counts


def _count(perf: str, call: str, calls: int) -> int | None:
    code = f"{_SETUP}\nfor _ in range({calls}):\n    {call}\n"
    command = [perf, "stat", "-x", ",", "-e", "instructions:u", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    for line in done.stderr.splitlines():
        value, _, rest = line.partition(",")
        if "instructions" in rest and value.isdigit():
            return int(value)
    return None
