"""What link-time optimization and codegen units cost in the build of the native module, and what they buy in its calls.

    python bench/build_profiles.py --target /tmp/profiles --out bench/results/build-profiles.json

Builds `lz-python` from nothing once for each profile: CPU seconds of all compilers together, seconds, the size of the stripped
module, and the crates that took longest. Then a process for each module makes the same calls in turn, a few milliseconds each,
so that a busy machine is busy for all; what counts is the CPU time of the thread. Speeds are compared with the first profile's,
round by round. `--keep FOLDER` keeps the modules, and takes those that are there instead of building them again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: The first one is what the others are compared with: wheels are built with it. `dev` is what `make demo` and `make test` build.
#: Cargo.toml has these two; the others are made here.
PROFILES: dict[str, dict[str, Any]] = {
    "release": {"lto": "fat", "codegen-units": 1},
    "dev": {"lto": False, "codegen-units": 256, "opt-level": 1},
    "thin-16": {"lto": "thin", "codegen-units": 16},
    "none-16": {"lto": False, "codegen-units": 16},
    "thin-1": {"lto": "thin", "codegen-units": 1},
    "none-1": {"lto": False, "codegen-units": 1},
    "fat-16": {"lto": "fat", "codegen-units": 16},
}
#: Calls of `layerzero bench cpu` that LayerZero's own kernels serve: kind, dtype, shape.
CALLS = (
    ("rms_norm", "float32", "1x2048"),
    ("layer_norm", "bfloat16", "16x768"),
    ("silu_mul", "bfloat16", "64x3072"),
    ("dequantize, int8", "float32", "64x4096"),
    ("attention, softcap", "float32", "1x12/12x1024x64"),
    ("paged_attention", "bfloat16", "1x12/12x1024x64"),
    ("linear, packed", "float32", "16x768x768"),
    ("sample_topp, 0.9", "float32", "1x50257"),
)
ROUND_S = 0.004
#: The first profile's module once more: what its rows differ by is noise.
CONTROL = "control"


def build(profile: str, target: Path) -> dict[str, Any]:
    """Builds the module of a profile into an empty folder; what it cost, and where it is."""
    options = ["--profile", profile]
    if profile not in ("release", "dev"):
        for name, value in {"inherits": "release", **PROFILES[profile]}.items():
            options += ["--config", f"profile.{profile}.{name}={json.dumps(value)}"]
    shutil.rmtree(target, ignore_errors=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = ["cargo", "build", "--quiet", "--locked", "--timings", "-p", "lz-python", *options]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "CARGO_TARGET_DIR": str(target)}, check=True)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    module = target / ("debug" if profile == "dev" else profile) / "lib_native.so"
    stripped = target / "stripped.so"
    subprocess.run(["strip", "--strip-all", "-o", str(stripped), str(module)], check=True)
    return {
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "wall_s": round(seconds, 1),
        "bytes": stripped.stat().st_size,
        "longest": longest_crates(target / "cargo-timings" / "cargo-timing.html"),
        "module": stripped,
    }


def longest_crates(page: Path, count: int = 12) -> dict[str, float]:
    """Seconds of the crates that took longest, build scripts and procedural macros included, from cargo's page of timings."""
    found = re.search(r"const UNIT_DATA = (\[.*?\]);\n", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"{page} has no table of units"
    seconds: dict[str, float] = {}
    for unit in json.loads(found[1]):
        seconds[unit["name"]] = seconds.get(unit["name"], 0.0) + unit["duration"]
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: round(value, 1) for name, value in ranked[:count]}


def package(module: Path, folder: Path) -> Path:
    """A copy of the Python package with this native module; the folder to import it from."""
    ignored = shutil.ignore_patterns("__pycache__", "_native*.so")
    shutil.copytree(ROOT / "python" / "layerzero", folder / "layerzero", ignore=ignored)
    shutil.copy(module, folder / "layerzero" / "_native.abi3.so")
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Of a process that uses the package in a folder, and finds nothing kept."""
    home = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "CONFIG", "STATE")}
    rest = {name: value for name, value in os.environ.items() if not name.startswith("LAYERZERO_")}
    return {**rest, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **home}


def work() -> None:
    """One module's process: answers each line with the microseconds of each call, until its input ends."""
    import layerzero as lz
    import torch
    from layerzero.bench import cpu

    wanted = set(CALLS)
    kinds = {kind.partition(",")[0] for kind, _, _ in CALLS}
    cases = {(c.kind, dtype, c.shape): c for dtype, c in cpu.cases(kinds) if (c.kind, dtype, c.shape) in wanted}
    assert set(cases) == wanted, wanted - set(cases)
    with torch.no_grad(), lz.prefer("lz_cpu"):
        counts = {}
        for key, case in cases.items():
            kernel = case.which().kernel_id
            assert kernel.startswith("lz_cpu."), f"{key} is served by {kernel}"
            counts[key] = max(1, int(ROUND_S / _seconds(case.lz, 20)))
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps([_seconds(cases[key].lz, counts[key]) * 1e6 for key in CALLS]), flush=True)


def _seconds(call: Any, count: int) -> float:
    """CPU seconds of this thread for a call."""
    call()
    begin = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - begin) / count


def selection(folder: Path) -> list[float]:
    """`layerzero bench select`, in nanoseconds: the same call again, one of 256 shapes, one never seen before."""
    command = [sys.executable, "-m", "layerzero", "bench", "select", "--json", "--batches", "40"]
    told = subprocess.run(command, env=environment(folder), cwd=folder, check=True, capture_output=True, text=True)
    found = json.loads(told.stdout)
    return [found["p50_ns"], found["shared"]["p50_ns"], found["cold"]["p50_ns"]]


def time_calls(folders: dict[str, Path], rounds: int) -> dict[str, list[list[float]]]:
    """Of each module, the microseconds of each call by round; every round asks them in another order."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    workers = {
        name: subprocess.Popen(
            command, env=environment(folder), cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name, folder in folders.items()
    }
    times: dict[str, list[list[float]]] = {name: [] for name in workers}
    for name, worker in workers.items():
        assert worker.stdout and worker.stdout.readline() == "ready\n", f"the process of {name} did not start"
    orders = random.Random(0)
    for _ in range(rounds):
        for name in orders.sample(list(workers), len(workers)):
            worker = workers[name]
            assert worker.stdin and worker.stdout
            worker.stdin.write("\n")
            worker.stdin.flush()
            times[name].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        assert worker.stdin
        worker.stdin.close()
        worker.wait()
    return times


def compared(times: dict[str, list[list[float]]], names: tuple[str, ...]) -> dict[str, dict[str, dict[str, float]]]:
    """The median of each row, and of its ratio to the first profile's in the same round: above 1 takes longer."""
    first = next(iter(times.values()))
    return {
        profile: {
            name: {
                "median": round(statistics.median(row[i] for row in rows), 4),
                "ratio": round(statistics.median(row[i] / base[i] for row, base in zip(rows, first, strict=True)), 4),
            }
            for i, name in enumerate(names)
        }
        for profile, rows in times.items()
    }


def measure(built: dict[str, dict[str, Any]], rounds: int, processes: int) -> dict[str, Any]:
    """What the calls of the modules take."""
    with TemporaryDirectory() as scratch:
        modules = {name: one["module"] for name, one in built.items()}
        modules[CONTROL] = next(iter(modules.values()))
        folders = {name: package(module, Path(scratch) / name) for name, module in modules.items()}
        orders = random.Random(1)
        chosen: dict[str, list[list[float]]] = {name: [] for name in folders}
        for _ in range(processes):
            for name in orders.sample(list(folders), len(folders)):
                chosen[name].append(selection(folders[name]))
        calls = time_calls(folders, rounds)
    return {
        "calls_us": compared(calls, tuple(", ".join(key) for key in CALLS)),
        "selection_ns": compared(chosen, ("same call", "256 shapes", "never seen")),
    }


def main() -> None:
    """Builds, measures, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=ROOT / "target" / "profiles", help="an empty folder to build in")
    parser.add_argument("--out", type=Path, help="the file to write; stdout by default")
    parser.add_argument("--keep", type=Path, help="where modules are kept, and taken from")
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=list(PROFILES))
    parser.add_argument("--rounds", type=int, default=101, help="rounds of calls (101)")
    parser.add_argument("--processes", type=int, default=7, help="rounds of whole processes (7)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work()
    with TemporaryDirectory() as scratch:
        keep = options.keep or Path(scratch)
        keep.mkdir(parents=True, exist_ok=True)
        built: dict[str, dict[str, Any]] = {}
        for profile in options.profiles:
            module, facts = keep / f"{profile}.so", keep / f"{profile}.json"
            if not facts.exists():
                made = build(profile, options.target)
                shutil.move(made.pop("module"), module)
                shutil.rmtree(options.target)
                facts.write_text(json.dumps(made), encoding="utf-8")
                print(profile, made, file=sys.stderr, flush=True)
            built[profile] = {**json.loads(facts.read_text(encoding="utf-8")), "module": module}
        speeds = measure(built, options.rounds, options.processes) if options.rounds else {}
    result = {
        "schema_version": "1.0",
        "rustc": subprocess.run(["rustc", "--version"], check=True, capture_output=True, text=True).stdout.strip(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "profiles": {name: {**PROFILES[name], **one, "module": None} for name, one in built.items()},
        **speeds,
    }
    for one in result["profiles"].values():
        del one["module"]
    text = json.dumps(result, indent=1) + "\n"
    options.out.write_text(text, encoding="utf-8") if options.out else print(text)


if __name__ == "__main__":
    main()
