"""Where compilers keep what they made, so that the next process need not make it again."""

from __future__ import annotations

import os
import tempfile
from getpass import getuser
from pathlib import Path

#: How deep below a cache's folder a compiler makes folders of its own.
_DEPTH = 4


def folders() -> list[Path]:
    """The folders of the compilers LayerZero's kernels come with, as far as they are there."""
    home, environment = Path.home(), os.environ
    user = environment.get("USER") or str(os.getuid())
    usual = {
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()) / f"torchinductor_{user}",
        "CUDA_CACHE_PATH": home / ".nv" / "ComputeCache",
    }
    found = [Path(environment.get(variable) or folder) for variable, folder in usual.items()]
    found.append(Path(environment.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer")
    # FlashAttention 4 keeps what it compiled only when told to, quack unless told not to. cuDNN keeps its plans in memory.
    temporary = Path(tempfile.gettempdir()) / _user()
    if environment.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0") == "1":
        folder = environment.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
        found.append(Path(folder) if folder else temporary / "flash_attention_cute_dsl_cache")
    if environment.get("QUACK_CACHE_ENABLED", "1") == "1":
        folder = environment.get("QUACK_CACHE_DIR")
        found.append(Path(folder) if folder else temporary / "quack_cache")
    return [folder for folder in found if folder.is_dir()]


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
