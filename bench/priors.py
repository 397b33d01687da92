"""Measures what a prior is made of: the calls of published models, every kernel that can serve them.

``python bench/priors.py -o crates/lz-predict/priors/NAME.json`` runs the rows of ``layerzero bench out-of-box`` once to see which
calls they are, tunes these calls with an empty database, and builds the prior: on a GPU with ``--device cuda``, and in CUDA
graphs as well; on a CPU once for each number of ``--threads``. ``--measurements`` keeps what was measured, as CSV: ``layerzero perfdb prior
build`` makes one prior of several such runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from layerzero.bench import empty


def calls(models: list[str] | None, kinds: list[str] | None, device: str, dtypes: list[str]) -> list[str]:
    """The calls of the rows, or of those of some kinds, each once."""
    import layerzero as lz
    import torch
    from layerzero.bench.model_rows import rows
    from layerzero.bench.out_of_box import sizes_of

    sizes = sizes_of(device)
    with torch.no_grad():
        for row in (
            row for row in rows(sizes, models) if row.elements <= sizes.largest and row.kind in (kinds or [row.kind])
        ):
            for dtype in dtypes:
                try:
                    row.made(device, getattr(torch, dtype)).ours(lz)
                except lz.LayerZeroError as error:
                    print(f"{row.name}, {dtype}: {error}", file=sys.stderr)
    return [entry.call for entry in lz.manifest()]


def tune(request: dict[str, Any]) -> None:
    """In a process of its own: with so many threads, into the database of its environment."""
    import layerzero as lz
    import torch

    torch.set_num_threads(request["threads"] or torch.get_num_threads())
    found = calls(request["models"], request["kinds"], request["device"], request["dtypes"])
    how = {"calls": found, "budget": request["budget"], "samples": request["samples"], "device": request["device"]}
    for mode in request["modes"] if request["device"] != "cpu" else ["eager"]:
        report = lz.tune(**how, graph=mode == "graph")
        print(f"{len(found)} calls, {mode}: {len(report.tuned)} were measured", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--models", type=lambda text: text.split(","))
    parser.add_argument("--kinds", type=lambda text: text.split(","), help="of rows: window, mask, rope, …; all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["eager", "graph"], help="on a GPU")
    parser.add_argument("--threads", type=lambda text: [int(one) for one in text.split(",")], default=[0])
    parser.add_argument("--budget", default="300s", help="how long each mode or number of threads may take")
    parser.add_argument("--measurements", type=Path, help="also write what was measured to this CSV file")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--request", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.request:
        tune(json.loads(asked.request))
        return 0
    names = ("models", "kinds", "device", "dtypes", "modes", "budget", "samples")
    with tempfile.TemporaryDirectory() as folder:
        environment = empty.environment(Path(folder))
        for threads in asked.threads:
            request = json.dumps({name: getattr(asked, name) for name in names} | {"threads": threads})
            command = [sys.executable, __file__, "-o", str(asked.output), "--request", request]
            subprocess.run(command, check=True, env={**environment, "OMP_NUM_THREADS": str(threads or os.cpu_count())})
        perfdb = [sys.executable, "-m", "layerzero", "perfdb"]
        if asked.measurements:
            export = ["export", "--format", "csv", "-o", str(asked.measurements.absolute())]
            subprocess.run(perfdb + export, check=True, env=environment)
        build = [*perfdb, "prior", "build", "--device", asked.device]
        build += ["-o", str(asked.output.absolute())]
        return subprocess.run(build, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
