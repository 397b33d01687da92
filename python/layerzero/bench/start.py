"""``layerzero bench start``: what the first call costs beyond torch's own start, and what the end of the program does.

Each round starts three fresh processes, in changing order. All import torch and call ``F.rms_norm`` once. The second
imports LayerZero after that and calls ``lz.rms_norm``. The third imports every library that was found before the call, as
if detection had to: what importing them later saves.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from typing import Any

import layerzero as lz
from layerzero import _native
from layerzero.printing import print_table

#: What the first call may cost beyond torch's own, import of LayerZero included, in seconds.
TARGET_S = 0.3
CASES = ("torch", "layerzero", "libraries imported")

#: A program that says when it got where, by the system's own clock, and which packages it imported after torch's first call.
_PROGRAM = """
import sys, time
began = time.monotonic()
case, device = sys.argv[1:]
import torch
import torch.nn.functional as F
x, w = torch.randn(4, 64, device=device), torch.randn(64, device=device)
F.rms_norm(x, (64,), w, 1e-6)
if device != "cpu":
    torch.accelerator.synchronize()
told = dict(began=began, torch=time.monotonic())
if case != "torch":
    before, worked = set(sys.modules), time.process_time()
    import layerzero as lz
    told["imported"] = time.monotonic()
    if case != "layerzero":
        from layerzero.bench.start import import_libraries
        told["failed"] = import_libraries()
    result = lz.rms_norm(x, w, 1e-6)
    if device != "cpu":
        torch.accelerator.synchronize()
    told["called"], told["worked"] = time.monotonic(), time.process_time() - worked
    known = {*before, *sys.stdlib_module_names, "layerzero"}
    told["packages"] = sorted({name.partition(".")[0] for name in set(sys.modules) - before} - known)
    told["kernel"] = lz.which("rms_norm", x, w, 1e-6).kernel_id
import json
print(json.dumps(told | dict(over=time.monotonic())), flush=True)
"""


def import_libraries() -> list[str]:
    """Imports the library of every backend that was found; gives the backends whose libraries cannot be."""
    from layerzero import loading

    loading.load()
    failed = []
    for backend in json.loads(_native.backends()):
        if backend["unavailable"] is None and not backend["imported"]:
            try:
                loading.detect(backend["name"])
            except Exception:  # noqa: BLE001 - whatever a library raises
                failed.append(backend["name"])
    return failed


def _run(case: str, device: str) -> dict[str, Any]:
    """One process: its times in seconds."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    begun = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM, case, device],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    ended = time.monotonic()
    if process.returncode != 0:
        raise RuntimeError(f"the process for '{case}' on {device} failed:\n{process.stderr.strip()[-2000:]}")
    told = json.loads(process.stdout.splitlines()[-1])
    times = {"interpreter_s": told["began"] - begun, "torch_s": told["torch"] - told["began"]}
    times["exit_s"] = ended - told["over"]
    if "called" in told:
        times["import_s"] = told["imported"] - told["torch"]
        times["call_s"] = told["called"] - told["imported"]
        times["beyond_torch_s"] = told["called"] - told["torch"]
        times["beyond_torch_cpu_s"] = told["worked"]
    return {**times, **{name: told[name] for name in ("packages", "kernel", "failed") if name in told}}


def measure(rounds: int = 7, device: str = "cpu") -> dict[str, Any]:
    """Everything, as data. Times are seconds, medians over rounds."""
    orders = random.Random(0)
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    # What the first process reads from the disk is not read again.
    _run("layerzero", device)
    for _ in range(rounds):
        for case in orders.sample(CASES, len(CASES)):
            found[case].append(_run(case, device))
    rows: dict[str, dict[str, Any]] = {}
    for case, runs in found.items():
        times = {name: statistics.median(run[name] for run in runs) for name in runs[0] if name.endswith("_s")}
        rows[case] = times | {name: value for name, value in runs[0].items() if not name.endswith("_s")}
        for name in ("beyond_torch_s", "exit_s"):
            if name in times:
                rows[case][name.replace("_s", "_all_s")] = [round(run[name], 4) for run in runs]
    beyond = rows["layerzero"]["beyond_torch_s"]
    return {
        "schema_version": "1.0",
        "versions": {"layerzero": lz.__version__, "torch": _torch_version(), "python": platform.python_version()},
        "device": device,
        "rounds": rounds,
        "writes_bytecode": not sys.dont_write_bytecode,
        "rows": rows,
        "exit_beyond_torch_s": rows["layerzero"]["exit_s"] - rows["torch"]["exit_s"],
        "target_s": TARGET_S,
        "met": beyond <= TARGET_S,
    }


def _torch_version() -> str | None:
    from layerzero.compat import builds

    return builds.torch_build().torch


def _print(result: dict[str, Any]) -> None:
    print(f"the first call in a fresh process on {result['device']}, s (median of {result['rounds']} rounds)")
    figures = ("torch_s", "import_s", "call_s", "beyond_torch_s", "beyond_torch_cpu_s", "exit_s")
    print_table(
        ("", "torch", "import", "call", "beyond torch", "of it CPU", "exit"),
        [(name, *(f"{row[key]:.3f}" if key in row else "" for key in figures)) for name, row in result["rows"].items()],
    )
    row = result["rows"]["layerzero"]
    print(f"kernel: {row['kernel']}; packages imported beside torch's: {', '.join(row['packages']) or 'none'}")
    print(f"beyond torch's own first call: {row['beyond_torch_s']:.3f} s, target {result['target_s']} s")
    if not result["writes_bytecode"]:
        print("Python writes no bytecode here (PYTHONDONTWRITEBYTECODE): every process compiles our sources anew")


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="layerzero bench start", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of three processes each (7)")
    parser.add_argument("--device", default="cpu", help="where the calls are made (cpu)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("rounds is at least 1")
    result = measure(options.rounds, options.device)
    print(json.dumps(result, indent=2)) if options.json else _print(result)
    return 0
