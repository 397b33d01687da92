"""``layerzero bench tuning``: how good the choices are after a short tune, and whether a second tune makes the same.

Tunes the operations of GPT-2 and a small Llama in a database of its own, asks for the regret at sizes between those,
tunes again from nothing and compares the decisions. The sizes between are drawn anew for every run, so that nothing can
have been fitted to them. Nothing of the user's is read or written.

The calls that lose most are measured once more, with a control: the chosen kernel is timed against itself in the same
rounds. A loss that comes again, beyond what the control shows, is the choice's. Any other is the machine's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import secrets
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import layerzero as lz
from layerzero import _native
from layerzero.printing import print_table
from layerzero.tuning.bench import Bench

#: Whose operations, and in which dtype.
MODELS = {"gpt2": "float32", "llama-3.2-1b": "bfloat16"}
Sizes = tuple[list[int], list[int], list[int]]
#: Batches, prompts and contexts that are tuned. Kernels work in blocks: what is fast at 256 rows says little about 300, and
#: what is at 262 little about 250, so that there are sizes on both sides of powers of two.
TUNED: Sizes = ([1, 2, 4], [64, 131], [71, 509])
#: How many of each are drawn for the calls that are held out.
DRAWN = 2
#: Larger tensors than this would take the whole budget (elements).
LARGEST = 1 << 24
#: How many of the calls that lose most are measured once more, with a control, in how many rounds, for how long each time
#: (µs). A loss is the choice's if it is beyond what the control shows and 3%, the margin of selection.
CONTROLS, ROUNDS, SAMPLE_US, BEYOND = 6, 24, 2000.0, 1.03
#: What the issue of choosing is held to.
TARGETS = {"geomean": 1.05, "worst": 1.25, "least_times_baseline": 0.97, "agreement": 0.95, "agreement_on_ties": 1.0}


def held_out(seed: int) -> list[Sizes]:
    """Batches, prompts and contexts within the range of those that are tuned, even in log space."""
    numbers = random.Random(seed)

    def between(sizes: list[int]) -> list[int]:
        return [round(math.exp(numbers.uniform(math.log(min(sizes)), math.log(max(sizes)))))]

    return [(between(TUNED[0]), between(TUNED[1]), between(TUNED[2])) for _ in range(DRAWN)]


def calls(sizes: Sizes) -> list[dict[str, Any]]:
    """The calls of the models' forward passes at these sizes, sampling included."""
    small = []
    batch, seq, context = sizes
    for model, dtype in MODELS.items():
        for call in lz.workload(model=model, dtype=dtype, batch=batch, seq=seq, context=context):
            if all(math.prod(tensor["shape"]) <= LARGEST for tensor in call["tensors"].values()):
                small.append(call)
    return small


def _tied(tuned: lz.TuneRow) -> frozenset[str]:
    """The fastest candidate and those within the noise of it, as the ranking sees them."""
    stats = {timing.candidate: timing.stats for timing in tuned.timings if timing.stats}
    fastest = min(stats.values(), key=lambda s: s.median_us)
    return frozenset(
        name for name, s in stats.items() if s.median_us - fastest.median_us <= max(s.spread_us, fastest.spread_us)
    )


def _agreement(first: Iterable[lz.TuneRow], second: Iterable[lz.TuneRow]) -> dict[str, Any]:
    """How often two tunes decide alike: where both see one winner beyond the noise, where both see the same tie, and
    where the noise lets them see different ones."""
    other = {json.dumps(t.call, sort_keys=True): t for t in second}
    pairs = [(t, other[key]) for t in first if (key := json.dumps(t.call, sort_keys=True)) in other]
    kinds: dict[str, list[bool]] = {"gaps": [], "ties": [], "between": []}
    differ = []
    for a, b in pairs:
        tied, tied_again = _tied(a), _tied(b)
        same = a.chosen == b.chosen
        if len(tied) == 1 and len(tied_again) == 1:
            kind = "gaps"
        else:
            kind = "ties" if tied == tied_again else "between"
        kinds[kind].append(same)
        if not same:
            differ.append({"call": a.label, "first": a.chosen, "second": b.chosen, "kind": kind})
    return {
        **{kind: {"decisions": len(seen), "same": sum(seen)} for kind, seen in kinds.items()},
        "differ": differ,
    }


def controlled(rows: Sequence[dict[str, Any]], bench: Any = None, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """The rows that lose most against the best kernel or against plain torch, measured once more.

    `itself` is the time of the chosen kernel ÷ the time of the same kernel, timed as if it were another one: what the
    machine alone does to a ratio. `again` is chosen ÷ best, and `baseline_again` plain torch ÷ chosen, of the same rounds.
    """
    bench = Bench() if bench is None else bench
    by_best = sorted(rows, key=lambda row: -row["over_best"])[:CONTROLS]
    by_torch = sorted((row for row in rows if row["times_baseline"]), key=lambda row: row["times_baseline"])[:CONTROLS]
    lost = [row for row in by_best if row["over_best"] > 1.0]
    lost += [row for row in by_torch if row["times_baseline"] < 1.0 and row not in lost]
    found = []
    for row in lost:
        device = _native.device_number(row.get("device", "cpu"))
        bench.prepare(json.dumps(row["call"]), device, "eager")
        kernels = {"chosen": row["chosen"], "itself": row["chosen"], "best": row["best"], "baseline": row["baseline"]}
        count = max(1, round(SAMPLE_US / max(row["chosen_us"], 1.0)))
        times: dict[str, list[float]] = {name: [] for name, kernel in kernels.items() if kernel is not None}
        orders = random.Random(0)
        for _ in range(rounds):
            for name in orders.sample(list(times), len(times)):
                times[name].append(bench.time(kernels[name], count))
        middle = {name: statistics.median(taken) for name, taken in times.items()}
        itself = middle["chosen"] / middle["itself"]
        again = middle["chosen"] / middle["best"]
        against = middle["baseline"] / middle["chosen"] if "baseline" in middle else None
        noise = max(itself, 1 / itself) * BEYOND
        slower = again > noise or (against is not None and against < 1 / noise)
        found.append(
            {
                **{key: row[key] for key in ("label", "chosen", "best", "baseline", "over_best", "times_baseline")},
                "again": again,
                "baseline_again": against,
                "itself": itself,
                "cause": "the choice" if slower else "the machine",
            }
        )
    return found


def _tune(
    folder: Path, name: str, wanted: Sequence[dict[str, Any]], budget: str, progress: bool | None
) -> lz.TuneReport:
    lz.configure(perfdb={"path": str(folder / f"{name}.sqlite")})
    return lz.tune(calls=wanted, budget=budget, progress=progress)


def measure(
    seed: int, budget: str = "60s", regret_budget: str = "120s", progress: bool | None = None
) -> dict[str, Any]:
    """Tunes, measures regret at sizes between, tunes again; gives all figures."""
    wanted = calls(TUNED)
    known = {json.dumps(call, sort_keys=True) for call in wanted}
    sizes = held_out(seed)
    between = {json.dumps(call, sort_keys=True): call for drawn in sizes for call in calls(drawn)}
    unseen = [call for key, call in between.items() if key not in known]
    with tempfile.TemporaryDirectory() as folder:
        try:
            first = _tune(Path(folder), "first", wanted, budget, progress)
            regret = lz.regret(calls=unseen, budget=regret_budget, samples=24, progress=progress)
            found = regret.to_dict()
            tuned_again = {json.dumps(t.call, sort_keys=True) for t in first.tuned}
            rows = [row for row in found["rows"] if json.dumps(row["call"], sort_keys=True) not in tuned_again]
            control = controlled(rows)
            second = _tune(Path(folder), "second", wanted, budget, progress)
        finally:
            lz.configure(perfdb=None)
    return {
        "tuned": {"calls": len(first.tuned), "seconds": first.spent_s, "left": len(first.left)},
        "held_out": {
            "seed": seed,
            "sizes": sizes,
            "calls": len(rows),
            "operations": sorted({row["op"] for row in rows}),
        },
        **{name: found[name] for name in ("geomean", "worst", "times_baseline", "least_times_baseline")},
        "times_baseline_where_other": regret.times_baseline_where_other,
        "agreement": _agreement(first.tuned, second.tuned),
        "targets": TARGETS,
        "control": control,
        "rows": rows,
        "decisions": [
            {key: getattr(t, key) for key in ("label", "chosen", "runner_up", "baseline", "times_baseline")}
            for t in first.tuned
        ],
    }


def _print(result: dict[str, Any]) -> None:
    rows = sorted(result["rows"], key=lambda row: -row["over_best"])
    columns = ("held-out call", "÷best", "×baseline", "noise", "chosen")
    cells = [
        (row["label"], row["over_best"], row["times_baseline"] or "–", row["noise"], row["chosen"]) for row in rows
    ]
    print_table(columns, cells, columns[1:-1])
    tuned, agreement = result["tuned"], result["agreement"]
    print(f"\n{tuned['calls']} calls tuned in {tuned['seconds']:.1f} s, {tuned['left']} left; ", end="")
    print(f"held-out sizes of seed {result['held_out']['seed']}")
    print(f"chosen ÷ best in hindsight: geomean {result['geomean']:.3f} (target ≤ {TARGETS['geomean']}), ", end="")
    print(f"worst {result['worst']:.3f} (≤ {TARGETS['worst']})")
    print(f"× plain torch: geomean {result['times_baseline']:.2f}, least {result['least_times_baseline']:.2f} ", end="")
    print(f"(≥ {TARGETS['least_times_baseline']}), where another was chosen {result['times_baseline_where_other']:.2f}")
    if result["control"]:
        print("\nthe calls that lost most, measured once more; ÷itself: the chosen kernel against itself")
        again = ("held-out call", "÷best", "again", "×baseline", "again ", "÷itself", "cause")
        lost = [
            (
                row["label"],
                row["over_best"],
                row["again"],
                row["times_baseline"] or "–",
                row["baseline_again"] or "–",
                row["itself"],
                row["cause"],
            )
            for row in result["control"]
        ]
        print_table(again, lost, again[1:-1])
    said = {"gaps": "one winner in both", "ties": "the same tie in both", "between": "different ties"}
    same = [f"{agreement[kind]['same']} of {agreement[kind]['decisions']} with {text}" for kind, text in said.items()]
    print(f"a second tune decides alike: {', '.join(same)}")
    for one in agreement["differ"]:
        print(f"  differs: {one['call']}: {one['first']} / {one['second']}")


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="layerzero bench tuning", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--budget", default="60s", help="how long each tune may take (default 60s)")
    parser.add_argument("--regret-budget", default="120s", help="how long measuring regret may take (default 120s)")
    parser.add_argument("--seed", type=int, help="what the held-out sizes are drawn by (default: a new one)")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    result = measure(seed, options.budget, options.regret_budget, progress=None)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        _print(result)
    return 0
