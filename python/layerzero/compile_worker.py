"""The process that compiles kernels for another one: it reads what to compile, one line of JSON each, and answers likewise.

It is started by :mod:`layerzero.compile_child` and is over as soon as the process that started it is: a guard, forked
before anything heavy is imported, waits for the pipe to close and then kills the whole group, compilers included.

A request has an ``id``, a ``kernel``, and either

- ``ahead``: a module and what its function ``compile`` is called with. Nothing is run, and no device is touched; or
- ``call`` and ``device``: the kernel is run once on inputs made up for the call.

An answer has the ``id`` and ``ms``, or an ``error``. The first answer is ``ready``.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

#: Of `prctl`: the signal a process gets when the one that started it ends.
_PR_SET_PDEATHSIG = 1


def main(requests: int, answers: int) -> None:
    """Compiles until the requests end. Both are file descriptors."""
    end_with_the_program(requests, answers)
    try:
        import torch  # noqa: F401

        import layerzero  # noqa: F401
    except BaseException as error:  # noqa: BLE001
        _say(answers, {"error": _one_line(error)})
        return
    _say(answers, {"ready": True})
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            _say(answers, _answer(json.loads(line)))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    begun = time.perf_counter()
    try:
        if "ahead" in request:
            module, needed = request["ahead"]
            import_module(module).compile(needed)
        else:
            from layerzero import _native, kernel_runs, loading

            loading.load()
            kernel_runs.once(request["kernel"], request["call"], _native.device_number(request["device"]))
    except BaseException as error:  # noqa: BLE001
        # Whatever a compiler raises is said, and the next kernel has nothing to do with it.
        return {"id": request["id"], "error": _one_line(error)}
    return {"id": request["id"], "ms": (time.perf_counter() - begun) * 1e3}


def side_by_side(tasks: Sequence[Callable[[], object]]) -> None:
    """Does several things that leave their results on disk, each in a fork of this process, as many at a time as there are
    processors. Raises what one of them raised, or that one was killed."""
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if len(tasks) < 2 or most < 2:
        for task in tasks:
            task()
        return
    waiting, running = list(reversed(tasks)), dict[int, Callable[[], object]]()
    failed: list[tuple[int, Callable[[], object]]] = []
    while waiting or running:
        while waiting and len(running) < most:
            task = waiting.pop()
            running[_forked(task)] = task
        pid, status = os.wait()
        if pid in running and status != 0:
            failed.append((os.waitstatus_to_exitcode(status), running[pid]))
        running.pop(pid, None)
    for code, task in failed:
        if code < 0:
            raise RuntimeError(f"a fork that compiled was killed by {signal.Signals(-code).name}")
        # What it raised is raised here.
        task()


def _forked(task: Callable[[], object]) -> int:
    if (pid := os.fork()) != 0:
        return pid
    code = 1
    try:
        task()
        code = 0
    finally:
        # Nothing of this process's end is to run in a fork.
        os._exit(code)


def _one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _say(answers: int, answer: dict[str, Any]) -> None:
    os.write(answers, json.dumps(answer).encode() + b"\n")


def end_with_the_program(requests: int, answers: int) -> None:
    """Has this process, and every compiler it starts, end when the one that sends requests does, whatever it does then.

    A guard, forked here, kills the group once nobody can send requests. A fork of the program may hold the pipe open: so
    the system is asked to end this process with the one that started it, and to tell the guard.
    """
    if os.fork() != 0:
        _signal_at_the_end_of_the_parent(signal.SIGKILL)
        return
    # Nothing of this process's end is to run here, and who waits for an answer must not wait for the guard.
    try:
        os.close(answers)
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
        _signal_at_the_end_of_the_parent(signal.SIGTERM)
        end = select.poll()
        end.register(requests, 0)
        end.poll()
    finally:
        os.killpg(0, signal.SIGKILL)


def _signal_at_the_end_of_the_parent(number: int) -> None:
    """Has the system send this process a signal when the one that started it ends, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
