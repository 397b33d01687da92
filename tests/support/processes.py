"""Python in a process of its own: what a first import does, or a library that is missing, can only be seen there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "python"
#: Where this module and the others that tests import are.
SUPPORT = Path(__file__).parent


def python(*arguments: str | Path, path: Sequence[Path] = (), timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs the interpreter with the package, and `path`, to import from, for so many seconds at most."""
    command = [sys.executable, *map(str, arguments)]
    # Circuits that an earlier process left open are none of its business, unless a test says where they are kept.
    with tempfile.TemporaryDirectory() as state:
        environment = {
            "XDG_STATE_HOME": state,
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (PACKAGE, *path))),
            # A child that was forked must not wait for threads it does not have.
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def answer(code: str, *options: str, path: Sequence[Path] = ()) -> Any:
    """What the code gives to `answer(...)`, which it may call once. Anything else it prints is shown when it fails."""
    tell = "import json\ndef answer(value): print('\\nANSWER' + json.dumps(value))\n"
    done = python(*options, "-c", tell + textwrap.dedent(code), path=path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    told = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert len(told) == 1, f"{done.stdout}\n{done.stderr}"
    return json.loads(told[0].removeprefix("ANSWER"))
