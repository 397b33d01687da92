"""The lockfile of hub kernels: which files each consists of, with their SHA-256.

JSON: ``{"schema_version": 1, "kernels": {"owner/name@commit": {"<variant>": {"<file>": "<sha256>"}}}}``. ``layerzero hub``
writes it from what is in the local cache; afterwards a kernel whose files are others is refused.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from layerzero import _native, loading

SETTING = "backends.hub_lockfile"
SCHEMA_VERSION = 1
Kernels = dict[str, dict[str, dict[str, str]]]


def path() -> Path:
    """Where it is."""
    return loading.path_setting(SETTING)


def hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of a variant, by its path inside. Bytecode is left out: Python writes it."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(folder).as_posix(): _digest(file) for file in files}


def check(repository: str, commit: str, folder: Path) -> None:
    """Raises `RuntimeError` unless the files of a variant are those of the lockfile."""
    name, file = f"{repository}@{commit}", path()
    locked = read(file).get(name, {}).get(folder.name)
    if locked is None:
        raise RuntimeError(f"{name}, {folder.name}, is not in {file}; look at its files and run 'layerzero hub'")
    found = hashes(folder)
    for part in sorted({*locked, *found}):
        if locked.get(part) != found.get(part):
            is_now, was = found.get(part, "not there"), locked.get(part, "not there")
            raise RuntimeError(f"{name}: {part} has SHA-256 {is_now}, the lockfile {file} says {was}")


def read(file: Path) -> Kernels:
    """What is locked; nothing where there is no file. Raises `RuntimeError` for a file that is not a lockfile."""
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise RuntimeError(f"the lockfile {file} cannot be read: {error}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise RuntimeError(f"the lockfile {file} has schema_version {version!r}, not {SCHEMA_VERSION}")
    kernels = data.get("kernels")
    if not _is_kernels(kernels):
        raise RuntimeError(f"the lockfile {file} has no kernels with their files; run 'layerzero hub'")
    return dict(kernels)


def write(file: Path, kernels: Kernels) -> None:
    """Writes it, so that others see the file before or after it, and never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema_version": SCHEMA_VERSION, "kernels": kernels}
    _native.write_file(file, json.dumps(document, indent=1, sort_keys=True) + "\n")


def _is_kernels(kernels: Any) -> bool:
    def texts(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())

    def variants(value: Any) -> bool:
        return isinstance(value, dict) and all(texts(one) for one in value.values())

    return isinstance(kernels, dict) and all(variants(one) for one in kernels.values())


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
