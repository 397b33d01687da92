"""The process LayerZero lives in: how it ends, and what its forks find.

A program ends as it says: with its own exit status, and nothing printed. A thread that runs while the interpreter shuts
down would break that, so all of ours are stopped before, at exit. A child that was forked has none of its parent's
threads, so no lock may be held by one of them.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

from layerzero import _native

Lock = TypeVar("Lock")
Function = TypeVar("Function", bound=Callable[..., Any])

#: How long a fork waits for a lock, in seconds.
_PATIENCE = 60.0

#: Locks that a child has to find open.
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
#: Locks that are taken around a fork, and those of them that are taken now.
_around: list[Any] = []
_taken: list[Any] = []


def open_in_forks(lock: Lock) -> Lock:
    """A lock (or a condition) that is open in a child, whichever thread of the parent held it.

    Only for locks that guard something a child can go on with as it is: what is half done stays half done.
    """
    _locks.add(lock)
    return lock


def waited_for(function: Function) -> Function:
    """A function that the end of the program waits for, on whichever thread it runs."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _native.busy(function, args, kwargs)

    return cast(Function, run)


def start_thread(work: Callable[[], object], name: str) -> threading.Thread | None:
    """Starts a daemon thread; ``None`` when the interpreter is shutting down and starts no more."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def taken_around_forks(lock: Lock) -> Lock:
    """A lock that a fork waits for, because what it guards must not be half done in the child."""
    _around.append(lock)
    return lock


def _before_fork() -> None:
    _taken.extend(lock for lock in _around if lock.acquire(timeout=_PATIENCE))
    _native.before_fork()


def _forked_here() -> None:
    _native.after_fork()
    while _taken:
        _taken.pop().release()


def _forked() -> None:
    for lock in (*_locks, *(lock for lock in _around if lock not in _taken)):
        lock._at_fork_reinit()
    while _taken:
        _taken.pop().release()
    _native.after_fork_in_child()


def _end() -> None:
    for name in ("layerzero.auto_tuning", "layerzero.warm_up", "layerzero.device_times"):
        if (module := sys.modules.get(name)) is not None:
            module.stop()
    _native.end()


def end_first() -> None:
    """Has LayerZero end before whatever registered its own end so far: threads may be using it until then.

    torch takes its operators back at exit, so this is called again once torch is imported.
    """
    atexit.unregister(_end)
    atexit.register(_end)


def install() -> None:
    """Registers all this, once."""
    end_first()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork, after_in_parent=_forked_here, after_in_child=_forked)
