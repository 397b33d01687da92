"""``layerzero bench overhead``: what a call through LayerZero costs beyond the kernel it runs.

First every public function, in every form, against the literal torch code one would write (``bench/literal.py``), at sizes
at which kernels cost next to nothing. Then some functions against the direct call of the kernel they selected, and against a
torch operator that does nothing with the same tensors; and with a kernel that does nothing, which shows the overhead without
the noise of a kernel.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import layerzero as lz
from layerzero import _native
from layerzero.bench import instructions, literal
from layerzero.bench.rounds import difference, interleaved
from layerzero.printing import print_table

#: What the overhead may be, in microseconds, and as a part of a torch operator that does nothing.
TARGETS = {"attention": 0.5, "rms_norm": 0.4}
TARGET_OF_NOOP = 0.35


def _cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any], str]]:
    """By name: the call through LayerZero, the direct call of the kernel it selected, and that kernel."""
    import torch
    import torch.nn.functional as F

    def tensors(*shape: int) -> list[torch.Tensor]:
        return [torch.randn(*shape) for _ in range(3)]

    bhsd = tensors(1, 4, 33, 64)
    bshd = tensors(1, 33, 4, 64)
    x, w = torch.randn(4, 64), torch.randn(64)
    q, k, v = bhsd
    a, b, c = bshd

    def direct_bshd() -> torch.Tensor:
        turned = F.scaled_dot_product_attention(a.transpose(1, 2), b.transpose(1, 2), c.transpose(1, 2), is_causal=True)
        return turned.transpose(1, 2)

    return {
        "attention": (
            lambda: lz.attention(q, k, v, layout="BHSD"),
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            lz.which("attention", q, k, v, layout="BHSD").kernel_id,
        ),
        "attention, BSHD": (lambda: lz.attention(a, b, c), direct_bshd, lz.which("attention", a, b, c).kernel_id),
        "rms_norm": (
            lambda: lz.rms_norm(x, w, 1e-6),
            lambda: F.rms_norm(x, (64,), w, 1e-6),
            lz.which("rms_norm", x, w, 1e-6).kernel_id,
        ),
    }


_kept: list[Any] = []


@functools.cache
def noop_operator() -> Any:
    """A torch operator that does nothing, defined as any other is."""
    import torch

    library: Any = torch.library.Library("layerzero_bench", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("noop(Tensor q, Tensor k, Tensor v) -> ()")
    library.impl("noop", lambda q, k, v: None, "CPU")
    # The registration lives as long as the library object.
    _kept.append(library)
    return torch.ops.layerzero_bench.noop


def nothing(query: Any, key: Any, value: Any) -> Any:
    """A kernel that does nothing."""
    return query


def nothing_norm(input: Any, weight: Any, eps: Any) -> Any:
    """A norm that does nothing."""
    return input


def register_kernels_that_do_nothing() -> None:
    """Makes both the kernels of their operations."""
    common: dict[str, Any] = {"platform": "cpu", "supported_dtypes": ["float32"], "priority": 100, "trusted": True}
    attention = lz.register_kernel(
        operation="attention", kernel_id="bench.attention", layouts=["BSHD"], params={"causal": {}}, **common
    )
    attention(nothing)
    lz.register_kernel(operation="norm.rms", kernel_id="bench.rms_norm", **common)(nothing_norm)


def _with_kernels_that_do_nothing(rounds: int, count: int, threads: int) -> dict[str, dict[str, float]]:
    import torch

    q, k, v = (torch.randn(1, 4, 33, 64) for _ in range(3))
    x, w = torch.randn(4, 64), torch.randn(64)
    register_kernels_that_do_nothing()
    noop = noop_operator()
    try:
        times = interleaved(
            {
                "attention": lambda: lz.attention(q, k, v),
                "attention direct": lambda: nothing(q, k, v),
                "rms_norm": lambda: lz.rms_norm(x, w, 1e-6),
                "rms_norm direct": lambda: nothing_norm(x, w, 1e-6),
                "torch.ops": lambda: noop(q, k, v),
                "empty": lambda: None,
            },
            rounds=rounds,
            count=count,
            threads=threads,
        )
    finally:
        lz.unregister_kernel("bench.attention")
        lz.unregister_kernel("bench.rms_norm")
    tax = difference(times, "torch.ops", "empty")
    rows = {}
    for name in ("attention", "rms_norm"):
        cost = difference(times, name, f"{name} direct")
        rows[name] = {"overhead_us": cost, "torch_ops_noop_us": tax, "of_noop": cost / tax}
    return rows


def _allocations(calls: int = 1000) -> dict[str, int] | str:
    """Heap allocations of the native side over many calls that are remembered, where this build counts them."""
    if _native.allocations() is None:
        return "not counted: build with --features count-allocations"
    counts = {}
    for name, (call, _, _) in _cases().items():
        call()
        before = _native.allocations() or 0
        for _ in range(calls):
            call()
        counts[name] = (_native.allocations() or 0) - before
    return counts


def _among_others(rounds: int, count: int) -> dict[str, float]:
    """The overhead when the calls of all cases take turns in short rounds: each finds the caches as others left them."""
    cases = _cases()
    calls = {f"{name}{side}": call for name, c in cases.items() for side, call in (("", c[0]), (" direct", c[1]))}
    times = interleaved(calls, rounds=rounds, count=count)
    return {name: difference(times, name, f"{name} direct") for name in cases}


#: How long kernels may be compiled in the background before the functions are timed, in seconds.
_WARM_S = 60.0


def against_torch(device: str, rounds: int, count: int) -> dict[str, dict[str, Any]]:
    """Every public function against the literal torch code: both, and the median of their differences over rounds."""
    import torch

    rows: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        cases = literal.cases(device)
        _compiled(cases)
        for case in cases:
            times = interleaved({"lz": case.lz, "torch": case.torch}, rounds=rounds, count=max(count // 20, 1))
            rows[case.name] = {
                "lz_us": statistics.median(times["lz"]),
                "torch_us": statistics.median(times["torch"]),
                "over_torch_us": difference(times, "lz", "torch"),
            }
    return rows


def _compiled(cases: list[literal.Case]) -> None:
    """Makes each call until nothing is left to compile for them."""
    until = time.monotonic() + _WARM_S
    while True:
        for case in cases:
            case.lz()
        state = lz.health().jit
        if not (state.get("queued") or state.get("running") or state.get("cold")) or time.monotonic() > until:
            return
        time.sleep(0.5)


def measure(
    rounds: int = 41, count: int = 2000, count_instructions: bool = True, device: str = "cpu"
) -> dict[str, Any]:
    """Everything, as data. Times are microseconds per call, medians over interleaved rounds."""
    import torch

    torch.set_num_threads(1)
    every = against_torch(device, rounds, count)
    rows = {}
    cases = _cases()
    for name, (call, direct, kernel) in cases.items():
        # Each pair by itself: other kernels in between would be measured along, by the caches they take.
        # Many short rounds: a kernel takes long enough for the machine to change its pace within a long one.
        times = interleaved({name: call, f"{name} direct": direct}, rounds=rounds * 5, count=max(count // 5, 1))
        rows[name] = {
            "kernel_id": kernel,
            "lz_us": statistics.median(times[name]),
            "direct_us": statistics.median(times[f"{name} direct"]),
            "overhead_us": difference(times, name, f"{name} direct"),
            "rounds": rounds * 5,
            "calls_per_round": max(count // 5, 1),
        }
    for name, cost in _among_others(rounds * 5, max(count // 10, 1)).items():
        rows[name]["overhead_among_others_us"] = cost
    return {
        "schema_version": "1.0",
        "versions": {"layerzero": lz.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "rounds": rounds,
        "calls_per_round": count,
        "grad_enabled": torch.is_grad_enabled(),
        "device": device,
        "against_torch": every,
        "selected_kernel": rows,
        "kernel_that_does_nothing": _with_kernels_that_do_nothing(rounds, count, 1),
        "kernel_that_does_nothing_2_threads": _with_kernels_that_do_nothing(max(rounds // 4, 3), count, 2),
        "native_allocations_in_1000_calls": _allocations(),
        "instructions_per_call": instructions.per_call() if count_instructions else "not counted: --no-instructions",
        "targets_us": TARGETS,
        "target_of_noop": TARGET_OF_NOOP,
        "torch_state_by": _native.status()["torch_state_by"],
        "tensors_by": _native.status()["tensors_by"],
    }


def _print(result: dict[str, Any]) -> None:
    print(f"every function against the literal torch code on {result['device']}, µs (median of interleaved rounds)")
    against = result["against_torch"].items()
    print_table(
        ("", "through lz", "torch", "over torch"),
        [(name, row["lz_us"], row["torch_us"], row["over_torch_us"]) for name, row in against],
    )
    print("overhead of a call over its kernel on the CPU, µs (median of interleaved rounds)")
    columns = ("", "through lz", "direct", "overhead", "among others", "target", "kernel")
    figures = ("lz_us", "direct_us", "overhead_us", "overhead_among_others_us")
    rows = [
        (name, *(row[key] for key in figures), str(result["targets_us"].get(name, "")), row["kernel_id"])
        for name, row in result["selected_kernel"].items()
    ]
    print_table(columns, rows, columns[1:-1])
    for title, key in (("one thread", ""), ("two threads", "_2_threads")):
        print(f"with a kernel that does nothing, {title}")
        print_table(
            ("", "overhead", "÷ a torch operator that does nothing", "that operator"),
            [
                (name, row["overhead_us"], row["of_noop"], row["torch_ops_noop_us"])
                for name, row in result[f"kernel_that_does_nothing{key}"].items()
            ],
        )
    print(f"native allocations in 1000 calls: {result['native_allocations_in_1000_calls']}")
    counts = result["instructions_per_call"]
    if isinstance(counts, str):
        print(f"instructions per call: {counts}")
        return
    for name in ("attention", "rms_norm"):
        cost = counts[name] - counts[f"{name} direct"]
        print(f"instructions per call, {name} over a kernel that does nothing: {cost:.0f}")
    print(f"instructions per call, a torch operator that does nothing: {counts['torch.ops']:.0f}")


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="layerzero bench overhead", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=41, help="interleaved rounds (41)")
    parser.add_argument("--count", type=int, default=2000, help="calls per round (2000)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the functions against torch (cpu)")
    parser.add_argument("--no-instructions", action="store_true", help="do not count instructions (ten short runs)")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.count < 1:
        parser.error("rounds and count are at least 1")
    result = measure(options.rounds, options.count, not options.no_instructions, options.device)
    print(json.dumps(result, indent=2)) if options.json else _print(result)
    return 0
