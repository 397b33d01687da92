"""``layerzero bench out-of-box``: what a user gets with an empty database and no tuning, against the torch code one writes.

Calls of published models are timed at their first call and some seconds later, when kernels may have been compiled in the
background: interleaved rounds in one process, which starts with empty caches and no settings. On CUDA both are captured in
graphs as well. A row says how many times as fast as torch the call is, and which kernel served it on which basis.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import layerzero as lz
from layerzero.bench import empty
from layerzero.bench.capturing import captured
from layerzero.bench.geometries import models
from layerzero.bench.model_rows import rows as rows_of
from layerzero.bench.rounds import interleaved
from layerzero.bench.row import CPU, GPU, Pair, Row, Sizes
from layerzero.printing import print_table

Call = Callable[[], Any]

#: A row below this many times torch's speed is slower than torch by more than noise.
LEAST = 0.97
#: Rounds of a row: the most, and the least where a call is slow.
ROUNDS, FEWEST = 21, 5
#: Calls of a round at most: few enough that the queue of a GPU takes all of them.
MOST_CALLS = 200
#: Seconds that the rounds of a row take, about.
SECONDS = 0.2
#: A call that takes so many seconds is slow enough to be timed alone.
SLOW_S = 0.05


#: Why a run ended early, where somebody pressed Ctrl-C.
INTERRUPTED = "interrupted: the rest was not measured"


class _Explaining:
    """Stands in for LayerZero's module in a row: its functions explain the call instead of making it."""

    def __getattr__(self, function: str) -> Callable[..., Any]:
        return partial(lz.explain, function)


def _of(ours: Any, module: Any) -> Call:
    """A row's function with its argument as the default: a call of it costs what a call of torch's function costs, and nothing
    of a wrapper's is timed."""
    return FunctionType(ours.__code__, ours.__globals__, ours.__name__, (module,), ours.__closure__)


def _timed(pair: dict[str, Call], wait: Call, seconds: float) -> dict[str, float]:
    """Both calls in interleaved rounds: microseconds, and how many times as fast as torch, of each round by itself.

    A round makes so many calls that all rounds take ``seconds``, and then waits for the device.
    """
    once = sum(_least_seconds(call, wait) for call in pair.values())
    calls = max(1, min(int(seconds / ROUNDS / once), MOST_CALLS))
    rounds = max(FEWEST, min(int(seconds / once / calls), ROUNDS))

    def repeated(call: Call) -> Call:
        def run() -> None:
            for _ in range(calls):
                call()
            wait()

        return run

    times = interleaved({name: repeated(call) for name, call in pair.items()}, rounds=rounds, count=1)
    ratios = [theirs / ours for ours, theirs in zip(times["lz"], times["torch"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "lz_us": statistics.median(times["lz"]) / calls,
        "torch_us": statistics.median(times["torch"]) / calls,
        "times_torch": middle,
        "low": low,
        "high": high,
        "rounds": rounds,
        "calls": calls,
    }


def _least_seconds(call: Call, wait: Call) -> float:
    """What a call takes at its best; one that is slow is not made again."""
    least = math.inf
    for _ in range(5):
        least = min(least, _seconds(call, wait))
        if least > SLOW_S:
            break
    return least


def _seconds(call: Call, wait: Call) -> float:
    """What one call takes, the device included."""
    wait()
    begun = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begun


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _in_graphs(pair: dict[str, Call], explained: Call, wait: Call, seconds: float) -> dict[str, Any]:
    """Both in a graph each: the times of their replays; or of whom the capture was refused, and why."""
    import torch

    graphs, refused = {}, {}
    for side, call in pair.items():
        try:
            graphs[side], _ = captured(call)
        except Exception as error:  # noqa: BLE001 - whatever a capture is refused with is the figure
            refused[side] = _reason(error)
        wait()
    if refused:
        return {"refused": refused}
    # A choice inside a capture may be another one; a graph of its own, since asking must not change the one that is timed.
    kernel = None
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            kernel = explained().chosen
    except Exception as error:  # noqa: BLE001 - the times are right all the same
        kernel = _reason(error)
    wait()
    return {"kernel": kernel, **_timed({side: graph.replay for side, graph in graphs.items()}, wait, seconds)}


def _waiting(device: str) -> Call:
    """Waits for the device."""
    import torch

    return (lambda: None) if device == "cpu" else torch.accelerator.synchronize


def _measured(row: Row, pair: Pair, device: str, seconds: float, first: bool) -> dict[str, Any]:
    """A row at one moment."""
    wait, explained = _waiting(device), partial(pair.ours, _Explaining())
    calls: dict[str, Call] = {"lz": _of(pair.ours, lz), "torch": pair.torch}
    told: dict[str, Any] = {}
    if first:
        # torch goes first: what CUDA and its libraries take to start is none of LayerZero's time.
        told = {
            "torch_first_ms": _seconds(calls["torch"], wait) * 1e3,
            "lz_first_ms": _seconds(calls["lz"], wait) * 1e3,
        }
    before = explained()
    told |= _timed(calls, wait, seconds)
    after = explained()
    told["kernels"] = list(dict.fromkeys(filter(None, (before.chosen, after.chosen))))
    told |= {"basis": after.basis, "why": after.why, "baseline": after.baseline}
    if device == "cuda":
        told["compiling"] = lz.health().jit["queued"] + lz.health().jit["running"]
        told["graph"] = _in_graphs(calls, explained, wait, seconds)
    return told


def scheduled(
    rows: Sequence[Row], moments: Sequence[float], now: Callable[[], float], sleep: Callable[[float], Any]
) -> Iterator[tuple[Row, float, float]]:
    """Which row is measured next, for which moment, and how many seconds after its own first call.

    Each row has a clock of its own, which starts with its first call: whatever is due goes first, then the next row that
    was never called.
    """
    begun: dict[str, float] = {}
    unseen, due = deque(rows), list[tuple[float, int, Row, float]]()
    order = {row.name: place for place, row in enumerate(rows)}
    while unseen or due:
        if due and (due[0][0] <= now() or not unseen):
            at, _, row, moment = heapq.heappop(due)
            sleep(max(at - now(), 0.0))
        else:
            row, moment = unseen.popleft(), 0.0
            begun[row.name] = now()
            for later in moments:
                if later > 0:
                    heapq.heappush(due, (begun[row.name] + later, order[row.name], row, later))
        yield row, moment, now() - begun[row.name]


def _child(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the process with empty caches measures, piece by piece."""
    import torch

    device, moments, seconds = request["device"], request["moments"], request["seconds"]
    dtype = getattr(torch, request["dtype"])
    sizes = sizes_of(device)
    kept = next(setting.value for setting in lz.settings() if setting.key == "perfdb.path")
    if Path(kept).exists():
        raise RuntimeError(f"there are measurements in {kept}: this is not what a user gets at first")
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    yield {"torch": torch.__version__, "gpu": gpu, "threads": torch.get_num_threads()}
    wanted = [row for row in rows_of(sizes, request["models"]) if row.elements <= sizes.largest]
    with torch.no_grad():
        for row, moment, after_s in scheduled(wanted, moments, time.monotonic, time.sleep):
            try:
                pair = row.made(device, dtype)
                if moment in moments:
                    told = _measured(row, pair, device, seconds, moment == 0.0)
                    yield {"row": row.name, "moment": moment, "after_s": after_s, **told}
                else:
                    pair.ours(lz)
            except Exception as error:  # noqa: BLE001 - the other rows are measured all the same
                yield {"row": row.name, "moment": moment, "after_s": after_s, "error": _reason(error)}
            # The weights of a row, and the memory of its graphs, are given back before those of the next are made.
            pair = None  # type: ignore[assignment]
            if device == "cuda":
                torch.cuda.empty_cache()
    yield {"jit": lz.health().jit}


def sizes_of(device: str) -> Sizes:
    """How much is computed at once on a device."""
    return CPU if device == "cpu" else GPU


def _told_by(request: dict[str, Any], progress: bool) -> tuple[list[dict[str, Any]], str | None]:
    """Runs a process with empty caches: what it told, and why it ended early, if it did."""
    told = []
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "layerzero", "bench", "out-of-box", "--request", json.dumps(request)]
        process = subprocess.Popen(
            command,
            env=empty.environment(Path(place)),
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with process:
            try:
                for line in process.stdout or ():
                    if line.startswith("{"):
                        told.append(json.loads(line))
                        if progress and "row" in told[-1]:
                            _say(told[-1])
            except KeyboardInterrupt:
                process.kill()
                return told, INTERRUPTED
        errors.seek(0)
        said = errors.read().strip()[-2000:]
    return told, None if process.returncode == 0 else f"status {process.returncode}: {said}"


def _say(row: dict[str, Any]) -> None:
    times = row.get("times_torch")
    words = row.get("error") if times is None else f"{times:.2f} × torch"
    print(f"{row['row']}, {row['moment']:g} s: {words}", file=sys.stderr, flush=True)


def measure(
    device: str = "cpu",
    names: Sequence[str] | None = None,
    moments: Sequence[float] | None = None,
    *,
    dtype: str | None = None,
    seconds: float = SECONDS,
    apart: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Everything, as data. Times are microseconds per call.

    Args:
        device: ``cpu`` or ``cuda``.
        names: the models, all when not given.
        moments: seconds after the first call of a row, 0 for that call.
        dtype: float32 on the CPU and bfloat16 elsewhere when not given.
        seconds: what the rounds of a row take.
        apart: a process for each model, as in a program that runs one; otherwise one for all.
        progress: print each row to standard error when it is measured.
    """
    names = list(names or models())
    moments = sorted(set(moments if moments is not None else moments_of(device)))
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    sizes = sizes_of(device)
    every = rows_of(sizes, names)
    rows: dict[str, dict[str, Any]] = {
        row.name: {"name": row.name, "model": row.model, "kind": row.kind, "phase": row.phase, "moments": {}}
        for row in every
        if row.elements <= sizes.largest
    }
    result: dict[str, Any] = {
        "schema_version": "1.0",
        "versions": {"layerzero": lz.__version__, "python": platform.python_version()},
        "device": device,
        "gpu": None,
        "threads": None,
        "dtype": dtype,
        "moments_s": moments,
        "models": names,
        "least": LEAST,
        "left_out": [row.name for row in every if row.name not in rows],
        "problems": [],
    }
    for group in [[name] for name in names] if apart else [names]:
        request = {"device": device, "models": group, "moments": moments, "dtype": dtype, "seconds": seconds}
        told, ended = _told_by(request, progress)
        for one in told:
            if "row" in one:
                rows[one.pop("row")]["moments"][f"{one.pop('moment'):g}"] = one
            elif "torch" in one:
                result["versions"]["torch"] = one.pop("torch")
                result |= one
            else:
                result.setdefault("jit", []).append(one["jit"])
        if ended == INTERRUPTED:
            # What was measured so far is a result.
            result["problems"].append(INTERRUPTED)
            break
        if ended is not None:
            result["problems"].append(f"the process for {', '.join(group)} ended early: {ended}")
    result["rows"] = list(rows.values())
    result["summary"] = {f"{moment:g}": summary(result["rows"], f"{moment:g}") for moment in moments}
    result["problems"] += [
        f"{row['name']} at {moment} s: {one['error']}"
        for row in result["rows"]
        for moment, one in row["moments"].items()
        if "error" in one
    ]
    return result


def moments_of(device: str) -> tuple[float, ...]:
    """When rows are measured where nobody says: nothing is compiled in the background for a CPU."""
    return (0.0,) if device == "cpu" else (0.0, 10.0, 60.0)


def _figures(times: dict[str, float]) -> dict[str, Any]:
    """Of the speed over torch by row: the geometric mean, the least, and the rows that are slower."""
    if not times:
        return {"rows": 0, "geomean": None, "least": None, "least_row": None, "below": []}
    least = min(times, key=lambda name: times[name])
    return {
        "rows": len(times),
        "geomean": math.exp(statistics.fmean(map(math.log, times.values()))),
        "least": times[least],
        "least_row": least,
        "below": sorted((name for name in times if times[name] < LEAST), key=lambda name: times[name]),
    }


def summary(rows: Sequence[dict[str, Any]], moment: str) -> dict[str, Any]:
    """The figures of all rows at one moment; ``graphs`` is absent where nothing was captured or refused."""
    seen = {row["name"]: row["moments"][moment] for row in rows if moment in row["moments"]}
    timed = {name: one for name, one in seen.items() if "error" not in one}
    found = _figures({name: one["times_torch"] for name, one in timed.items()})
    found["below_beyond_noise"] = [name for name in found["below"] if timed[name]["high"] < LEAST]
    found["errors"] = len(seen) - len(timed)
    kinds: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["name"] in timed:
            kinds.setdefault(row["kind"], {})[row["name"]] = timed[row["name"]]["times_torch"]
    found["kinds"] = {
        kind: {key: figures for key, figures in _figures(times).items() if key in ("rows", "geomean", "least")}
        for kind, times in kinds.items()
    }
    graphs = {name: one["graph"] for name, one in timed.items() if "graph" in one}
    if graphs:
        replayed = {name: one["times_torch"] for name, one in graphs.items() if "refused" not in one}
        found["graphs"] = {**_figures(replayed), "captured": len(replayed), **_refusals(graphs)}
    return found


def _refusals(graphs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How many captures of each side were refused, and the rows by reason."""
    reasons: dict[str, dict[str, list[str]]] = {"lz": {}, "torch": {}}
    for name, one in graphs.items():
        for side, why in one.get("refused", {}).items():
            reasons[side].setdefault(why, []).append(name)
    return {
        "refused": {side: sum(map(len, by_reason.values())) for side, by_reason in reasons.items()},
        "reasons": reasons,
    }


def _cell(one: dict[str, Any] | None) -> str:
    if one is None or "error" in one:
        return "–" if one is None else "error"
    return f"{one['times_torch']:.2f}"


def show(result: dict[str, Any]) -> None:
    """The table and the figures of all rows."""
    where, moments = result["gpu"] or result["device"], [f"{moment:g}" for moment in result["moments_s"]]
    print(f"out of the box on {where}, {result['dtype']}, torch {result['versions'].get('torch')}:", end=" ")
    print("how many times as fast as the torch code, by seconds after the first call (g: in a CUDA graph)")
    graphs = any("graph" in one for row in result["rows"] for one in row["moments"].values())
    titles = [title for moment in moments for title in (f"{moment} s", *([f"g {moment}"] if graphs else []))]
    table = []
    for row in result["rows"]:
        cells = []
        for moment in moments:
            one = row["moments"].get(moment)
            graph = (one or {}).get("graph")
            cells += [_cell(one), *([_graph_cell(graph)] if graphs else [])]
        served = [one for one in row["moments"].values() if "error" not in one]
        kernels = dict.fromkeys(f"{kernel} ({one['basis']})" for one in served for kernel in one["kernels"])
        table.append((row["name"], *cells, " → ".join(kernels)))
    print_table(("", *titles, "kernel (basis)"), table, titles)
    for moment in moments:
        _show_summary(moment, result["summary"][moment], {row["name"]: row["moments"] for row in result["rows"]})
    if result["left_out"]:
        print(f"left out, for weights too large here: {len(result['left_out'])} rows")
    for problem in result["problems"]:
        print(f"problem: {problem}")


def _graph_cell(graph: dict[str, Any] | None) -> str:
    if graph is None:
        return "–"
    return "refused" if "refused" in graph else f"{graph['times_torch']:.2f}"


def _show_summary(moment: str, found: dict[str, Any], rows: dict[str, Any]) -> None:
    if not found["rows"]:
        print(f"{moment} s: nothing was measured")
        return
    when = "at the first call" if moment == "0" else f"{moment} s after it"
    print(f"{when}: {found['rows']} rows, geometric mean {found['geomean']:.2f} × torch,", end=" ")
    print(f"least {found['least']:.2f} ({found['least_row']}),", end=" ")
    print(f"{len(found['below'])} below {LEAST}, {len(found['below_beyond_noise'])} of them beyond noise")
    for name in found["below"]:
        print(f"  {rows[name][moment]['times_torch']:.2f} {name}")
    graphs = found.get("graphs")
    if graphs is None:
        return
    print(f"  in CUDA graphs: {graphs['captured']} captured, {graphs['refused']['lz']} refused", end="")
    print(f" ({graphs['refused']['torch']} of torch's)", end="")
    if graphs["rows"]:
        print(f", geometric mean {graphs['geomean']:.2f}, least {graphs['least']:.2f} ({graphs['least_row']})", end="")
    print(f", {len(graphs['below'])} below {LEAST}")
    for side, reasons in graphs["reasons"].items():
        for why, names in reasons.items():
            print(f"    {side} refused {len(names)} times, first of {names[0]}: {why}")


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="layerzero bench out-of-box", description=__doc__)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="print JSON, or write it to a file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the calls are made (cpu)")
    parser.add_argument("--models", help="some of them, separated by commas; all when not given")
    parser.add_argument("--moments", help="seconds after the first call of a row, as 0,10,60 (on the CPU 0)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="float32 on the CPU, else bfloat16")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"what the rounds of a row take ({SECONDS})")
    parser.add_argument("--apart", action="store_true", help="a process for each model")
    parser.add_argument("--request", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.request:
        for one in _child(json.loads(options.request)):
            print(json.dumps(one), flush=True)
        return 0
    names = options.models.split(",") if options.models else None
    if unknown := set(names or ()) - set(models()):
        parser.error(f"no model is called {', '.join(sorted(unknown))}; there are {', '.join(models())}")
    try:
        moments = [float(moment) for moment in options.moments.split(",")] if options.moments else None
    except ValueError:
        parser.error(f"moments are seconds, separated by commas, not '{options.moments}'")
    if options.seconds <= 0 or any(not 0 <= moment < math.inf for moment in moments or ()):
        parser.error("seconds is above 0, and no moment is below it")
    result = measure(
        options.device,
        names,
        moments,
        dtype=options.dtype,
        seconds=options.seconds,
        apart=options.apart,
        progress=sys.stderr.isatty(),
    )
    if options.json == "-":
        print(json.dumps(result, indent=2))
    else:
        if options.json:
            Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        show(result)
    return 1 if result["problems"] else 0
