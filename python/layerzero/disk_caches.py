"""Where compilers keep what they made, so that the next process need not make it again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from getpass import getuser
from pathlib import Path

#: How deep below a cache's folder a compiler makes folders of its own.
_DEPTH = 4


def _folder(variable: str, usual: Path) -> Path:
    return Path(os.environ.get(variable) or usual)


def _triton() -> Path:
    return _folder("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")


def _flashinfer() -> Path:
    return _folder("FLASHINFER_WORKSPACE_BASE", Path.home()) / ".cache" / "flashinfer"


def _cute_dsl() -> Path | None:
    """FlashAttention 4 keeps what it compiled only when told to."""
    if os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0") != "1":
        return None
    usual = Path(tempfile.gettempdir()) / _user() / "flash_attention_cute_dsl_cache"
    return _folder("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", usual)


def _quack() -> Path | None:
    """quack keeps it unless told not to."""
    if os.environ.get("QUACK_CACHE_ENABLED", "1") != "1":
        return None
    return _folder("QUACK_CACHE_DIR", Path(tempfile.gettempdir()) / _user() / "quack_cache")


def _inductor() -> Path:
    user = os.environ.get("USER") or str(os.getuid())
    return _folder("TORCHINDUCTOR_CACHE_DIR", Path(tempfile.gettempdir()) / f"torchinductor_{user}")


def _driver() -> Path:
    return _folder("CUDA_CACHE_PATH", Path.home() / ".nv" / "ComputeCache")


#: Where the compiler of a backend keeps what it made. Backends that are not here are not known to keep anything: cuDNN's
#: plans and Habana's graphs are in the memory of a process.
_OF_BACKENDS: dict[str, Callable[[], Path | None]] = {
    **dict.fromkeys(("triton", "liger", "flash_attn_triton"), _triton),
    **dict.fromkeys(("flashinfer", "flashinfer_prefill"), _flashinfer),
    **dict.fromkeys(("flash_attn_4", "flash_attn_4_tiles", "flash_attn_4_pages"), _cute_dsl),
    "quack": _quack,
}


def of_backend(backend: str) -> Path | None:
    """The folder where what is compiled for a backend is kept; ``None`` where that is not known, or not at all."""
    find = _OF_BACKENDS.get(backend)
    return find() if find else None


def folders() -> list[Path]:
    """The folders of the compilers LayerZero's kernels come with, as far as they are there."""
    finders = dict.fromkeys((_triton, _inductor, _driver, _flashinfer, _cute_dsl, _quack))
    found = (find() for find in finders)
    return [folder for folder in found if folder is not None and folder.is_dir()]


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
        # Somebody cleans up; what is gone counts as nothing.
        return 0, 0
    count = 1
    for path in below:
        more, last = _state(Path(path), depth - 1)
        count, changed = count + more, max(changed, last)
    return count, changed
