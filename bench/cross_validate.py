"""How good choices between measured sizes are on every published H200 run: chosen ÷ best of calls that are left out.

``python bench/cross_validate.py`` prints one line per mode: all runs together, the worst call, and each run. To see what a rule
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
RUNS = ("ninth", "tenth", "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth")


def perfdb(*arguments: str) -> str:
    command = [sys.executable, "-m", "layerzero", "perfdb", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def cross_validated(run: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The calls of a run that others decide, by mode."""
    text, database = folder / f"{run}.csv", str(folder / f"{run}.sqlite")
    text.write_bytes(gzip.decompress((MEASUREMENTS / f"h200-{run}.csv.gz").read_bytes()))
    perfdb("import", str(text), "--db", database)
    answer = json.loads(perfdb("cross-validate", "--device", "h200", "--json", "--db", database))
    return {mode["mode"]: mode["rows"] for mode in answer["modes"]}


def geomean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = [cross_validated(run, Path(folder)) for run in RUNS]
    for mode in ("eager", "graph"):
        rows = [row for run in runs for row in run[mode]]
        slower = sum(row["times_baseline"] is not None and row["times_baseline"] < 0.97 for row in rows)
        over_best = [row["over_best"] for row in rows]
        each = " ".join(f"{geomean([row['over_best'] for row in run[mode]]):.4f}" for run in runs)
        print(
            f"{mode}: {geomean(over_best):.4f}, worst {max(over_best):.2f}, {len(rows)} calls, "
            f"{slower} over 3% slower than the baseline; by run {each}"
        )


if __name__ == "__main__":
    main()
