"""A process that finds nothing kept: no measurements, no settings of the user, nothing compiled before."""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: Where LayerZero and compilers keep what they made, in a folder of the run.
CACHES = {
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "XDG_STATE_HOME": "state",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "nv",
    "QUACK_CACHE_DIR": "quack",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "cute",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "LAYERZERO_PERFDB_PATH": "perfdb/perfdb.sqlite",
    "LAYERZERO_JIT_MANIFEST_PATH": "manifest/shape_manifest.json",
}


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process that keeps everything in ``folder``, and has no setting of the user's.

    Run it in ``folder`` as well: a ``layerzero.yaml`` in the current directory would be read.
    """
    for place in CACHES.values():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
    rest = {name: value for name, value in os.environ.items() if not name.startswith("LAYERZERO_")}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**rest, "PYTHONPATH": path, **{name: str(folder / place) for name, place in CACHES.items()}}
