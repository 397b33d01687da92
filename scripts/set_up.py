"""Makes the Python environment and builds the native module at the same time, and shows how far both are.

    python3 scripts/set_up.py --module TARGET/debug/lib_native.so --environment VENV

`make demo` runs this first: one step waits for the network, the other one for the processor. Needs only Python's standard library.
Both steps are those of `make develop`, which finds them done.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Seconds between two lines where the output is no terminal.
PAUSE_S = 15.0
#: What a crate of others counts, in bytes of our own source code: it takes one CPU second, 10 kB of ours take as long.
OTHERS = 10_000.0
#: Crates that take longer or shorter than that: SQLite is compiled from C, lz-cpu is optimized in full, the next two not at all.
#: `bench/build_profiles.py --profiles dev` measures it.
FACTORS = {"libsqlite3-sys": 20.0, "lz-cpu": 2.2, "lz-cli": 0.3, "lz-report": 0.3}
SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def clock(seconds: float) -> str:
    """Minutes and seconds: 75 s is `1:15`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Step(abc.ABC):
    """A command that runs in the background, and what is known of its progress."""

    name = ""

    def __init__(self, command: list[str], total: float = 0.0) -> None:
        self.done, self.total = 0.0, total
        self.seconds, self.cpu_seconds = 0.0, 0.0
        self._seen, self._seen_after = 0.0, 0.0
        self._log: list[str] = []
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._began = time.monotonic()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            self._log += (line for line in lines if self.keep(line))
        # With what all its children took, which `Popen.wait` does not tell.
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.seconds, self.cpu_seconds = time.monotonic() - self._began, usage.ru_utime + usage.ru_stime

    @abc.abstractmethod
    def keep(self, line: str) -> bool:
        """Takes note of a line of output; whether it is worth showing if the step fails."""

    def running(self) -> bool:
        """Whether it has not ended."""
        return self._reader.is_alive()

    def progress(self) -> str:
        """How far it is, and how long it will take at the pace up to its last advance; nothing of that once it has run out."""
        if not self.running():
            return f"{self.name} ready after {clock(self.seconds)} (CPU {clock(self.cpu_seconds)})"
        elapsed = time.monotonic() - self._began
        share = self.done / self.total if self.total else 0.0
        if self.done != self._seen:
            self._seen, self._seen_after = self.done, elapsed
        if share < 0.05 or elapsed < 5:
            return f"{self.name} {clock(elapsed)}"
        left = self._seen_after / share - elapsed
        return f"{self.name} {share:.0%}, {clock(elapsed)}" + (f", about {clock(left)} left" if left >= 1 else "")

    def output(self) -> str:
        """What it printed."""
        return "".join(self._log)


class Environment(Step):
    """The Python environment: its progress is what uv says it downloads, and has downloaded, in bytes."""

    name = "Python environment"

    def __init__(self, command: list[str]) -> None:
        self._sizes: dict[str, float] = {}
        super().__init__(command)

    def keep(self, line: str) -> bool:
        """See `Step`."""
        if found := re.match(r"Downloading (\S+) \(([\d.]+)(\w+)\)", line):
            self._sizes[found[1]] = float(found[2]) * SIZES.get(found[3], 1)
            self.total += self._sizes[found[1]]
        elif found := re.match(r"\s*Downloaded (\S+)", line):
            self.done += self._sizes.get(found[1], 0.0)
        return True


class Module(Step):
    """The native module: its progress is what the crates weigh that are compiled, of those that had to be."""

    name = "native module"

    def __init__(self, command: list[str]) -> None:
        self._compiled: set[str] = set()
        self._fresh: set[str] = set()
        self._weights: dict[str, float] = {}
        super().__init__(command)
        # Cargo downloads the crates first, and their list waits for that.
        threading.Thread(target=self._weigh, daemon=True).start()

    def _weigh(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # the build fails for the same reason, and says so
            self._weights = crate_weights()
        self._count()

    def _count(self) -> None:
        weights = {crate: weight for crate, weight in self._weights.items() if crate not in self._fresh}
        self.total = sum(weights.values())
        self.done = sum(weights.get(crate, 0.0) for crate in tuple(self._compiled))

    def keep(self, line: str) -> bool:
        """See `Step`."""
        try:
            message = json.loads(line) if line.startswith("{") else None
        except ValueError:
            message = None
        if message is None:
            return True
        target = message.get("target", {}).get("kind", ["custom-build"])
        if message["reason"] == "compiler-artifact" and target != ["custom-build"]:
            (self._fresh if message.get("fresh") else self._compiled).add(message["package_id"])
            self._count()
        return False


def crate_weights() -> dict[str, float]:
    """How long each crate of the module takes, by cargo's identifier of the crate. The unit does not matter.

    One of ours takes as long as its source code is large. The others are many and small, and the largest ones are declarations
    that cost next to nothing: each counts the same. `FACTORS` has the exceptions.
    """
    options = ["--locked", "--quiet"]
    tree = ["cargo", "tree", "-p", "lz-python", "-e", "normal,build", "--prefix", "none", "--format", "{p}", *options]
    wanted = {tuple(line.split()[:2]) for line in _output(tree).splitlines() if line}
    weights = {}
    for package in json.loads(_output(["cargo", "metadata", "--format-version", "1", *options]))["packages"]:
        if (package["name"], f"v{package['version']}") in wanted:
            sources = (Path(package["manifest_path"]).parent / "src").rglob("*.rs")
            weight = OTHERS if package["source"] else float(sum(file.stat().st_size for file in sources))
            weights[package["id"]] = weight * FACTORS.get(package["name"], 1.0)
    return weights


def _output(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def follow(steps: list[Step]) -> int:
    """Shows the progress until all have ended, or one has failed; gives its exit status."""
    terminal, shown = sys.stdout.isatty(), 0.0
    while True:
        failed = next((step for step in steps if not step.running() and step.process.returncode), None)
        line = " · ".join(step.progress() for step in steps)
        over = failed is not None or not any(step.running() for step in steps)
        if terminal:
            print(f"\r\033[K{line[: os.get_terminal_size().columns - 1]}", end="\n" if over else "", flush=True)
        elif over or time.monotonic() - shown >= PAUSE_S:
            print(line, flush=True)
            shown = time.monotonic()
        if failed:
            for step in steps:
                if step.running():
                    step.process.terminate()
            print(failed.output(), file=sys.stderr)
            print(f"The {failed.name} could not be made: see above.", file=sys.stderr)
            return failed.process.returncode
        if over:
            return 0
        time.sleep(0.25)


def main() -> int:
    """Runs what is not done yet; cargo knows what of the module is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, required=True, help="the environment that `make venv` makes")
    parser.add_argument("--module", type=Path, required=True, help="the file that cargo builds")
    parser.add_argument("--profile", default="dev", help="cargo's profile (dev)")
    options = parser.parse_args()
    if shutil.which("cargo") is None:
        print("There is no `cargo` here: install Rust 1.95 or newer, https://rustup.rs", file=sys.stderr)
        return 1
    steps: list[Step] = []
    if not (options.environment / ".ready").exists():
        print("Downloading torch and other packages: some 3 GB, once for all clones.", flush=True)
        steps.append(Environment(["make", "--no-print-directory", "venv"]))
    if not options.module.exists():
        print(
            "Building the native module from Rust: minutes. Other clones compile only LayerZero's own crates.",
            flush=True,
        )
    build = ["cargo", "build", "--locked", "--quiet", "--profile", options.profile, "-p", "lz-python"]
    steps.append(Module([*build, "--message-format", "json-render-diagnostics"]))
    return follow(steps)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the commands got it too
        sys.exit(130)
