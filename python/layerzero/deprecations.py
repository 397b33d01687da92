"""Old names and forms that still work, and warn: ``DeprecationWarning``, once for each in a process."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: What was warned of in this process.
_warned: set[str] = set()


def warn_once(what: str, text: str, *, stacklevel: int = 3) -> None:
    """Warns of the use of an old form, the first time in this process."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(f"{text} (the old form is removed in the release after the next)", DeprecationWarning, stacklevel)


def renamed(old: str, new: Callable[P, T]) -> Callable[P, T]:
    """The function under its old name. It works as before, and warns."""
    name = new.__name__

    @functools.wraps(new)
    def alias(*args: P.args, **kwargs: P.kwargs) -> T:
        warn_once(old, f"lz.{old} is now lz.{name}")
        return new(*args, **kwargs)

    alias.__name__ = alias.__qualname__ = old
    alias.__doc__ = f"Deprecated: the old name of :func:`layerzero.{name}`."
    return alias
