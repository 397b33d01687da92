"""Linear layers in float32, compiled with each precision, against torch: speed, and the largest error against float64.

python bench/float32_products.py --threads 1
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import layerzero as lz
import torch
from torch import nn

#: Rows, outputs, inputs.
SIZES = (
    (96, 768, 768),
    (128, 768, 768),
    (128, 3072, 768),
    (128, 768, 3072),
    (128, 2048, 2048),
    (512, 256, 256),
    (512, 768, 3072),
    (512, 3072, 768),
    (512, 2304, 768),
    (1024, 4096, 4096),
)
PRECISIONS = ("float32", "highest", "high")


def median_seconds(call: Callable[[], Any], runs: int) -> float:
    """The median time of some calls in a row."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.no_grad()
def row(rows: int, outs: int, ins: int, rounds: int) -> dict[str, tuple[float, float]]:
    """GFLOP/s and the largest error, by who computes. They take turns; threads that spin after a call come to rest between two of them."""
    layer, x = nn.Linear(ins, outs).eval(), torch.randn(rows, ins)
    calls: dict[str, Callable[[], Any]] = {"torch": lambda: layer(x)}
    for precision in PRECISIONS:
        compiled = lz.compile(layer, x, precision=precision)
        calls[precision] = lambda compiled=compiled: compiled(x)
    exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    flops = 2 * rows * outs * ins
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(0.02)
            call()
            times[name].append(median_seconds(call, max(15, int(2e9 / flops))))
    return {
        name: (flops / statistics.median(times[name]) / 1e9, (call().double() - exact).abs().max().item())
        for name, call in calls.items()
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    print(f"| rows × outputs × inputs | torch | {' | '.join(PRECISIONS)} |")
    print("|---" * (2 + len(PRECISIONS)) + "|")
    for sizes in SIZES:
        found = row(*sizes, given.rounds)
        cells = " | ".join(f"{speed:.0f}, {error:.1e}" for speed, error in found.values())
        print(f"| {'×'.join(map(str, sizes))} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
