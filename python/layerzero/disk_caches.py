"""Where compilers keep what they made, so that the next process need not make it again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from getpass import getuser
from pathlib import Path
from typing import Any

from layerzero.backend_files import description, names

#: How deep below a cache's folder a compiler makes folders of its own.
_DEPTH = 4


#: Compilers that are not those of one backend: torch's own, and the driver's.
_COMMON = (
    {"variable": "TORCHINDUCTOR_CACHE_DIR", "folder": "{temporary}/torchinductor_{account}"},
    {"variable": "CUDA_CACHE_PATH", "folder": "~/.nv/ComputeCache"},
)


def of_backend(backend: str) -> Path | None:
    """The folder where what is compiled for a backend is kept; ``None`` where that is not known, or not at all: cuDNN's
    plans and Habana's graphs are in the memory of a process."""
    cache = description(backend).get("cache") if backend in names() else None
    if isinstance(cache, str):
        # What it is compiled with has a backend of its own.
        return of_backend(cache)
    return _place(cache) if cache else None


def folders() -> list[Path]:
    """The folders of the compilers LayerZero's kernels come with, as far as they are there."""
    found = (*(of_backend(backend) for backend in names()), *(_place(cache) for cache in _COMMON))
    return list(dict.fromkeys(folder for folder in found if folder is not None and folder.is_dir()))


def _place(cache: Mapping[str, Any]) -> Path | None:
    """The folder of a cache as a ``library.json`` describes it: where its ``variable`` says, else in ``folder``; ``below``
    is part of both. With a ``switch``, nothing is kept unless that variable is 1; ``on`` says what it is where it is not
    set."""
    if (switch := cache.get("switch")) and os.environ.get(switch, "1" if cache["on"] else "0") != "1":
        return None
    usual = os.path.expanduser(cache["folder"]).format(
        temporary=tempfile.gettempdir(), user=_user(), account=_account()
    )
    return Path(os.environ.get(cache["variable"]) or usual) / str(cache.get("below", ""))


def _account() -> str:
    return os.environ.get("USER") or str(os.getuid())


def _user() -> str:
    """The name these libraries put into the path of their caches."""
    try:
        return getuser()
    except (KeyError, OSError, ImportError):
        # There is no name for the user's number, and so no such folder.
        return str(os.getuid())


def states() -> dict[str, tuple[int, int]]:
    """Of each of them, how many folders are in it and when one of those last changed: it differs once there is more."""
    return {str(folder): _state(folder, _DEPTH) for folder in folders()}


def changed_since(before: dict[str, tuple[int, int]]) -> list[str]:
    """The folders that have more in them than :func:`states` said before."""
    return [folder for folder, state in states().items() if state != before.get(folder)]


def holding(backend: str, before: dict[str, tuple[int, int]]) -> list[str]:
    """The folders that hold what was compiled for a backend: its own, also where another process or another kind of call had
    it compiled already; where that is not known, those that have more in them than before."""
    own = of_backend(backend)
    return [str(own)] if own is not None and own.is_dir() else changed_since(before)


def _state(folder: Path, depth: int) -> tuple[int, int]:
    # A new file changes the time of the folder it is in.
    try:
        changed = folder.stat().st_mtime_ns
        below = [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)] if depth else []
    except OSError:
        # Somebody cleans up; a file that was deleted counts as nothing.
        return 0, 0
    count = 1
    for path in below:
        more, last = _state(Path(path), depth - 1)
        count, changed = count + more, max(changed, last)
    return count, changed
