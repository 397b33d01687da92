"""The compatibility matrix: what was found, the versions it was found with, and the file it is kept in."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from layerzero import _native, backend_files

#: The form of the file. One of another form is ignored, and written anew by the next probe.
SCHEMA_VERSION = 1
#: How many results of a backend are kept: of this installation and of others that share the file.
KEPT = 8

# Incompatible entries by backend, once the file was read.
_known: dict[str, list[dict[str, Any]]] | None = None


def path() -> Path:
    """Where the matrix is kept: ``layerzero/compat_matrix.json`` in the user's cache directory."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches, "layerzero", "compat_matrix.json")


def problem(backend: str) -> str | None:
    """Why a backend must not be imported, where it was found to be incompatible in exactly these versions.

    Costs one look for the file where there is none. Versions are read without importing anything.
    """
    global _known
    if _known is None:
        _known = {}
        for entry in read(path())["entries"]:
            if entry["status"] == "incompatible":
                _known.setdefault(entry["backend"], []).append(entry)
    for entry in _known.get(backend, ()):
        beside = entry.get("beside")
        if entry["versions"] != versions(backend):
            continue
        if beside is None or beside.get("versions") == versions(beside["backend"]):
            return f"{entry['reason']} (found by 'layerzero compat' on {entry['made'][:10]})"
    return None


def forget() -> None:
    """Has the file read again when it is next asked for."""
    global _known
    _known = None


def versions(backend: str) -> dict[str, str | None]:
    """All a result depends on; where one of them changes, it is no longer known."""
    import platform

    from layerzero import _native
    from layerzero.compat import builds

    imported, torch = backend_files.library(backend), builds.torch_build()
    found = builds.distribution(imported)
    of_torch = imported == "torch"
    return {
        "layerzero": _native.__version__,
        "adapter": _digest(_sources(backend)),
        "python": platform.python_version(),
        "torch": torch.torch,
        "cuda": torch.cuda,
        "driver": _driver(),
        "gpus": _gpus(),
        "library": torch.torch if of_torch else found.version if found else None,
        # The same version may be built anew, for another torch.
        "files": None if of_torch or found is None else _digest([(found.read_text("RECORD") or "").encode()]),
    }


def _sources(backend: str) -> Iterable[bytes]:
    folders = (backend_files.FOLDER / "_shared", backend_files.folder(backend))
    files = (file for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in (".py", ".json"))
    return (file.read_bytes() for file in files)


def _digest(parts: Iterable[bytes]) -> str:
    from hashlib import blake2b

    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _driver() -> str | None:
    """The version of NVIDIA's driver, as its module tells it."""
    import re

    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found and found[0]


def _gpus() -> str | None:
    """The models of NVIDIA's devices: homes are shared between machines."""
    models = set()
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        models |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return ", ".join(sorted(models)) or None


def empty() -> dict[str, Any]:
    """A matrix that knows nothing."""
    return {"schema_version": SCHEMA_VERSION, "entries": [], "pairs": []}


def read(file: Path) -> dict[str, Any]:
    """The matrix in a file. One that is damaged, or not a matrix, is passed over with a warning."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return empty()
    except (OSError, UnicodeDecodeError) as error:
        return _ignored(file, str(error))
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _ignored(file, f"it is not JSON: {error}")
    wrong = _wrong(data)
    return _ignored(file, wrong) if wrong else data


def _ignored(file: Path, why: str) -> dict[str, Any]:
    from layerzero.errors import warn

    warn(f"the compatibility matrix {file} is ignored: {why}; 'layerzero compat' writes it anew")
    return empty()


def _wrong(data: Any) -> str | None:
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        version = data.get("schema_version") if isinstance(data, dict) else None
        return f"its schema_version is {version!r}, not {SCHEMA_VERSION}"
    entries, pairs = data.get("entries"), data.get("pairs")
    if not isinstance(entries, list) or not isinstance(pairs, list) or not all(map(_is_entry, entries)):
        return "its entries are not those of a matrix"
    return None


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("versions"), dict):
        return False
    beside = entry.get("beside")
    texts = (entry.get(name) for name in ("backend", "status", "made"))
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(entry.get("reason"), str | None)
        and (beside is None or isinstance(beside, dict) and isinstance(beside.get("backend"), str))
    )


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What is known after a probe: its results instead of those for the same versions, and what is known of others."""
    entries = list(new["entries"])
    made = [(entry["backend"], entry["versions"]) for entry in entries]
    kept = dict.fromkeys((backend for backend, _ in made), 1)
    for entry in sorted(old["entries"], key=lambda entry: str(entry["made"]), reverse=True):
        backend = entry["backend"]
        if (backend, entry["versions"]) not in made and kept.get(backend, 0) < KEPT:
            kept[backend] = kept.get(backend, 0) + 1
            entries.append(entry)
    # Pairs are of the last probe: what counts when backends are loaded is said in their entries.
    return {"schema_version": SCHEMA_VERSION, "entries": entries, "pairs": list(new["pairs"])}


def write(file: Path, matrix: Mapping[str, Any]) -> None:
    """Writes a matrix, so that others see the file before or after it, and never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    _native.write_file(file, json.dumps(matrix, indent=1) + "\n")
