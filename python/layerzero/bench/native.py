"""``layerzero bench native``: a native kernel called straight from Python against torch's function.

Each row is ``lz.rms_norm`` served by LayerZero's own SIMD kernel, ``F.rms_norm`` (the code a user would write), and
``torch.empty_like`` (what allocating the result takes from Python), timed in turn.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from typing import Any

import layerzero as lz
from layerzero.bench.rounds import difference, interleaved
from layerzero.printing import print_table

SHAPES = ((1, 64), (4, 64), (1, 4096), (16, 4096), (128, 4096), (1024, 4096))
DTYPES = ("float32", "bfloat16", "float16")
#: Microseconds a round of one call may take.
ROUND_US = 20_000


def _row(dtype: str, rows: int, hidden: int, memory: str, rounds: int) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    kind = getattr(torch, dtype)
    x, w = torch.randn(rows, hidden, dtype=kind), torch.randn(hidden, dtype=kind)
    if memory == "strided":
        x = torch.cat([x, x], -1)[:, :hidden]
    calls: dict[str, Callable[[], Any]] = {
        "lz": lambda: lz.rms_norm(x, w, 1e-6),
        "torch": lambda: F.rms_norm(x, (hidden,), w, 1e-6),
        "allocation": lambda: torch.empty_like(x),
    }
    kernel = lz.which("rms_norm", x, w, 1e-6).kernel_id
    once = statistics.median(interleaved(calls, rounds=3, count=3)["torch"])
    times = interleaved(calls, rounds=rounds, count=max(int(ROUND_US / max(once, 1.0)), 1))
    median = {f"{name}_us": statistics.median(values) for name, values in times.items()}
    speedup = statistics.median(t / z for t, z in zip(times["torch"], times["lz"], strict=True))
    shape = {"dtype": dtype, "rows": rows, "hidden": hidden, "memory": memory, "kernel_id": kernel}
    return {**shape, **median, "speedup": speedup, "over_allocation_us": difference(times, "lz", "allocation")}


def measure(rounds: int = 15) -> dict[str, Any]:
    """Every row, as data. Times are microseconds per call, medians over interleaved rounds."""
    import torch

    with lz.prefer("lz_cpu"), lz.disabled("torch"):
        cases = [(d, *shape, "contiguous") for d in DTYPES for shape in SHAPES]
        cases += [("float32", 16, 4096, "strided"), ("bfloat16", 16, 4096, "strided")]
        table = [_row(*case, rounds) for case in cases]
    return {
        "schema_version": "1.0",
        "versions": {"layerzero": lz.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "rows": table,
    }


def _print(result: dict[str, Any]) -> None:
    print(f"rms_norm by a native kernel, µs (median of {result['rounds']} rounds, {result['threads']} threads)")
    figures = ("lz_us", "torch_us", "speedup", "allocation_us", "over_allocation_us")
    print_table(
        ("", "lz", "F.rms_norm", "speed-up", "empty_like", "lz - empty"),
        [
            (f"{row['dtype']} {row['rows']}x{row['hidden']} {row['memory']}", *(row[key] for key in figures))
            for row in result["rows"]
        ],
    )
    print(f"kernel: {', '.join(sorted({row['kernel_id'] for row in result['rows']}))}")


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="layerzero bench native", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (15)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("rounds is at least 1")
    result = measure(options.rounds)
    print(json.dumps(result, indent=2)) if options.json else _print(result)
    return 0
