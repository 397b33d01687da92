"""The table: rows from what tuning reports, what they come to, and how it is printed. Nothing is measured here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from layerzero.printing import aligned

Row = dict[str, Any]


class Promise(NamedTuple):
    """How many times the default rows of some families are together."""

    families: tuple[str, ...]
    #: By mode; ``None`` for all modes.
    times: dict[str | None, float]
    #: What the shapes begin with.
    shapes: str = ""

    def holds_for(self, row: Row, mode: str | None) -> bool:
        """Whether a row is one of them."""
        return row["family"] in self.families and mode in (None, row["mode"]) and row["shape"].startswith(self.shapes)


PROMISES: dict[str, Promise] = {
    "dense attention": Promise(("prefill", "vit", "cross", "decode"), {"eager": 1.05, "graph": 1.08}),
    "sliding window": Promise(("window",), {None: 8.0}),
    "softcap": Promise(("softcap",), {None: 10.0}),
    "paged decode": Promise(("paged",), {None: 3.0}),
    "top-p": Promise(("topp",), {None: 8.0}),
    # Of all rows it cannot be kept: torch moves five times the data of two tensors, and nobody moves less than three.
    "silu_mul": Promise(("silu_mul", "silu_mul_halves"), {None: 3.5}),
    # What it was set by: the halves of one projection, of a prompt.
    "silu_mul, halves of 4096 rows": Promise(("silu_mul_halves",), {None: 3.5}, "4096×"),
    "norms": Promise(("rms_norm", "add_rms_norm", "layer_norm"), {None: 1.25}),
}
ALL, LEAST = 2.0, 0.98
REGRET_TUNED, REGRET_HELD_OUT, REGRET_WORST = 1.02, 1.05, 1.25
OVERHEAD_US = 1.0


def geomean(values: Iterable[float]) -> float | None:
    """The geometric mean; of nothing there is none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def row_of(named: Mapping[str, Any], answer: Mapping[str, Any]) -> Row:
    """A row from what tuning one call gave: a report, or an error."""
    row: Row = {
        **named,
        "default": None,
        "default_us": None,
        "chosen": None,
        "chosen_us": None,
        "best": None,
        "best_us": None,
        "times_default": None,
        "noise": None,
        "candidates": {},
        "out": {},
        "error": answer.get("error"),
    }
    report = answer.get("tune")
    if report is None:
        row["error"] = row["error"] or "no report"
        return row
    if not report["tuned"]:
        reasons = [why for _, why in report["impossible"]]
        row["error"] = "; ".join(reasons) or row["error"] or "the budget did not suffice"
        return row
    (tuned,) = report["tuned"]
    stats = {t["candidate"]: t["stats"] for t in tuned["timings"] if t["stats"]}
    times = {name: s["median_us"] for name, s in stats.items()}
    out = {kernel: why for kernel, why in tuned["out"]}
    out |= {t["candidate"]: t["error"] for t in tuned["timings"] if t["error"]}
    row.update(
        op=tuned["op"],
        default=tuned["baseline"],
        default_us=times.get(tuned["baseline"]),
        chosen=tuned["chosen"],
        chosen_us=times.get(tuned["chosen"]),
        basis=tuned["basis"],
        times_default=tuned["times_baseline"],
        candidates=dict(sorted(times.items(), key=lambda item: item[1])),
        out=out,
    )
    if times:
        row["best"] = min(times, key=lambda name: times[name])
        row["best_us"] = times[row["best"]]
    compared = [stats[name] for name in {tuned["chosen"], tuned["baseline"]} if name in stats]
    row["noise"] = max((s["spread_us"] / s["median_us"] for s in compared), default=None)
    if row["chosen_us"] is None:
        row["error"] = row["error"] or "nothing that was timed is chosen"
    return row


def _counted(rows: Sequence[Row]) -> dict[str, Any]:
    times = [row["times_default"] for row in rows if row["times_default"]]
    least = min(times, default=None)
    return {
        "geomean_times_default": geomean(times),
        "least": least,
        "most": max(times, default=None),
        "rows": len(times),
        "without_default": sum(1 for row in rows if not row["error"] and not row["times_default"]),
        "failed": sum(1 for row in rows if row["error"]),
        "times_where_other": geomean(
            row["times_default"] for row in rows if row["times_default"] and row["chosen"] != row["default"]
        ),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """By family, by group that is promised something, and over all."""
    families = dict.fromkeys(row["family"] for row in rows)
    found: dict[str, Any] = {f: _counted([row for row in rows if row["family"] == f]) for f in families}
    found["all"] = _counted(rows)
    for mode in ("eager", "graph"):
        found[f"all {mode}"] = _counted([row for row in rows if row["mode"] == mode])
    return found


def in_sample(rows: Iterable[Row]) -> float | None:
    """Chosen over best by the very times the choice was made by."""
    return geomean(row["chosen_us"] / row["best_us"] for row in rows if row["chosen_us"] and row["best_us"])


def regret_of(answers: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """Chosen over best in hindsight, of calls and what :func:`layerzero.regret` gave for each."""
    rows, failed = [], []
    for named, answer in answers:
        found = (answer.get("regret") or {}).get("rows") or []
        if not found:
            impossible = [why for _, why in (answer.get("regret") or {}).get("impossible", [])]
            why = answer.get("error") or "; ".join(impossible) or "the choice was not timed"
            failed.append({**named, "error": why})
        for one in found:
            kept = ("chosen", "basis", "chosen_us", "best", "best_us", "over_best", "times_baseline", "noise")
            rows.append({**named, **{key: one[key] for key in kept}})
    times = [row["times_baseline"] for row in rows if row["times_baseline"]]
    return {
        "geomean": geomean(row["over_best"] for row in rows),
        "worst": max((row["over_best"] for row in rows), default=None),
        "times_default": geomean(times),
        "least_times_default": min(times, default=None),
        "rows": rows,
        "failed": failed,
    }


def targets(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was promised, next to what was found. ``met`` is ``None`` where nothing was measured."""
    rows: Sequence[Row] = result["rows"]
    found: list[dict[str, Any]] = []

    def promise(name: str, figure: float | None, target: float, at_most: bool = False) -> None:
        met = None if figure is None else (figure <= target if at_most else figure >= target)
        found.append({"name": name, "figure": figure, "target": target, "at_most": at_most, "met": met})

    everything = _counted(rows)
    promise("× baseline, all rows", everything["geomean_times_default"], ALL)
    for name, promised in PROMISES.items():
        for mode, target in promised.times.items():
            of = [row for row in rows if promised.holds_for(row, mode)]
            promise(f"{name}{f', {mode}' if mode else ''}", _counted(of)["geomean_times_default"], target)
    promise("least × baseline", everything["least"], LEAST)
    regret = result.get("regret") or {}
    held_out = regret.get("held_out") or {}
    promise("÷ best, tuned calls", (regret.get("tuned") or {}).get("geomean"), REGRET_TUNED, at_most=True)
    promise("÷ best, held-out calls", held_out.get("geomean"), REGRET_HELD_OUT, at_most=True)
    promise("÷ best, held-out, worst", held_out.get("worst"), REGRET_WORST, at_most=True)
    for name, row in (result.get("overhead") or {}).items():
        if isinstance(row, dict):
            promise(f"overhead of {name}, µs", row.get("overhead_us"), OVERHEAD_US, at_most=True)
    return found


def _number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _aligned(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Columns; so many of the first are aligned left."""
    return aligned(lines[0], lines[1:], lines[0][left:])


def family_table(family: str, rows: Sequence[Row]) -> str:
    """Every row of a family."""
    head = ("shape", "dtype", "mode", "default µs", "chosen µs", "×", "noise", "")
    lines = [head]
    for row in rows:
        times = (_us(row["default_us"]), _us(row["chosen_us"]), _number(row["times_default"]))
        noise = _number(row["noise"], ".0%")
        said = row["error"] if row["error"] else row["chosen"]
        lines.append((row["shape"], row["dtype"], row["mode"], *times, noise, f"  {said}"))
    table = _aligned([line[:-1] for line in lines], 3)
    text = [f"{family}", *(f"  {cells}{line[-1]}" for cells, line in zip(table, lines, strict=True))]
    for kernel, (why, count) in _reasons(rows).items():
        text.append(f"  out: {kernel} ({count}): {why[:150]}")
    return "\n".join(text)


def _reasons(rows: Iterable[Row]) -> dict[str, tuple[str, int]]:
    """Kernels that were out, each with its first reason and how often."""
    found: dict[str, tuple[str, int]] = {}
    for row in rows:
        for kernel, why in row["out"].items():
            first, count = found.get(kernel, (why, 0))
            found[kernel] = (first, count + 1)
    return found


def short(result: Mapping[str, Any], most: int = 58) -> str:
    """What it comes to, in few lines."""
    environment = result.get("environment") or {}
    backends = ", ".join(f"{name} {version}" for name, version in (environment.get("backends") or {}).items())
    lines = [f"{environment.get('gpu')} · driver {environment.get('driver')} · {environment.get('date')}", backends]
    by_family = summary(result["rows"])
    table = [("family", "rows", "× baseline", "least", "most", "failed")]
    for name, counted in by_family.items():
        numbers = (_number(counted[key]) for key in ("geomean_times_default", "least", "most"))
        table.append((name, str(counted["rows"]), *numbers, str(counted["failed"] or "")))
    lines += _aligned(table, 1)
    promises = [("", "found", "target")]
    for one in targets(result):
        mark = {None: "not measured", True: "", False: "MISSED"}[one["met"]]
        promises.append(
            (one["name"], _number(one["figure"], ".3f"), f"{'≤' if one['at_most'] else '≥'} {one['target']:g} {mark}")
        )
    lines += _aligned(promises, 1)
    regret = result.get("regret") or {}
    worst = sorted((regret.get("held_out") or {}).get("rows") or [], key=lambda row: -row["over_best"])[:3]
    lines += [
        f"held out: {row['family']} {row['shape']} {row['mode']}: {row['chosen']} ÷ {row['best']} = {row['over_best']:.2f}"
        for row in worst
    ]
    slow = sorted((r for r in result["rows"] if r["times_default"]), key=lambda r: r["times_default"])[:2]
    lines += [f"least: {r['family']} {r['shape']} {r['mode']} {r['times_default']:.2f} {r['chosen']}" for r in slow]
    failed = [row for row in result["rows"] if row["error"]]
    room = max(most - len(lines), 0)
    lines += [f"failed: {r['family']} {r['shape']} {r['mode']}: {r['error']}"[:160] for r in failed[:room]]
    return "\n".join(line[:200] for line in lines[:most])
