"""The first minutes of a program on a GPU: its first calls, when the kernel that is best serves, and how it ends.

```console
$ PYTHONPATH=python python bench/gpu/first_minutes.py --out first_minutes.json       # some five minutes on an H200
$ PYTHONPATH=python python bench/gpu/first_minutes.py --device cpu --quick           # tries the script itself
```

Every function is tried in a fresh process of its own, with empty folders for caches, then again with what the first one
left there; and all of them in one process, as a server would. A process makes the first call, then calls every 10 ms
until nothing waits to be compiled and the call goes to the same kernel as it would if all were compiled (*steady*), or
until the limit. A last set of processes ends in the middle of that: the exit is the time from the last statement to the
end of the process, and no process may be left behind. Beside it, the same program with plain torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FUNCTIONS = ("rms_norm", "layer_norm", "attention", "paged_attention", "silu_mul", "sample_topp", "rope")
#: What our own Triton kernels may take to be steady, in seconds, and the first call beyond torch's.
STEADY_S, FIRST_S = 10.0, 0.3


def calls(device: str) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each function, as a model of 8 billion parameters calls it."""
    import torch

    kind = torch.bfloat16 if device != "cpu" else torch.float32

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=kind)

    q, k, v = made(1, 2048, 32, 128), made(1, 2048, 8, 128), made(1, 2048, 8, 128)
    pages, tables = made(256, 16, 8, 128), torch.arange(256, device=device, dtype=torch.int32).view(4, 64)
    lens = torch.full((4,), 1000, device=device, dtype=torch.int32)
    angles = torch.rand(4096, 64, device=device)
    return {
        "rms_norm": ((made(64, 4096), made(4096), 1e-6), {}),
        "layer_norm": ((made(64, 4096), (4096,), made(4096), made(4096)), {}),
        "attention": ((q, k, v), {"causal": True, "window": (1023, 0), "softcap": 30.0}),
        "paged_attention": ((made(4, 32, 128), pages, pages.clone(), tables, lens), {}),
        "silu_mul": ((made(64, 14336), made(64, 14336)), {}),
        "sample_topp": ((torch.randn(4, 128256, device=device),), {"p": 0.9}),
        "rope": ((made(1, 512, 32, 128), angles.cos(), angles.sin()), {}),
    }


def plain(name: str, args: tuple[Any, ...]) -> Callable[[], Any]:
    """What one writes with torch alone, for a first call of about the same kind."""
    import torch
    import torch.nn.functional as F

    if name in ("attention", "paged_attention"):
        q = args[0] if args[0].dim() == 4 else args[0][:, None]
        turned = q.transpose(1, 2)
        return lambda: F.scaled_dot_product_attention(turned, turned, turned)
    if name == "sample_topp":
        return lambda: torch.multinomial(args[0].softmax(-1), 1)
    if name == "silu_mul":
        return lambda: F.silu(args[0]) * args[1]
    if name == "rope":
        return lambda: args[0] * args[0]
    return lambda: F.rms_norm(args[0], args[0].shape[-1:])


def program(request: dict[str, Any]) -> dict[str, Any]:
    """What a process does; it prints what this gives."""
    began = time.monotonic()
    device, names = request["device"], request["functions"]
    import torch

    def wait() -> None:
        if device != "cpu":
            torch.accelerator.synchronize()

    given = calls(device)
    for name in names:
        plain(name, given[name][0])()
    wait()
    told: dict[str, Any] = {"torch_s": time.monotonic() - began, "functions": {}}
    if request["what"] == "torch":
        return told
    before = time.monotonic()
    import layerzero as lz

    told["import_s"] = time.monotonic() - before
    for name in names:
        args, kwargs = given[name]
        at = time.monotonic()
        getattr(lz, name)(*args, **kwargs)
        wait()
        told["functions"][name] = {"first_call_s": time.monotonic() - at, "at": at}
    if request["what"] == "end":
        # While something is compiled, if anything is to be.
        until = time.monotonic() + request["moment_s"]
        while time.monotonic() < until:
            getattr(lz, names[0])(*given[names[0]][0], **given[names[0]][1])
        told["jit"] = lz.health().to_dict()["jit"]
        return told
    await_steady(lz, given, told, request["limit_s"], wait)
    told["packages"] = sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names))
    told["jit"] = lz.health().to_dict()["jit"]
    return told


def await_steady(lz: Any, given: Any, told: dict[str, Any], limit_s: float, wait: Callable[[], None]) -> None:
    """Calls until no function's kernel changes any more, and notes when each came to its last."""
    rows, until = told["functions"], time.monotonic() + limit_s
    slowest = dict.fromkeys(rows, 0.0)
    while True:
        jit = lz.health().to_dict()["jit"]
        for name, row in rows.items():
            args, kwargs = given[name]
            kernel = lz.which(name, *args, **kwargs).kernel_id
            if kernel != row.get("kernel"):
                row.setdefault("kernels", []).append(kernel)
                row["kernel"], row["steady_s"] = kernel, time.monotonic() - row["at"]
            at = time.monotonic()
            getattr(lz, name)(*args, **kwargs)
            wait()
            slowest[name] = max(slowest[name], time.monotonic() - at)
        if not jit["queued"] and not jit["running"]:
            break
        if time.monotonic() > until:
            told["limit"] = f"{jit['queued']} queued and {jit['running']} under way after {limit_s:g} s"
            break
        time.sleep(0.01)
    for name, row in rows.items():
        row["slowest_call_s"] = slowest[name]
        if row["steady_s"] < row["first_call_s"] + 0.05:
            # It was chosen at once, and never changed.
            row["steady_s"] = row["first_call_s"]
        del row["at"]


def run(folder: Path, **request: Any) -> dict[str, Any]:
    """Runs a program in a process of its own: what it told, and how it ended."""
    # Not at the top: the programs themselves time the import of LayerZero.
    from layerzero.bench import empty

    command = [sys.executable, str(Path(__file__).resolve()), "--program", json.dumps(request)]
    begun = time.monotonic()
    done = subprocess.run(
        command, env=empty.environment(folder), capture_output=True, text=True, timeout=900, check=False
    )
    ended = time.monotonic()
    if done.returncode != 0 or not done.stdout.strip():
        return {"error": f"status {done.returncode}: {done.stderr.strip()[-1500:]}"}
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    told["exit_s"], told["whole_s"] = ended - told.pop("over"), ended - begun
    told["printed"] = done.stderr.strip()[-500:]
    pid = told.get("jit", {}).get("compiler", {}).get("pid")
    told["left_behind"] = pid is not None and Path(f"/proc/{pid}").exists()
    return told


def measure(device: str, functions: list[str], rounds: int, limit_s: float) -> dict[str, Any]:
    """Everything, as data."""
    import torch

    result: dict[str, Any] = {"device": device, "torch": torch.__version__, "rounds": rounds}
    if device != "cpu":
        result["gpu"] = torch.cuda.get_device_name()
    runs: dict[str, list[dict[str, Any]]] = {}
    groups = {**{name: [name] for name in functions}, "all": functions}
    for _ in range(rounds):
        for name, group in groups.items():
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                common = {"device": device, "functions": group, "limit_s": limit_s}
                for what, request in (
                    ("torch", {"what": "torch"}),
                    ("empty", {"what": "steady"}),
                    ("kept", {"what": "steady"}),
                ):
                    runs.setdefault(f"{name} {what}", []).append(run(folder, **common, **request))
            with tempfile.TemporaryDirectory() as place:
                moment = {"what": "end", "moment_s": 1.0}
                runs.setdefault(f"{name} end", []).append(run(Path(place), **common, **moment))
            say(name, {what: runs[f"{name} {what}"][-1] for what in ("torch", "empty", "kept", "end")})
    result["runs"] = runs
    result["rows"] = {name: row(name, group, runs) for name, group in groups.items()}
    result["problems"] = [f"{name}: {one['error']}" for name, all_ in runs.items() for one in all_ if "error" in one]
    result["problems"] += [
        f"{name} left a process" for name, all_ in runs.items() if any(r.get("left_behind") for r in all_)
    ]
    return result


def say(name: str, last: dict[str, dict[str, Any]]) -> None:
    """Progress."""
    words = [f"{what} {one['whole_s']:.1f} s" if "whole_s" in one else f"{what} failed" for what, one in last.items()]
    print(f"{name}: {', '.join(words)}", file=sys.stderr, flush=True)


def row(name: str, group: list[str], runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the rounds. Of several functions, the first call is that of the first, and steady when the last is."""

    def median(what: str, get: Callable[[dict[str, Any]], float]) -> float | None:
        values = [get(one) for one in runs[f"{name} {what}"] if "error" not in one]
        return statistics.median(values) if values else None

    def first(one: dict[str, Any]) -> float:
        return float(one["import_s"] + one["functions"][group[0]]["first_call_s"])

    def steady(one: dict[str, Any]) -> float:
        return max(float(f["steady_s"]) for f in one["functions"].values())

    def slowest(one: dict[str, Any]) -> float:
        return max(float(f["slowest_call_s"]) for f in one["functions"].values())

    found: dict[str, Any] = {"torch_exit_s": median("torch", lambda one: one["exit_s"])}
    for what in ("empty", "kept"):
        found |= {f"{what}_first_s": median(what, first), f"{what}_steady_s": median(what, steady)}
        found |= {f"{what}_slowest_s": median(what, slowest), f"{what}_exit_s": median(what, lambda one: one["exit_s"])}
    found["end_exit_s"] = median("end", lambda one: one["exit_s"])
    good = next((one for one in runs[f"{name} empty"] if "error" not in one), None)
    if good is not None:
        found["kernels"] = {f: given["kernels"] for f, given in good["functions"].items()}
        found["compiler"] = good["jit"]["compiler"]["by"]
    return found


def show(result: dict[str, Any]) -> None:
    """The table."""
    print(
        f"{result.get('gpu', result['device'])}, torch {result['torch']}; seconds, medians of {result['rounds']} rounds"
    )
    columns = (
        "empty_first_s",
        "empty_steady_s",
        "empty_slowest_s",
        "kept_first_s",
        "kept_steady_s",
        "end_exit_s",
        "torch_exit_s",
    )
    titles = ("first call", "steady", "slowest", "first, kept", "steady, kept", "exit midway", "exit of torch")
    print(f"{'':<16}" + "".join(f"{title:>15}" for title in titles) + "   kernels")
    for name, one in result["rows"].items():
        cells = "".join(f"{'–' if one[c] is None else format(one[c], '.3f'):>15}" for c in columns)
        print(f"{name:<16}{cells}   {' → '.join(one.get('kernels', {}).get(name, []))}")
    print(
        f"targets: first call {FIRST_S} s, import included; steady {STEADY_S:g} s for kernels of `triton`, at once when kept"
    )
    for problem in result["problems"]:
        print(f"problem: {problem}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for all of it as JSON")
    parser.add_argument("--device", default="cuda", help="cuda")
    parser.add_argument("--functions", default=",".join(FUNCTIONS), help="some of them, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of each kind (3)")
    parser.add_argument("--limit", type=float, default=180.0, help="how long to wait for steady, in seconds (180)")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        told = program(json.loads(options.program))
        print(json.dumps(told | {"over": time.monotonic()}), flush=True)
        return 0
    functions = options.functions.split(",")
    if unknown := set(functions) - set(FUNCTIONS):
        parser.error(f"no function is called {', '.join(sorted(unknown))}; there are {', '.join(FUNCTIONS)}")
    result = measure(options.device, functions, 1 if options.quick else options.rounds, options.limit)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
