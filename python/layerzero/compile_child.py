"""Compiling in a process of its own, so that neither the interpreter's lock nor the end of the program waits for a compiler.

What it compiles is in the caches on disk that both processes share; the process that asked loads it from there. The child
(:mod:`layerzero.compile_worker`) imports nothing of the program. It has no part in its input and output, ends when the
program does, and is killed, not waited for, when that ends first.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import IO, Any

#: Set in the environment of a child: it starts none itself.
MARK = "_LAYERZERO_COMPILE_WORKER"
#: How long the interpreter and torch may take to start, in seconds.
STARTING_S = 120.0
#: How long a kernel may take to compile. FlashInfer's take nvcc minutes.
COMPILING_S = 900.0
_INTERPRETER = re.compile(r"(python|pypy)[\w.-]*$", re.IGNORECASE)
# How often a child that says nothing is looked after.
_LOOK_S = 0.5
_CODE = "import sys; sys.path[:] = {path!r}; from layerzero.compile_worker import main; main({requests}, {answers})"


class ChildError(Exception):
    """A kernel could not be compiled in a child."""


class NotCompiledError(ChildError):
    """The child is well, and could not compile it."""


class UnavailableError(ChildError):
    """There is no child to compile it."""


@dataclass(frozen=True)
class Status:
    """How kernels are compiled in the background."""

    by: str
    """``child``, ``thread`` where no child can be started, or ``nobody`` when nothing was compiled so far."""
    why: str | None = None
    """Why no child can be started."""
    pid: int | None = None
    """The child's process, while there is one."""
    compiled: int = 0
    """Kernels that children compiled."""
    lost: int = 0
    """Children that crashed, or did not answer in time."""
    last_loss: str | None = None
    """What became of the last of those."""

    def __str__(self) -> str:
        who = {"child": "a process of its own", "thread": "a thread of this process", "nobody": "nobody so far"}[
            self.by
        ]
        lost = f"; {self.lost} lost, the last one: {self.last_loss}" if self.lost else ""
        return f"compiled in the background by {who}{f', since {self.why}' if self.why else ''}{lost}"


class CompileChild:
    """A child that is started when it is first needed, and again when it was lost. One thread uses it; any may end it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._answers = -1
        self._printed: IO[bytes] | None = None
        self._rest = b""
        self._ready = self._ended = False
        self._why: str | None = None
        self._number = self._compiled = self._lost = 0
        self._last_loss: str | None = None

    def status(self) -> Status:
        """How it is doing."""
        process = self._process
        by = "thread" if self._why else "child" if process or self._compiled or self._lost else "nobody"
        pid = process.pid if process else None
        return Status(by, self._why, pid, self._compiled, self._lost, self._last_loss)

    def start(self) -> bool:
        """Starts the child, unless there is one, and does not wait for it. Whether there is one now."""
        with self._lock:
            if self._ended or self._why is not None:
                return False
            if self._process is None:
                try:
                    self._start()
                except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
                    self._why = f"no other can be started: {error}"
            return self._process is not None

    def _start(self) -> None:
        """Raises where it cannot: the reason follows "since"."""
        if os.environ.get(MARK):
            raise RuntimeError("this process is itself one that compiles for another")
        if not (hasattr(os, "fork") and hasattr(select, "poll")):
            raise RuntimeError(f"not on {sys.platform}")
        if getattr(sys, "frozen", False) or not _INTERPRETER.match(os.path.basename(sys.executable or "")):
            # It may be the program itself, which would start a second time.
            raise RuntimeError(f"sys.executable is {sys.executable!r}, which is no Python interpreter")
        theirs, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._printed, self._rest, self._ready = tempfile.TemporaryFile("a+b"), b"", False  # noqa: SIM115
        path = [entry or os.getcwd() for entry in sys.path]
        code = _CODE.format(path=path, requests=theirs, answers=answers)
        try:
            # A group of its own: compilers it starts end with it, and an interrupt at the terminal is not for it.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                pass_fds=[theirs, answers],
                start_new_session=True,
                env=os.environ | {MARK: "1"},
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(theirs)
            os.close(answers)

    def compile(self, kernel: str, **request: Any) -> float:
        """Has a kernel compiled, and gives the milliseconds that took. Raises :class:`UnavailableError` where there is no
        child, :class:`NotCompiledError` where it tried, and :class:`ChildError` where it was lost over it."""
        if not self.start():
            raise UnavailableError(self._why or "the program is ending")
        self._number += 1
        try:
            if not self._ready:
                self._await_ready()
            line = json.dumps({"id": self._number, "kernel": kernel, **request}).encode() + b"\n"
            while line:
                line = line[os.write(self._requests, line) :]
            answer = self._read(COMPILING_S, f"compiling {kernel}")
        except BrokenPipeError:
            raise self._gone(f"ended before it compiled {kernel}") from None
        if answer.get("id") != self._number:
            raise self._gone(f"answered {str(answer)[:80]} to a request for {kernel}")
        if "ms" not in answer:
            raise NotCompiledError(str(answer.get("error")))
        self._compiled += 1
        return float(answer["ms"])

    def _await_ready(self) -> None:
        """Waits for the child to have started. One that cannot is not tried again."""
        try:
            answer = self._read(STARTING_S, "starting")
        except ChildError as error:
            self._why = None if self._ended else str(error)
            raise UnavailableError(str(error)) from None
        if not answer.get("ready"):
            self._why = f"the process that compiles could not start: {answer.get('error')}"
            self._forget()
            raise UnavailableError(self._why)
        self._ready = True

    def _read(self, seconds: float, doing: str) -> dict[str, Any]:
        """The child's next answer."""
        until = time.monotonic() + seconds
        while b"\n" not in self._rest:
            if not select.select([self._answers], [], [], _LOOK_S)[0]:
                if time.monotonic() > until:
                    raise self._gone(f"was not done with {doing} after {seconds:g} s")
                continue
            data = os.read(self._answers, 65536)
            if not data:
                raise self._gone(f"{self._how_it_ended()} while {doing}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._gone(f"answered {line[:80]!r} while {doing}")
        return answer

    def _how_it_ended(self) -> str:
        process = self._process
        try:
            code = process.wait(_LOOK_S) if process else None
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def _gone(self, how: str) -> ChildError:
        """The child is of no use any more: ends it, and keeps what became of it."""
        what = f"the process that compiles {how}{self._last_words()}"
        if not self._ended:
            self._lost += 1
            self._last_loss = what
        self._forget()
        return ChildError(what)

    def _last_words(self) -> str:
        if self._printed is None:
            return ""
        self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(self._printed.tell() - 4000, 0))
        lines = [line.strip() for line in self._printed.read().decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1][:200]}" if lines else ""

    def _forget(self) -> None:
        with self._lock:
            self._kill()
            if self._process is not None:
                self._process.wait()
            self._process = None
            self._close()

    def _close(self) -> None:
        for descriptor in (self._requests, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._requests = self._answers = -1
        if self._printed is not None:
            self._printed.close()
            self._printed = None

    def _kill(self) -> None:
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                return

    def end(self) -> None:
        """Kills the child, and has none started any more: the program is ending. Whoever waits for it sees it end."""
        with self._lock:
            self._ended = True
            self._kill()

    def forked(self) -> None:
        """In a process that was forked: the child is the parent's, and must be able to see that one end."""
        process, self._process = self._process, None
        if process is not None:
            # Nobody here may wait for it, nor be warned that nobody did.
            process.returncode = 0
        self._close()
