"""The Python part of ``layerzero bench resilience``: a remembered call with everything configured, against none of it.

One process, in turn: rounds without a policy, and rounds with twenty rules, a lock, a canary and a shadow rollout in
force. The kernel does nothing, so that what is compared is LayerZero's own time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import layerzero as lz
from layerzero.bench import overhead

#: What a call with everything configured may cost, as a multiple of one without.
TARGET = 1.1


def _everything() -> dict[str, Any]:
    rules = [
        {"name": f"rule {i}", "match": {"operation": "norm.*", "rows": f">{1000 + i}"}, "avoid": f"nobody.k{i}"}
        for i in range(20)
    ]
    rollouts = [
        {"name": "shadow", "operation": "mlp.linear", "candidate": "onednn.linear", "mode": "shadow", "fraction": 0.01},
        {
            "name": "canary",
            "operation": "activation.gelu",
            "candidate": "onednn.gelu",
            "mode": "canary",
            "fraction": 0.01,
        },
    ]
    return {
        "rules": rules,
        "rollouts": rollouts,
        "prefer_sources": ["bench"],
        "locks": {"norm.layer": "torch.layer_norm"},
    }


def measure(rounds: int = 31, count: int = 5000) -> dict[str, Any]:
    """Microseconds of a call without and with everything configured, and their ratio: medians over rounds in turn."""
    import torch

    torch.set_num_threads(1)
    x, w = torch.randn(4, 64), torch.randn(64)
    overhead.register_kernels_that_do_nothing()
    times: dict[str, list[float]] = {"without": [], "with": []}
    try:
        for i in range(2 * rounds):
            name = ("without", "with")[i % 2]
            lz.configure(**(_everything() if name == "with" else dict.fromkeys(_everything())))
            for _ in range(100):
                lz.rms_norm(x, w, 1e-6)
            begin = time.perf_counter()
            for _ in range(count):
                lz.rms_norm(x, w, 1e-6)
            times[name].append((time.perf_counter() - begin) / count * 1e6)
    finally:
        lz.configure(**dict.fromkeys(_everything()))
        lz.unregister_kernel("bench.attention")
        lz.unregister_kernel("bench.rms_norm")
    without, having = statistics.median(times["without"]), statistics.median(times["with"])
    ratio = statistics.median(b / a for a, b in zip(times["without"], times["with"], strict=True))
    return {"without_us": without, "with_us": having, "ratio": ratio, "target_ratio": TARGET}


def _native_part() -> dict[str, Any]:
    """What the command itself measures, as data."""
    code = (
        "from layerzero import _native; raise SystemExit(_native.cli(['layerzero', 'bench', 'resilience', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main(arguments: list[str]) -> int:
    """The command: its native part, and a call from Python."""
    from layerzero import _native

    if "--json" in arguments:
        print(json.dumps(_native_part() | {"call_from_python": measure()}, indent=2))
        return 0
    code = _native.cli(["layerzero", "bench", "resilience", *arguments])
    if code == 0:
        result = measure()
        print(
            f"a remembered call from Python: {result['without_us']:.3f} µs, with rules, a lock and rollouts "
            f"{result['with_us']:.3f} µs: {result['ratio']:.3f} times (target {TARGET})"
        )
    return code
