"""``layerzero bench graph-ablation``: what each optimisation of compiled models is worth.

A model is compiled with all passes, without each of them, and without any. These graphs are timed in turns in one process, so that
other load on the machine slows all of them down. "÷ all" is the median over the rounds of a graph's time ÷ the time with all passes:
above 1, the pass is worth having. "steps" and "arena kB" are the number of steps and the memory between inputs and results.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from layerzero.bench.rounds import interleaved
from layerzero.printing import Progress, print_table

_DEFAULT = ("block 1×16×64", "block 4×64×128", "gpt2 S=16")


def measure(names: Sequence[str], threads: int, rounds: int) -> dict[str, Any]:
    """Times the models of these names with all passes, without each, and without any."""
    import torch

    import layerzero as lz
    from layerzero import _native
    from layerzero.bench import graph_models

    torch.set_num_threads(threads)
    passes = _native.Session.passes()
    cases = {case.name: case for case in graph_models.CASES}
    rows: list[dict[str, Any]] = []
    with Progress(None, "models compiled") as progress, torch.no_grad():
        for done, name in enumerate(names):
            progress.show(done, len(names))
            model, inputs = graph_models.made(cases[name])
            made = {"all": lz.compile(model, *inputs)}
            whole = made["all"].graph()
            for one in passes:
                without = lz.compile(model, *inputs, off=[one])
                # The pass changes nothing in this model: there is nothing to time.
                if without.graph() != whole:
                    made[one] = without
            made["none"] = lz.compile(model, *inputs, off=passes)
            expected = model(*inputs)
            calls = {variant: partial(compiled, *inputs) for variant, compiled in made.items()}
            times = interleaved(calls, rounds=rounds, count=1)
            for variant, compiled in made.items():
                report = compiled.report()
                ratios = [a / b for a, b in zip(times[variant], times["all"], strict=True)]
                rows.append(
                    {
                        "model": name,
                        "without": variant,
                        "us": statistics.median(times[variant]),
                        "of_all": statistics.median(ratios),
                        "steps": report.steps,
                        "arena_bytes": report.arena_bytes,
                        "largest_difference": (compiled(*inputs) - expected).abs().max().item(),
                    }
                )
    return {"bench": "graph-ablation", "threads": threads, "rounds": rounds, "rows": rows}


def main(arguments: list[str]) -> int:
    """Runs the benchmark with arguments of the command line."""
    from layerzero.bench.graph_models import CASES

    parser = argparse.ArgumentParser(prog="layerzero bench graph-ablation", description=__doc__)
    parser.add_argument(
        "--cases", help=f"names of models, separated by commas; {', '.join(_DEFAULT)} if there are none"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON, to a file or to stdout")
    options = parser.parse_args(arguments)
    known = {case.name: case for case in CASES}
    names = list(_DEFAULT) if options.cases is None else [name.strip() for name in options.cases.split(",")]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no model {unknown[0]!r}; there are: {', '.join(known)}")
    absent = [n for n in names if known[n].requires and importlib.util.find_spec(known[n].requires) is None]
    result = measure([name for name in names if name not in absent], options.threads, options.rounds)
    if options.json == "-":
        print(json.dumps(result, indent=1))
        return 0
    if options.json is not None:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    columns = ("model", "without", "µs", "÷ all", "steps", "arena kB", "difference")
    print_table(
        columns,
        [
            [
                *(row["model"], row["without"], f"{row['us']:.0f}", f"{row['of_all']:.2f}", str(row["steps"])),
                *(f"{row['arena_bytes'] / 1e3:.0f}", f"{row['largest_difference']:.1e}"),
            ]
            for row in result["rows"]
        ],
    )
    for name in absent:
        print(f"  without {name}: {known[name].requires} is not installed")
    return 0
