"""A program that has imported torch and forks for each piece of code it is asked to run (`processes.forked`).

Importing torch takes two seconds of a CPU, which is most of what a test in a process of its own costs. Each line of the
standard input is a request in JSON. Two lines answer it: the id of the fork, then its exit status.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

# For all forks.
importlib.import_module("torch")


def become(request: dict[str, Any]) -> None:
    """Makes the fork look like `python -c` that was started with this environment in this folder."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[:] = ["-c"]
    own = {os.path.dirname(os.path.abspath(__file__)), *os.environ["PYTHONPATH"].split(os.pathsep)}
    sys.path[:] = ["", *os.environ["PYTHONPATH"].split(os.pathsep), *(entry for entry in sys.path if entry not in own)]
    importlib.invalidate_caches()


def wait_for_code() -> str:
    """Serves requests for as long as there are any. Returns in a fork, with the code it is to run."""
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        if (child := os.fork()) == 0:
            become(request)
            return str(request["code"])
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return ""


if __name__ == "__main__":
    exec(compile(wait_for_code(), "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
