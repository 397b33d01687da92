"""A program that ends, over and over, while threads compile, tune, watch files and sample.

`python exiting.py COUNT SEED FOLDER [DEVICE]` forks COUNT children. Each starts threads of some kinds, goes on for a random
moment and then ends in one of the ways a program can end. It prints a line of JSON for each: what it was to do, the status
it ended with, and what it printed.

The parent imports everything once and calls nothing, so that a child starts as a fresh program does.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import layerzero as lz
import torch
import torch.nn.functional as F
from torch import Tensor

#: What a child's threads do, and how it ends.
WORK = ("compile", "compile_by_a_program", "tune", "watch", "sample", "attend", "ask")
ENDS = {"return": 0, "exit": 3, "raise": 1, "terminate": -signal.SIGTERM, "fork": 5}


def slow_kernel(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """A kernel that is compiled by Python code for a while, when the thread that compiles calls it."""
    if threading.current_thread().name == "layerzero-compile":
        if "compile_by_a_program" in DOING:
            import subprocess

            subprocess.run(["sleep", "30"], check=True)
        until = time.monotonic() + 5
        while time.monotonic() < until:
            torch.linalg.inv(torch.eye(40))
    return F.rms_norm(input, (input.shape[-1],), weight, eps)


#: What this child's threads do.
DOING: set[str] = set()


def start(kind: str, folder: Path, device: str) -> None:
    """Starts a thread that does something until the program ends."""
    # Made here: a thread that is inside of torch itself while the interpreter shuts down ends the process, with or without
    # LayerZero. The threads make calls of LayerZero alone.
    x = torch.linspace(-1.0, 1.0, 64, device=device).reshape(4, 16)
    rows = [torch.ones(2, size, device=device) for size in range(8, 200)]
    logits, q = torch.randn(4, 1000, device=device), torch.randn(1, 8, 2, 16, device=device)

    def compile_() -> None:
        if device == "cpu":
            lz.register_kernel(
                operation="norm.rms",
                kernel_id=f"slow.{kind}",
                platform="cpu",
                supported_dtypes=["float32"],
                priority=99,
                jit=True,
            )(slow_kernel)
        for row in itertools.cycle(rows):
            lz.rms_norm(row)

    def tune() -> None:
        while True:
            lz.tune("rms_norm", shapes=[(4, 32), (8, 64)], dtype=torch.float32, device=device, progress=False)

    def watch() -> None:
        file = folder / f"{os.getpid()}.yaml"
        file.write_text("watch: true\nwatch_debounce_ms: 0\n")
        lz.load_config(file)
        for size in itertools.count():
            file.write_text(f"watch: true\nwatch_debounce_ms: 0\nmemory_headroom_mb: {size % 1000}\n")
            lz.rms_norm(x)

    def sample() -> None:
        while True:
            lz.sample_topp(logits, p=0.9)

    def attend() -> None:
        while True:
            lz.attention(q, q, q, layout="BSHD")

    def ask() -> None:
        while True:
            lz.which("rms_norm", x)
            lz.health()

    targets = {"compile": compile_, "compile_by_a_program": compile_, "tune": tune, "watch": watch}
    targets |= {"sample": sample, "attend": attend, "ask": ask}
    threading.Thread(target=targets[kind], daemon=True, name=kind).start()


def child(kinds: list[str], end: str, moment: float, folder: Path, device: str) -> None:
    """Runs until the moment has come, and ends."""
    DOING.update(kinds)
    for kind in kinds:
        start(kind, folder, device)
    until = time.monotonic() + moment
    while time.monotonic() < until:
        lz.rms_norm(torch.ones(2, 4, device=device))
    if end == "fork":
        # Threads of other libraries may be anywhere in their first call, and their locks are not ours.
        lz.rms_norm(torch.ones(2, 4, device=device))
        # A child of its own, that makes a call and ends.
        if (pid := os.fork()) == 0:
            if device == "cpu":
                lz.rms_norm(torch.ones(2, 5))
            sys.exit(4)
        _, status = os.waitpid(pid, 0)
        sys.exit(5 if os.waitstatus_to_exitcode(status) == 4 else 6)
    if end == "exit":
        sys.exit(3)
    if end == "raise":
        raise ValueError("the program's own")
    if end == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


def main() -> None:
    """Ends children, and tells how they ended."""
    count, seed, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    device = sys.argv[4] if len(sys.argv) > 4 else "cpu"
    choose = random.Random(seed)
    for number in range(count):
        kinds = choose.sample(WORK, choose.randint(1, 3))
        end = choose.choice(sorted(ENDS if device == "cpu" else ENDS.keys() - {"fork"}))
        moment = choose.choice((0.0, choose.random() * 0.02, choose.random() * 0.3, choose.random()))
        with tempfile.TemporaryFile() as printed:
            if (pid := os.fork()) == 0:
                os.dup2(printed.fileno(), 1)
                os.dup2(printed.fileno(), 2)
                child(kinds, end, moment, folder, device)
                return
            status = wait(pid, 120)
            printed.seek(0)
            text = printed.read().decode(errors="replace")
        told = {"number": number, "kinds": kinds, "end": end, "moment": moment, "status": status, "printed": text}
        print(json.dumps(told), flush=True)


def wait(pid: int, seconds: float) -> int | str:
    """The status a child ended with, or "hangs"."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


if __name__ == "__main__":
    main()
