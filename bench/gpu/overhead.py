"""What a call through LayerZero costs on the host beyond the function of the kernel it runs, and that replay has none."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import layerzero as lz
import torch
import torch.nn.functional as F
from layerzero.bench.capturing import captured

Call = Callable[[], Any]

#: Calls timed in a row: few enough that the queue of the device takes all of them.
COUNT = 100
ROUNDS = 101
#: How often all functions are measured, one after the other: the median of these counts, and each is told.
PASSES = 3
REPLAYS = 50


def _cases(device: str) -> dict[str, tuple[str, str, tuple[Any, ...], Call, Call]]:
    """By function: the operation, torch's kernel for it, arguments, the call through LayerZero and the direct call."""
    kernels = "torch" if device == "cpu" else "torch.cuda"
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x, gate, up = (torch.randn(4, 64, device=device, dtype=dtype) for _ in range(3))
    w = torch.randn(64, device=device, dtype=dtype)
    q, k, v = (torch.randn(1, 4, 33, 64, device=device, dtype=dtype) for _ in range(3))
    return {
        "rms_norm": (
            "norm.rms",
            f"{kernels}.rms_norm",
            (x, w, 1e-6),
            lambda: lz.rms_norm(x, w, 1e-6),
            lambda: F.rms_norm(x, (64,), w, 1e-6),
        ),
        "attention": (
            "attention.standard.prefill",
            f"{kernels}.sdpa",
            (q, k, v),
            lambda: lz.attention(q, k, v, layout="BHSD"),
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
        "silu_mul": (
            "activation.silu_mul",
            f"{kernels}.silu_mul",
            (gate, up),
            lambda: lz.silu_mul(gate, up),
            lambda: F.silu(gate) * up,
        ),
    }


@contextmanager
def _locked(operation: str, kernel: str) -> Iterator[None]:
    lz.force_kernel(operation, kernel)
    try:
        yield
    finally:
        lz.unforce_kernel(operation)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _host_us(call: Call, device: str) -> float:
    """Microseconds the host spends on one call; the device is idle when it begins and is not waited for."""
    _wait(device)
    begun = time.perf_counter()
    for _ in range(COUNT):
        call()
    return (time.perf_counter() - begun) / COUNT * 1e6


def _pair(ours: Call, direct: Call, device: str) -> dict[str, float]:
    times: list[list[float]] = [[], []]
    for call in (ours, direct):
        _host_us(call, device)
    for turn in range(ROUNDS):
        for i in (0, 1) if turn % 2 else (1, 0):
            times[i].append(_host_us((ours, direct)[i], device))
    _wait(device)
    return {
        "lz_us": statistics.median(times[0]),
        "direct_us": statistics.median(times[1]),
        "overhead_us": statistics.median(a - b for a, b in zip(*times, strict=True)),
    }


def _calls_of_ours(replay: Call) -> int:
    """How many functions of LayerZero are entered while a graph is replayed."""
    seen = 0

    def look(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        if event == "call":
            seen += "layerzero" in str(frame.f_globals.get("__name__"))
        elif event == "c_call":
            seen += "layerzero" in str(getattr(argument, "__module__", "") or "")

    sys.setprofile(look)
    try:
        replay()
    finally:
        sys.setprofile(None)
    return seen


def _replay_us(graph: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / REPLAYS * 1e3


def _replays(ours: Call, direct: Call) -> dict[str, float]:
    graphs = [captured(ours)[0], captured(direct)[0]]
    times: list[list[float]] = [[], []]
    for turn in range(21):
        for i in (0, 1) if turn % 2 else (1, 0):
            times[i].append(_replay_us(graphs[i]))
    return {
        "replay_us": statistics.median(times[0]),
        "replay_direct_us": statistics.median(times[1]),
        "functions_of_layerzero_in_replay": _calls_of_ours(graphs[0].replay),
    }


def measure(device: str) -> dict[str, Any]:
    """By function: the times, or what went wrong. Of some passes, by what each cost more, that in the middle."""
    passes = [_pass(device) for _ in range(PASSES)]
    found: dict[str, Any] = {}
    for name in passes[0]:
        rows = sorted((one[name] for one in passes), key=lambda row: row.get("overhead_us", float("inf")))
        found[name] = {**rows[len(rows) // 2], "overheads_us": [one[name].get("overhead_us") for one in passes]}
    return found


def _pass(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (operation, kernel, arguments, ours, direct) in _cases(device).items():
        row: dict[str, Any] = {"kernel": kernel}
        found[name] = row
        try:
            if device == "cpu":
                # There torch chooses among kernels that LayerZero knows by themselves.
                kernel = row["kernel"] = lz.which(name, *arguments).kernel_id
            with _locked(operation, kernel):
                row.update(_pair(ours, direct, device))
                if device != "cpu":
                    row.update(_replays(ours, direct))
        except Exception as error:  # noqa: BLE001 - the other functions are measured all the same
            row["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return found
