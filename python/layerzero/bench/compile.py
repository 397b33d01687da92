"""``layerzero bench compile``: compiled blocks with LayerZero's functions against the same in torch.

A decoder block of GPT-2, Llama, Qwen and Gemma is compiled with `fullgraph=True`: in plain torch, in plain torch again, with
LayerZero's functions lowered into the graph, and with an operator for each of them that selects its kernel at every call
(`compile.lowering: off`). They run in interleaved rounds. A ratio above 1 says that torch needs longer: the median over rounds,
and that of the fastest rounds. The ratio of torch to itself says what a difference is worth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import types
from collections.abc import Callable
from typing import Any

import torch

import layerzero as lz
from layerzero.bench import blocks
from layerzero.bench.rounds import interleaved
from layerzero.printing import print_table

LENGTHS = {"cpu": (1, 16, 64, 512), "cuda": (1, 16, 64, 512, 1000)}
#: How long one timing of a block is to take, in seconds.
_TIMING_S = 0.02
#: How far results may be apart, as a share of the largest number: half-width floats are rounded at other places.
_DIFFERENCE = 0.05


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function for the compiler to keep apart: it knows functions by their code."""
    named = function.__code__.replace(co_name=f"{function.__name__}_")
    return types.FunctionType(named, function.__globals__, function.__name__)


def _compiled(function: Callable[..., Any], mode: str, lowering: str, args: tuple[Any, ...]) -> Callable[[], Any]:
    made = torch.compile(_own(function), fullgraph=True, dynamic=False, mode=None if mode == "default" else mode)
    lz.configure(compile={"lowering": lowering, "recompile": "never"})
    try:
        for _ in range(3):
            made(*args)
    finally:
        lz.configure(compile=None)
    return lambda: made(*args)


def _repeated(call: Callable[[], Any], count: int, device: str) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            call()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def _row(family: str, length: int, device: str, dtype: torch.dtype, mode: str, rounds: int) -> dict[str, Any]:
    ours, plain, small, published = blocks.FAMILIES[family]
    sizes = published if device == "cuda" else small
    weights = blocks.weights(sizes, length, dtype, device)
    x = torch.randn(1, length, sizes.hidden, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    args = (x, weights, sizes)
    torch.compiler.reset()
    lz.compile_report(clear=True)
    calls = {
        "torch": _compiled(plain, mode, "auto", args),
        "again": _compiled(plain, mode, "auto", args),
        "lowered": _compiled(ours, mode, "auto", args),
    }
    lowered = [call.to_dict() for call in lz.compile_report(clear=True).calls]
    calls["operators"] = _compiled(ours, mode, "off", args)
    # A CUDA graph writes its next result where the last one was.
    expected = calls["torch"]().clone()
    error = max((expected - calls[name]()).abs().max().item() for name in ("lowered", "operators"))
    if error > _DIFFERENCE * expected.abs().max().item():
        raise SystemExit(f"{family}, {length} tokens: results differ by {error:.3g}, so that times mean nothing")
    seconds = _once(calls["torch"], device)
    count = max(1, min(200, int(_TIMING_S / seconds)))
    times = interleaved({name: _repeated(call, count, device) for name, call in calls.items()}, rounds=rounds, count=1)
    medians = {name: statistics.median(of) / count for name, of in times.items()}

    def ratio(name: str) -> float:
        return statistics.median(a / b for a, b in zip(times["torch"], times[name], strict=True))

    return {
        "family": family,
        "length": length,
        **{f"{name}_us": median for name, median in medians.items()},
        "lowered_times_torch": ratio("lowered"),
        "operators_times_torch": ratio("operators"),
        "again_times_torch": ratio("again"),
        "fastest_lowered_times_torch": min(times["torch"]) / min(times["lowered"]),
        "largest_difference": error,
        "calls": lowered,
    }


def _once(call: Callable[[], Any], device: str) -> float:
    run = _repeated(call, 5, device)
    run()
    return min(interleaved({"once": run}, rounds=3, count=1)["once"]) / 5e6


def measure(
    families: list[str], lengths: list[int], device: str, dtype: torch.dtype, mode: str, rounds: int
) -> dict[str, Any]:
    """Compiles and times every block at every length."""
    from torch._inductor.utils import fresh_cache

    rows = []
    # A graph of an earlier run was compiled for its number of threads, and is not in the report.
    with torch.no_grad(), fresh_cache():
        for family in families:
            for length in lengths:
                rows.append(_row(family, length, device, dtype, mode, rounds))
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "mode": mode,
        "rounds": rounds,
        "least_lowered": min(row["lowered_times_torch"] for row in rows),
        "rows": rows,
    }


def _print(result: dict[str, Any]) -> None:
    print(f"{result['device']}, {result['dtype']}, mode {result['mode']}; × torch: above 1 is faster than plain torch")
    columns = (
        "block",
        "S",
        "torch",
        "lowered",
        "operators",
        "lowered ×",
        "operators ×",
        "fastest ×",
        "torch ×",
        "kernels",
    )
    cells = []
    for row in result["rows"]:
        times = (f"{row[f'{name}_us']:.1f} µs" for name in ("torch", "lowered", "operators"))
        ratios = ("lowered_times_torch", "operators_times_torch", "fastest_lowered_times_torch", "again_times_torch")
        kept = sorted({call["kernel"] or "?" for call in row["calls"] if call["lowered_to"] != "torch"})
        told = (*times, *(f"{row[name]:.3f}" for name in ratios), ", ".join(kept) or "all torch code")
        cells.append((row["family"], row["length"], *told))
    print_table(columns, cells, columns[1:-1])
    print(f"least: {result['least_lowered']:.3f}")


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="layerzero bench compile", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="float32 on the CPU, bfloat16 on GPUs if not given")
    parser.add_argument("--mode", default="default", help="of torch.compile: default, reduce-overhead, …")
    parser.add_argument("--families", default=",".join(blocks.FAMILIES), help="which blocks, with commas")
    parser.add_argument("--lengths", help="how many tokens, with commas")
    parser.add_argument("--rounds", type=int, default=21, help="interleaved rounds (default 21)")
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    lengths = [int(n) for n in options.lengths.split(",")] if options.lengths else list(LENGTHS[options.device])
    families = options.families.split(",")
    unknown = [family for family in families if family not in blocks.FAMILIES]
    if unknown:
        parser.error(f"there is no block {unknown[0]!r}; there are {', '.join(blocks.FAMILIES)}")
    result = measure(families, lengths, options.device, dtype, options.mode, options.rounds)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        _print(result)
    return 0
