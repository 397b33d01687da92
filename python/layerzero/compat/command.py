"""``layerzero compat``: tries every backend, alone and beside the others, and keeps what it finds."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from layerzero import backend_files
from layerzero.compat import builds, matrix
from layerzero.compat.processes import Outcome, probe
from layerzero.printing import aligned, show_status

#: How many kernels of a backend are tried again beside another.
QUICK = 4
#: How many backends are tried at a time, where there are cores for it.
MOST_PROCESSES = 4
#: What counts against a kernel.
BAD = ("wrong", "failed")
#: The exit code of a command somebody stopped, as of the others.
STOPPED = 130

Tell = Callable[[str], None]


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Gives 1 where something is incompatible or wrong, 2 for wrong usage, 130 when it is stopped."""
    try:
        options = _options(arguments)
    except SystemExit as exit:
        return int(exit.code or 0)
    try:
        found = examine(options.backends, options.timeout, show_status)
    except KeyboardInterrupt:
        show_status("")
        print("stopped; nothing was written", file=sys.stderr)
        return STOPPED
    file = options.output or matrix.path()
    old = matrix.empty() if options.output else matrix.read(file)
    matrix.write(file, matrix.merged(old, found))
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join([*table(found), f"written to {file}"]))
    return 1 if has_problems(found) else 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    from layerzero.backends import BACKENDS, UNPROVEN

    def names(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        for name in chosen:
            if not (backend_files.folder(name) / "capabilities.json").is_file():
                raise argparse.ArgumentTypeError(f"there is no backend '{name}'; there are {', '.join(known)}")
        return [name for name in known if name in chosen]

    def seconds(text: str) -> float:
        value = float(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"a time above zero is needed, not {text}")
        return value

    known = [*BACKENDS, *UNPROVEN]
    parser = argparse.ArgumentParser(
        prog="layerzero compat",
        description="Tries every backend in a process of its own, compares its kernels with the reference, loads all of "
        "them together in both orders, and keeps the results. A backend that is incompatible is not imported from then "
        "on, until one of the versions changes.",
        epilog="Exit codes: 0 all is well; 1 something is incompatible or wrong; 2 wrong usage; 130 stopped.",
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"write it there instead of {matrix.path()}")
    parser.add_argument("--backends", type=names, metavar="A,B", help="only these")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=120.0,
        metavar="SECONDS",
        help="what an import or a kernel may take; five times that for kernels that are compiled first (default: 120)",
    )
    parser.add_argument("--unproven", action="store_true", help="also backends that are not loaded yet")
    options = parser.parse_args(arguments)
    if options.backends is None:
        options.backends = known if options.unproven else list(BACKENDS)
    return options


def examine(backends: Sequence[str], timeout: float, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Tries backends alone, then those that work together, and gives the matrix of it."""
    entries = {}
    # Most of the time a process imports torch and its library: several do so side by side.
    pool = ThreadPoolExecutor(max_workers=max(min((os.cpu_count() or 1) // 4, MOST_PROCESSES), 1))
    stop = threading.Event()
    try:
        tried = {backend: pool.submit(alone, backend, timeout, stop) for backend in backends}
        for backend, entry in tried.items():
            tell(f"trying {backend}")
            entries[backend] = entry.result()
    finally:
        # Whoever interrupts it waits neither for those that are tried nor for those that were not begun.
        stop.set()
        pool.shutdown(cancel_futures=True)
    pairs = together([name for name, entry in entries.items() if entry["status"] == "ok"], entries, timeout, tell)
    tell("")
    return matrix.empty() | {"entries": list(entries.values()), "pairs": pairs}


def alone(backend: str, timeout: float, stop: threading.Event | None = None) -> dict[str, Any]:
    """What becomes of one backend in a process of its own, which ends when `stop` is set."""
    versions, library = matrix.versions(backend), backend_files.library(backend)
    build = None if library == "torch" else builds.mismatch(library)
    if builds.folder(library) is None:
        missing = {"message": f"{library} is not installed"}
        outcome = Outcome(imported={backend: {"unavailable": missing}})
    else:
        outcome = probe([backend], None, timeout, stop)
    imported = outcome.imported.get(backend, {})
    status, reason = _judgement(outcome, imported)
    if build is not None and status != "ok" and build not in str(reason):
        reason = f"{reason}; {build}"
    kernels = outcome.kernels
    if outcome.kernel is not None:
        kernels[outcome.kernel] = {"status": "failed", "why": outcome.died}
    for operation in backend_files.document(backend)["ops"].values():
        for kernel in operation:
            kernels.setdefault(kernel["kernel_id"], {"status": "not tried", "why": reason})
    return {
        "backend": backend,
        "versions": versions,
        "status": status,
        "reason": reason,
        "built_for_another": build,
        "found": {name: imported.get(name) for name in ("version", "torch", "cuda", "library_cuda", "devices")},
        "kernels": kernels,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _judgement(outcome: Outcome, imported: dict[str, Any]) -> tuple[str, str | None]:
    if outcome.died is not None:
        return "incompatible", outcome.died
    if (unavailable := imported.get("unavailable")) is not None:
        return "unavailable", unavailable["message"]
    tried = {name: kernel for name, kernel in outcome.kernels.items() if kernel["status"] != "not tried"}
    bad = {name: kernel for name, kernel in tried.items() if kernel["status"] in BAD}
    if not bad:
        return "ok", None
    if len(bad) == len(tried):
        name, kernel = next(iter(bad.items()))
        return "incompatible", f"none of its kernels is right: {name}: {kernel['why']}"
    return "ok", f"not right: {', '.join(bad)}"


def together(
    usable: Sequence[str], entries: dict[str, dict[str, Any]], timeout: float, tell: Tell
) -> list[dict[str, Any]]:
    """Every pair of backends in one process, in both orders. All of them at once first: where that goes well, it goes well
    for each pair. The second of a pair that fails in the order of loading is incompatible beside the first."""
    quick = {name: _quick(entries[name]) for name in usable}
    pairs: list[dict[str, Any]] = []
    for order in (list(usable), list(reversed(usable))):
        of_order = list(itertools.combinations(order, 2))
        if not of_order:
            continue
        tell(f"trying all together, {order[0]} first")
        why = _conflict(order, quick, timeout)
        if why is None or len(order) == 2:
            pairs += [_pair(both, why) for both in of_order]
            continue
        tried = []
        for first, second in of_order:
            tell(f"trying {first} before {second}")
            tried.append(_pair((first, second), _conflict((first, second), quick, timeout)))
        if all(pair["status"] == "ok" for pair in tried):
            tried.append(_pair(order, why))
        pairs += tried
    for pair in pairs:
        _blame(pair, list(usable), entries)
    return pairs


def _quick(entry: dict[str, Any]) -> dict[str, Any]:
    """A few kernels that are right, of several operations, and the calls they are right for."""
    by_operation: dict[str, tuple[str, Any]] = {}
    for name, kernel in entry["kernels"].items():
        if kernel["status"] == "right":
            by_operation.setdefault(kernel["call"]["call"]["op"], (name, kernel["call"]))
    return dict(list(by_operation.values())[:QUICK])


def _conflict(order: Sequence[str], quick: dict[str, dict[str, Any]], timeout: float) -> str | None:
    outcome = probe(order, {name: quick[name] for name in order}, timeout)
    if outcome.died is not None:
        return outcome.died
    for name, imported in outcome.imported.items():
        if (unavailable := imported["unavailable"]) is not None:
            return f"{name} is unavailable: {unavailable['message']}"
    for name, kernel in outcome.kernels.items():
        if kernel["status"] in BAD:
            return f"{name}: {kernel['why']}"
    return None


def _pair(backends: Sequence[str], why: str | None) -> dict[str, Any]:
    return {"backends": list(backends), "status": "conflict" if why else "ok", "reason": why}


def _blame(pair: dict[str, Any], usable: list[str], entries: dict[str, dict[str, Any]]) -> None:
    backends = pair["backends"]
    if pair["status"] == "ok" or len(backends) > 2 or usable.index(backends[0]) > usable.index(backends[1]):
        return
    first, second = backends
    entry = entries[second]
    if entry["status"] == "ok":
        entry["status"], entry["reason"] = "incompatible", f"beside {first}: {pair['reason']}"
        entry["beside"] = {"backend": first, "versions": matrix.versions(first)}


def has_problems(found: dict[str, Any]) -> bool:
    """Whether something is incompatible or wrong."""
    entries = found["entries"]
    bad = any(kernel["status"] in BAD for entry in entries for kernel in entry["kernels"].values())
    conflicts = any(pair["status"] != "ok" for pair in found["pairs"])
    return bad or conflicts or any(entry["status"] == "incompatible" for entry in entries)


def table(found: dict[str, Any]) -> list[str]:
    """What was found, for people."""
    rows = []
    for entry in found["entries"]:
        states = [kernel["status"] for kernel in entry["kernels"].values()]
        counts = (states.count("right"), sum(state in BAD for state in states), states.count("not tried"))
        version = entry["found"]["version"] or entry["versions"]["library"] or "–"
        rows.append((entry["backend"], version, entry["status"], *map(str, counts), entry["reason"] or ""))
    counted = ("right", "wrong", "not tried")
    lines = aligned(("backend", "version", "status", *counted, "why"), rows, counted)
    for entry in found["entries"]:
        bad = ((name, kernel) for name, kernel in entry["kernels"].items() if kernel["status"] in BAD)
        # What a probe ended with is said already.
        lines += [f"{k['status']}: {name}: {k['why']}" for name, k in bad if k["why"] not in str(entry["reason"])]
    pairs = [pair for pair in found["pairs"] if pair["status"] != "ok"]
    lines += [f"conflict: {', then '.join(pair['backends'])}: {pair['reason']}" for pair in pairs]
    if found["pairs"] and not pairs:
        lines.append("beside each other, in both orders: as alone")
    return lines
