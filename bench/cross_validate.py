"""How good choices for calls that were not measured are, on every published H200 run: chosen ÷ best of calls that are left out.

``python bench/cross_validate.py`` prints one line per mode, for calls left out alone (sizes between others) and with every call of
their model (heads, head sizes and widths that were never measured): all runs together, the worst call, and each run. To see what a rule
or a constant of the model is worth, change it, build (``make develop``), and run this again; ``results/ablation.md`` has what
came of that for all of them.
"""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MEASUREMENTS = Path(__file__).parent / "results" / "measurements"
RUNS = ("table-09", "table-10", "table-11", "table-12", "table-13", "table-14", "table-15", "table-16", "table-17")


def perfdb(*arguments: str) -> str:
    command = [sys.executable, "-m", "layerzero", "perfdb", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def database(run: str, folder: Path) -> str:
    """The measurements of a run, as a database."""
    text, database = folder / f"{run}.csv", str(folder / f"{run}.sqlite")
    text.write_bytes(gzip.decompress(next(MEASUREMENTS.glob(f"*-h200-{run}.csv.gz")).read_bytes()))
    perfdb("import", str(text), "--db", database)
    return database


def cross_validated(database: str, leave_out: str) -> dict[str, list[dict[str, Any]]]:
    """The calls of a run that others decide, by mode."""
    answer = perfdb("cross-validate", "--device", "h200", "--leave-out", leave_out, "--json", "--db", database)
    return {mode["mode"]: mode["rows"] for mode in json.loads(answer)["modes"]}


def geomean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        databases = [database(run, Path(folder)) for run in RUNS]
        left = {by: [cross_validated(one, by) for one in databases] for by in ("call", "model")}
    for (by, runs), mode in ((one, mode) for one in left.items() for mode in ("eager", "graph")):
        rows = [row for run in runs for row in run[mode]]
        slower = sum(row["times_baseline"] is not None and row["times_baseline"] < 0.95 for row in rows)
        over_best = [row["over_best"] for row in rows]
        each = " ".join(f"{geomean([row['over_best'] for row in run[mode]]):.4f}" for run in runs)
        print(
            f"{by} left out, {mode}: {geomean(over_best):.4f}, worst {max(over_best):.2f}, {len(rows)} calls, "
            f"{slower} below 0.95 of the baseline; by run {each}"
        )


if __name__ == "__main__":
    main()
