"""CUDA graphs and times on the device, shown on a GPU: `python bench/gpu/graphs.py --out graphs.json`, about a minute.

Each line is something that must hold, with what was seen. Nothing is tuned and nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layerzero as lz
import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6
#: How long what the device has done may take to be told, in seconds.
SOON = 10.0
Rows = list[dict[str, Any]]


def _settings(**more: Any) -> None:
    """The settings of a part: those of the one before are taken back."""
    lz.release_captures()
    lz.reset()
    lz.configure(
        perfdb={"path": str(Path(tempfile.mkdtemp()) / "perfdb.sqlite")}, jit={"fail_on_no_fallback": False}, **more
    )


def _row(what: str, holds: bool, seen: str, **figures: Any) -> dict[str, Any]:
    return {"what": what, "holds": holds, "seen": seen, **figures}


def _norm(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16), torch.rand(1024, device="cuda").bfloat16()


def _captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A call in a graph of the user's own."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def _is_refused(call: Callable[[], Any]) -> str | None:
    """What a capture of the call is refused with; ``None`` when it is not."""
    try:
        _captured(call)
    except lz.CudaGraphUnsafeError as error:
        return str(error)
    finally:
        torch.cuda.synchronize()
    return None


def _error(result: Tensor, right: Tensor) -> float:
    """The largest difference, relative to one and the size of the value."""
    return float(((result.double() - right).abs() / (1.0 + right.abs())).max())


def strict() -> Rows:
    """Strict mode: refused, accepted after a warm-up, and no further than the cell of the warm-up."""
    _settings(graph_strict_mode=True)
    (x, weight), (large, _) = _norm(64), _norm(4096)
    before = _is_refused(lambda: lz.rms_norm(x, weight, EPS))
    report = lz.warmup("rms_norm", shapes=[(64, 1024)], dtype=torch.bfloat16, device="cuda")
    proven = [one.kernel for one in report.proven]
    graph, result = _captured(lambda: lz.rms_norm(x, weight, EPS))
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    error = _error(result, F.rms_norm(x.double(), (1024,), weight.double(), EPS))
    beyond = _is_refused(lambda: lz.rms_norm(large, weight, EPS))
    return [
        _row("a call without a proof is refused", before is not None and "lz.warmup" in before, (before or "")[:60]),
        _row(
            "a warm-up proves a kernel",
            bool(proven),
            ", ".join(proven),
            failed=[one.to_dict() for one in report.failed],
        ),
        _row("then the capture replays right", error < 1e-2, f"error {error:.1e}", error=error),
        _row("a proof at 64 rows does not cover 4096", beyond is not None, "refused" if beyond else "served"),
    ]


def recorded() -> Rows:
    """A recording, and a user's own capture of cuBLAS, cuDNN and Triton after it."""
    _settings()
    wanted = {"mlp.linear": "torch.cuda.linear", "attention": "torch.cuda.sdpa.cudnn", "norm.rms": "triton.rms_norm"}
    for operation, kernel in wanted.items():
        lz.force_kernel(operation, kernel, optional=True)
    x, weight = _norm(256)
    matrix = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) / 32

    def model() -> Tensor:
        h = lz.linear(lz.rms_norm(x, weight, EPS), matrix)
        q = h.view(1, 256, 8, 128)
        return lz.attention(q, q, q, causal=True)

    with lz.capture() as recording:
        model()
    held = {one.call["op"]: one.kernel for one in recording.calls}
    graph, result = _captured(model)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    h = F.rms_norm(x.double(), (1024,), weight.double(), EPS).bfloat16().double() @ matrix.double().T
    q = h.bfloat16().double().view(1, 256, 8, 128).transpose(1, 2)
    right = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
    error = _error(result, right)
    for operation in wanted:
        lz.unforce_kernel(operation)
    libraries = sorted(str(kernel) for kernel in held.values())
    return [
        _row("with lz.capture(), then a capture of three libraries", len(held) == 3, ", ".join(libraries), held=held),
        _row("the replay is right against float64", error < 3e-2, f"error {error:.1e}", error=error),
    ]


def _wait_for(done: Callable[[], bool]) -> bool:
    until = time.monotonic() + SOON
    while not (over := done()) and time.monotonic() < until:
        time.sleep(0.01)
    return over


def _host_us(call: Callable[[], Any], count: int = 100, rounds: int = 31) -> float:
    """Microseconds the host spends on a call, the device being idle when it begins."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - begun) / count * 1e6)
        torch.cuda.synchronize()
        # What was sampled is handed on before the next round, so that the queue is never full.
        time.sleep(0.06)
    return statistics.median(times)


def _device_us(call: Callable[[], Any], count: int = 50) -> float:
    """What a call takes the device, by events that are waited for."""
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
    return statistics.median(times)


def times() -> Rows:
    """Sampled calls: what timing one costs the caller, and the figures against events that are waited for."""
    _settings(health={"sample_every": 1 << 32}, degradation={"enabled": False})
    x, weight = _norm(64)
    q = torch.randn(1, 8192, 16, 128, device="cuda", dtype=torch.bfloat16)
    lz.force_kernel("attention", "torch.cuda.sdpa.flash")

    def small() -> Tensor:
        return lz.rms_norm(x, weight, EPS)

    def large() -> Tensor:
        return lz.attention(q, q, q, causal=True)

    for call in (small, large):
        _host_us(call, 10, 3)
    plain = _host_us(small)
    known = _device_us(large)
    lz.configure(health={"sample_every": 64})
    small()
    sampled = _host_us(small, 640)
    lz.configure(health={"sample_every": 1})
    small()
    every = _host_us(small)
    kernel = "torch.cuda.sdpa.flash"
    begun = lz.health().kernels[kernel]["latency_samples"]
    for _ in range(101):
        large()
    told = _wait_for(lambda: lz.health().kernels[kernel]["latency_samples"] >= begun + 100)
    mean = (lz.health().kernels[kernel]["mean_ns"] or 0) / 1e3
    lz.unforce_kernel("attention")
    off = abs(mean / known - 1.0)
    cost = sampled - plain
    return [
        _row(
            "timing one call in 64 costs a caller, per call",
            cost < 1.0,
            f"{cost:.2f} µs beyond {plain:.1f} µs; {every - plain:.0f} µs if every call is timed",
            cost_us=cost,
            cost_of_every_call_us=every - plain,
        ),
        _row("every sampled call is told", told, f"{lz.health().kernels[kernel]['latency_samples'] - begun} of 100"),
        _row(
            "the figure is the device's",
            off < 0.15,
            f"{mean:.1f} µs, {known:.1f} µs by events that are waited for",
            mean_us=mean,
            known_us=known,
        ),
    ]


def canary() -> Rows:
    """A canary that is launched as fast and takes the device three times as long."""
    _settings()
    x, weight = _norm(64)
    made = {"steady.norm": (90, 100_000), "fresh.norm": (99, 300_000)}
    for kernel_id, (priority, cycles) in made.items():
        lz.register_kernel(
            operation="norm.rms", kernel_id=kernel_id, platform="cuda", supported_dtypes=["bfloat16"], priority=priority
        )(_sleeping(cycles))
    try:
        rollout = {
            "name": "trial",
            "operation": "rms_norm",
            "candidate": "fresh.norm",
            "mode": "canary",
            "fraction": 1.0,
        }
        limits = {"min_samples": 20, "max_slowdown": 1.5}
        # Measurements of other machines would put another kernel first than the one the canary is compared with.
        without = {"degradation": {"enabled": False}, "perfdb": {"priors": False}}
        lz.configure(rollouts=[{**rollout, **limits}], health={"sample_every": 1}, **without)
        calls = 0
        until = time.monotonic() + SOON
        while time.monotonic() < until and lz.health().rollouts[0]["verdict"]["state"] != "rolled_back":
            lz.rms_norm(x, weight, EPS)
            calls += 1
        found = lz.health().rollouts[0]
        host = {}
        for kernel_id in made:
            torch.cuda.synchronize()
            begun = time.perf_counter()
            _sleeping(made[kernel_id][1])(x, weight, EPS)
            host[kernel_id] = (time.perf_counter() - begun) * 1e6
            torch.cuda.synchronize()
        slowdown = found["slowdown"] or 0.0
        out = found["verdict"]["state"] == "rolled_back" and found["verdict"]["why"]["cause"] == "slowdown"
        return [
            _row(
                "a canary three times as slow on the device is rolled back",
                out and 2.0 < slowdown < 4.0,
                f"{slowdown:.2f} times, after {calls} calls",
                slowdown=slowdown,
                launch_us=host,
            )
        ]
    finally:
        for kernel_id in made:
            lz.unregister_kernel(kernel_id)


def _sleeping(cycles: int) -> Callable[..., Tensor]:
    """A norm that keeps the device busy for so many cycles more: launching it takes the same, whatever they are."""

    def kernel(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        return F.rms_norm(input, (input.shape[-1],), weight, eps)

    return kernel


PARTS: tuple[Callable[[], Rows], ...] = (strict, recorded, times, canary)


def main(arguments: list[str]) -> int:
    """Runs every part; 1 when something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the rows go, as JSON")
    out = parser.parse_args(arguments).out
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    begun, rows = time.perf_counter(), []
    for part in PARTS:
        try:
            rows += [{"part": part.__name__, **row} for row in part()]
        except Exception as error:  # noqa: BLE001 - the other parts are to be seen as well
            told = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            rows.append({"part": part.__name__, **_row("ran", False, told)})
    lz.release_captures()
    lz.reset()
    for row in rows:
        print(f"{'ok' if row['holds'] else 'NO':<3} {row['part']:<9} {row['what']:<58} {row['seen']}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.perf_counter() - begun:.0f} s")
    if out is not None:
        device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        out.write_text(json.dumps({**device, "rows": rows}, indent=1, default=str), encoding="utf-8")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
