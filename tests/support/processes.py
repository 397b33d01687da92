"""Python in a process of its own: what a first import does, or a library that is missing, can only be seen there."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "python"
#: Where this module and the others that tests import are.
SUPPORT = Path(__file__).parent


def _environment(state: str, path: Sequence[Path]) -> dict[str, str]:
    return {
        # Circuits that an earlier process left open are none of its business, unless a test says where they are kept.
        "XDG_STATE_HOME": state,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (PACKAGE, *path))),
        # A child that was forked must not wait for threads it does not have.
        "OMP_NUM_THREADS": "1",
    }


def python(*arguments: str | Path, path: Sequence[Path] = (), timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs the interpreter with the package, and `path`, to import from, for so many seconds at most."""
    command = [sys.executable, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as state:
        environment = _environment(state, path)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


TELL = "import json\ndef answer(value): print('\\nANSWER' + json.dumps(value))\n"


def answer(code: str, *options: str, path: Sequence[Path] = ()) -> Any:
    """What the code gives to `answer(...)`, which it may call once. Anything else it prints is shown when it fails."""
    return _answer(python(*options, "-c", TELL + textwrap.dedent(code), path=path))


def _answer(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    told = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert len(told) == 1, f"{done.stdout}\n{done.stderr}"
    return json.loads(told[0].removeprefix("ANSWER"))


#: Settings that torch or Python read when they start: a fork of a process that has started would not see them.
READ_AT_START = (
    "ATEN_",
    "CUDA_",
    "DNNL_",
    "KMP_",
    "LD_",
    "MKL_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TORCH_",
)


def _at_start() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_AT_START)}


class _ForkServer:
    """`fork_server.py`, started at the first use; it ends when this process does."""

    def __init__(self) -> None:
        self.at_start = _at_start()
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(SUPPORT / "fork_server.py")]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        atexit.register(self.end)

    def end(self) -> None:
        """Lets the server end."""
        self.process.communicate()

    def run(self, code: str, path: Sequence[Path], timeout: float) -> subprocess.CompletedProcess[str]:
        """Runs code in a fork."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with tempfile.TemporaryDirectory() as state, tempfile.TemporaryDirectory() as told:
            files = {name: f"{told}/{name}" for name in ("stdout", "stderr")}
            request = {"code": code, "environment": _environment(state, path), "folder": os.getcwd(), **files}
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            child = int(self.process.stdout.readline())
            watch = threading.Timer(timeout, os.kill, (child, signal.SIGKILL))
            watch.start()
            status = int(self.process.stdout.readline())
            watch.cancel()
            said = (Path(file).read_text(encoding="utf-8", errors="replace") for file in files.values())
            return subprocess.CompletedProcess(["-c", code], status, *said)


@cache
def _server() -> _ForkServer:
    return _ForkServer()


def forked(code: str, path: Sequence[Path] = (), timeout: float = 300) -> Any:
    """The same as `answer`, in a fork of a process that has imported torch and nothing of LayerZero: two seconds less."""
    code = TELL + textwrap.dedent(code)
    if _server().at_start != _at_start():
        return _answer(python("-c", code, path=path, timeout=timeout))
    return _answer(_server().run(code, path, timeout))
