"""Builds the prior of the H200 out of the published measurements: ``python bench/h200_prior.py``.

The runs are those of the GPU table, and the calls of ten models (``h200-models``, made by ``bench/priors.py``). A prompt with a window
counts only if the newest run has that window. The older runs were made before ``triton.attention``, and a prior in which the fastest
kernel has no time puts every kernel that has one before it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEASUREMENTS = ROOT / "bench" / "results" / "measurements"
NEWEST = "models"
RUNS = ("table-13", "table-14", "table-15", "table-16", "table-17", NEWEST)

Row = dict[str, str]


def read(run: str) -> list[Row]:
    """The rows of a run."""
    text = gzip.decompress(next(MEASUREMENTS.glob(f"*-h200-{run}.csv.gz")).read_bytes()).decode()
    return list(csv.DictReader(io.StringIO(text)))


def window(row: Row) -> tuple[str, int] | None:
    """The operation of a prompt, and the window it has."""
    left = (json.loads(row["call"]).get("params") or {}).get("window_left", -1)
    return (row["operation"], left) if ".prefill" in row["operation"] and left >= 0 else None


def main() -> int:
    """Writes the prior."""
    runs = {run: read(run) for run in RUNS}
    known = {None} | {window(row) for row in runs[NEWEST]}
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for run, rows in runs.items():
            files.append(Path(folder, f"{run}.csv"))
            with files[-1].open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, rows[0], lineterminator="\n")
                writer.writeheader()
                writer.writerows(row for row in rows if window(row) in known)
        prior = ROOT / "crates" / "lz-predict" / "priors" / "nvidia-h200.json"
        command = [sys.executable, "-m", "layerzero", "perfdb", "prior", "build", "--device", "h200", "-o", prior]
        return subprocess.run([*command, *files], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
