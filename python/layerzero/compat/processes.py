"""Probes as processes of their own: what kills one, or never ends, is a result like any other."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: How much longer a kernel may take that is compiled first.
COMPILING = 5
#: How long the interpreter and torch may take to start.
STARTING_S = 120.0
# How often a process that says nothing is looked after.
_LOOK_S = 0.05

_CODE = "import sys; sys.path[:] = {path!r}; from layerzero.compat.probe import main; main({request!r}, {channel})"


@dataclass
class Outcome:
    """What a process found, and how it ended."""

    #: What became of each backend's import.
    imported: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: What became of each kernel.
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Why it did not get to its end; ``None`` when it did.
    died: str | None = None
    #: Of which backend that was.
    backend: str | None = None
    #: Of which kernel.
    kernel: str | None = None


def probe(
    backends: Sequence[str],
    calls: dict[str, dict[str, Any]] | None,
    timeout: float,
    stop: threading.Event | None = None,
) -> Outcome:
    """Loads backends in this order in a process of its own and tries their kernels.

    Args:
        backends: names of folders.
        calls: which kernels, on which calls, by backend; ``None`` for all, on calls that are looked for.
        timeout: seconds that an import, or a kernel, may take.
        stop: ends the process when it is set, from another thread.
    """
    request = json.dumps({"backends": list(backends), "calls": calls})
    ours, theirs = os.pipe()
    with tempfile.TemporaryFile() as printed:
        try:
            code = _CODE.format(path=[entry or os.getcwd() for entry in sys.path], request=request, channel=theirs)
            # A group of its own, so that compilers it started end with it.
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=[theirs],
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        try:
            return _Listener(ours, process, timeout, printed, stop or threading.Event()).listen()
        finally:
            os.close(ours)
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


class _Listener:
    """Follows the reports of one process."""

    def __init__(
        self, channel: int, process: subprocess.Popen[bytes], timeout: float, printed: Any, stop: threading.Event
    ) -> None:
        self._channel, self._process, self._timeout, self._printed = channel, process, timeout, printed
        self._stop = stop
        self._outcome = Outcome()
        self._doing = "starting"
        self._limit = max(timeout, STARTING_S)
        self._done = False

    def listen(self) -> Outcome:
        rest, since = b"", time.monotonic()
        while not self._done:
            if self._stop.is_set():
                self._outcome.died = f"was stopped while {self._doing}"
                return self._outcome
            if select.select([self._channel], [], [], _LOOK_S)[0]:
                data = os.read(self._channel, 65536)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    since = time.monotonic()
                    self._take(json.loads(line))
            elif self._process.poll() is not None:
                break
            elif time.monotonic() - since > self._limit:
                self._outcome.died = f"was not done with {self._doing} after {self._limit:g} s"
                return self._outcome
        if not self._done:
            self._outcome.died = f"{self._how_it_ended()} while {self._doing}{self._last_words()}"
        return self._outcome

    def _take(self, report: dict[str, Any]) -> None:
        at, outcome = report.pop("at"), self._outcome
        self._limit = self._timeout
        if "backend" in report:
            outcome.backend = report["backend"]
        if at == "import":
            self._doing = f"importing {outcome.backend}"
        elif at == "imported":
            outcome.imported[str(outcome.backend)] = report
        elif at == "look":
            self._doing = f"looking for a call of {report['kernel']}"
        elif at == "run":
            outcome.kernel = report["kernel"]
            self._doing = f"running {outcome.kernel}"
            self._limit *= COMPILING if report["jit"] else 1
        elif at == "judged":
            outcome.kernels[report.pop("kernel")] = report
            outcome.kernel = None
        elif at == "lost":
            outcome.kernel = report["kernel"]
            outcome.died = f"lost its CUDA context while running {outcome.kernel}: {report['why']}"
        if at in ("lost", "done"):
            self._done = True

    def _how_it_ended(self) -> str:
        until = time.monotonic() + self._timeout
        while (code := self._process.poll()) is None:
            if self._stop.wait(_LOOK_S) or time.monotonic() > until:
                return "stopped talking"
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def _last_words(self) -> str:
        self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(self._printed.tell() - 4000, 0))
        lines = [line.strip() for line in self._printed.read().decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1][:200]}" if lines else ""
