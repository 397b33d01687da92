"""``layerzero bench graph``: models compiled by ``lz.compile`` against torch, ``torch.compile``, ONNX Runtime and OpenVINO, on a CPU.

Every peer has a process of its own, because thread pools that spin slow each other down. In each round, every peer is timed for a
moment while the others wait. A cell has the peer's time, the median over the rounds, and in brackets the median of its time ÷ that
of eager torch in the same round: below 1 is faster. "÷ best peer" is the time of the fastest LayerZero variant ÷ that of the fastest
other peer. "difference" is the largest difference between LayerZero's results and those of eager torch. Without eager torch, the
first peer of ``--peers`` takes its place in both.

A peer whose process ends has no time for that model, and is started again for the next one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from layerzero.printing import Progress, print_table

#: What a peer needs besides torch.
_PACKAGES = {"onnxruntime": ("onnxruntime", "onnxscript"), "openvino": ("openvino",)}
_DEFAULT = ("eager", "torch.compile", "onnxruntime", "openvino", "layerzero")


class Worker:
    """A peer's process."""

    def __init__(self, peer: str, threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "layerzero.bench.graph_worker", peer, str(threads)]
        self.peer = peer
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, line: str) -> dict[str, Any]:
        """The answer to a command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(line, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except OSError:
            answer = ""
        # A process that ends in the middle of an answer leaves a part of a line.
        found: dict[str, Any] = json.loads(answer) if answer.endswith("\n") else {"error": "the process ended"}
        return found

    def runs(self) -> bool:
        """Whether the process still runs. Some libraries end it when they cannot handle a model."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process, by force if it does not end by itself."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def divisor(peers: Sequence[str]) -> str:
    """The peer whose times the others' are divided by, and whose results they are compared with."""
    return "eager" if "eager" in peers else peers[0] if peers else ""


def _row(case: str, tokens: int, workers: Sequence[Worker], rounds: int, seconds: float) -> dict[str, Any]:
    import torch

    found: dict[str, dict[str, Any]] = {}
    first = divisor([worker.peer for worker in workers])
    # The divisor first: the others' results are compared with its result.
    workers = sorted(workers, key=lambda worker: worker.peer != first)
    with TemporaryDirectory() as folder:
        for number, worker in enumerate(workers):
            found[worker.peer] = worker.ask(f"prepare {case}")
            if "error" not in found[worker.peer]:
                path = Path(folder) / f"{number}.pt"
                if "error" in (answer := worker.ask(f"result {path}")):
                    found[worker.peer] = answer
                    continue
                expected = Path(folder) / "0.pt"
                if path.exists() and expected.exists():
                    difference = (torch.load(path) - torch.load(expected)).abs().max().item()
                    found[worker.peer]["largest_difference"] = difference
    ready = [worker for worker in workers if "error" not in found[worker.peer]]
    times: dict[str, list[float]] = {worker.peer: [] for worker in ready}
    orders = random.Random(0)
    for _ in range(rounds):
        for worker in orders.sample(ready, len(ready)):
            answer = worker.ask(f"time {seconds}")
            if "times_us" in answer:
                times[worker.peer].append(statistics.median(answer["times_us"]))
            else:
                found[worker.peer] = {"error": answer.get("error", "no times")}
                ready.remove(worker)
                del times[worker.peer]
    for name, of in times.items():
        found[name]["us"] = statistics.median(of)
        if first in times:
            found[name]["of_eager"] = statistics.median(a / b for a, b in zip(of, times[first], strict=True))
        if tokens:
            found[name]["tokens_per_second"] = tokens * 1e6 / found[name]["us"]
    others = [found[name]["us"] for name in times if not name.startswith("layerzero")]
    ours = [found[name]["us"] for name in times if name.startswith("layerzero")]
    best = min(ours) / min(others) if ours and others else None
    return {"case": case, "peers": found, "of_best_peer": best}


def _missing(peer: str) -> str:
    absent = [name for name in _PACKAGES.get(peer, ()) if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else ""


def measure(
    cases: Sequence[str],
    peers: Sequence[str],
    threads: int,
    rounds: int,
    seconds: float,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Times the cases with each peer. `keep` gets what is known after each case, so that an interrupted run is not lost."""
    from layerzero.bench.graph_models import CASES

    tokens = {case.name: case.tokens for case in CASES}
    left_out = {peer: why for peer in peers if (why := _missing(peer))}
    present = [peer for peer in peers if peer not in left_out]
    rows: list[dict[str, Any]] = []
    found = {
        "bench": "graph",
        "threads": threads,
        "rounds": rounds,
        "peers": present,
        "divisor": divisor(present),
        "left_out": left_out,
        "rows": rows,
    }
    with Progress(None, "models timed") as progress, ExitStack() as stack:
        workers = [Worker(peer, threads) for peer in present]
        for worker in workers:
            stack.callback(worker.close)
        for done, case in enumerate(cases):
            progress.show(done, len(cases))
            for at, worker in enumerate(workers):
                if not worker.runs():
                    workers[at] = Worker(worker.peer, threads)
                    stack.callback(workers[at].close)
            rows.append(_row(case, tokens.get(case, 0), workers, rounds, seconds))
            keep(found)
    return found


def _cell(found: dict[str, Any]) -> str:
    if "us" not in found:
        return "–"
    ratio = f" ({found['of_eager']:.2f})" if "of_eager" in found else ""
    speed = f", {found['tokens_per_second']:.0f} tokens/s" if "tokens_per_second" in found else ""
    return f"{found['us']:.0f}{ratio}{speed}"


def _print(result: dict[str, Any]) -> None:
    of = "eager torch" if result["divisor"] == "eager" else result["divisor"]
    print(f"float32, {result['threads']} threads; µs, in brackets ÷ {of}: below 1 is faster")
    peers = result["peers"]
    rows = [
        [
            row["case"],
            *(_cell(row["peers"][peer]) for peer in peers),
            "–" if row["of_best_peer"] is None else f"{row['of_best_peer']:.2f}",
            f"{row['peers'].get('layerzero', {}).get('largest_difference', float('nan')):.1e}",
        ]
        for row in result["rows"]
    ]
    print_table(("model", *peers, "÷ best peer", "difference"), rows)
    for peer, why in result["left_out"].items():
        print(f"  without {peer}: {why}")
    for row in result["rows"]:
        for peer, found in row["peers"].items():
            if "error" in found:
                print(f"  {row['case']}, {peer}: {found['error']}")


def main(arguments: list[str]) -> int:
    """Runs the benchmark with arguments of the command line."""
    from layerzero.bench.graph_models import CASES
    from layerzero.bench.graph_worker import PEERS

    parser = argparse.ArgumentParser(prog="layerzero bench graph", description=__doc__)
    parser.add_argument("--cases", help="only cases whose names hold one of these words, separated by commas")
    parser.add_argument("--peers", help=f"who takes part, separated by commas: {', '.join(PEERS)}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="how long a peer is timed in a round")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON, to a file or to stdout")
    options = parser.parse_args(arguments)
    peers = list(_DEFAULT) if options.peers is None else [name.strip() for name in options.peers.split(",")]
    if unknown := [name for name in peers if name not in PEERS]:
        parser.error(f"there is no peer {unknown[0]!r}; there are: {', '.join(PEERS)}")
    words = [""] if options.cases is None else [word.strip() for word in options.cases.split(",")]
    cases = [
        case.name
        for case in CASES
        if any(word in case.name for word in words)
        and (not case.requires or importlib.util.find_spec(case.requires) is not None)
    ]
    if not cases:
        parser.error(f"no case has {options.cases!r} in its name; there are: {', '.join(case.name for case in CASES)}")
    to_file = options.json not in (None, "-")

    def keep(found: dict[str, Any]) -> None:
        if to_file:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")

    result = measure(cases, peers, options.threads, options.rounds, options.seconds, keep)
    if options.json == "-":
        print(json.dumps(result, indent=1))
        return 0
    _print(result)
    return 0
