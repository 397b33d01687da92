"""The files of a backend that comes along: where they are, and what they say. A backend is one folder, with

- ``capabilities.json``: what its kernels can do; the native side reads it;
- ``library.json``: what it is installed as, what it serves, where it was run, where its compiler keeps what it made;
- ``adapter.py``: how its kernels are called.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

#: The folder of all backends. Those that were never run on the hardware they are for are in its folder ``contrib``.
FOLDER = Path(__file__).parent / "backends"


def names() -> tuple[str, ...]:
    """All backends, in the order in which they are looked at."""
    from layerzero.backends import BACKENDS, UNPROVEN

    return (*BACKENDS, *UNPROVEN)


def package(backend: str) -> str:
    """The package of a backend: ``layerzero.backends.flash_attn``, ``layerzero.backends.contrib.aiter``."""
    from layerzero.backends import UNPROVEN

    return f"layerzero.backends.{'contrib.' if backend in UNPROVEN else ''}{backend}"


def folder(backend: str) -> Path:
    """Where the files of a backend are."""
    return FOLDER.joinpath(*package(backend).split(".")[2:])


def document(backend: str) -> dict[str, Any]:
    """Its capabilities. They are shared: nobody changes them."""
    file = folder(backend) / "capabilities.json"
    return _read(file, file.stat().st_mtime_ns)


def text(backend: str) -> str:
    """Its capabilities as JSON, without white space between."""
    file = folder(backend) / "capabilities.json"
    return _text(file, file.stat().st_mtime_ns)


def description(backend: str) -> dict[str, Any]:
    """Its ``library.json``; empty where there is none. It is shared, too."""
    file = folder(backend) / "library.json"
    return _read(file, file.stat().st_mtime_ns) if file.is_file() else {}


@lru_cache(maxsize=128)
def _read(file: Path, changed: int) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return data


@lru_cache(maxsize=128)
def _text(file: Path, changed: int) -> str:
    return json.dumps(_read(file, changed), separators=(",", ":"))


def library(backend: str) -> str:
    """What is imported for a backend."""
    return str(document(backend).get("import_name", backend))


def described(library: str) -> dict[str, Any]:
    """The ``library.json`` of the first backend that imports a library, or the package the library is in; empty where no
    backend does."""
    by_import = _by_import()
    return by_import.get(library) or by_import.get(library.partition(".")[0], {})


@cache
def _by_import() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for backend in names():
        found.setdefault(library(backend), description(backend))
    return found
