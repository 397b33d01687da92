"""Where compilers keep what they made, so that the next process need not make it again."""

from __future__ import annotations

import os
import tempfile
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
    return [folder for folder in found if folder.is_dir()]


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
