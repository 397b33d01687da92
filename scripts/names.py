"""Writes the names of all kernels that come along, read from their capabilities documents. A configuration may name them
even where their library is not loaded.

With `--check` nothing is written; it ends with 1 when the file is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ROOT / "python" / "layerzero" / "backends"
FILE = ROOT / "crates" / "layerzero" / "data" / "names.json"


def names() -> list[dict[str, object]]:
    """One entry per kernel id: its aliases, its backend, its library."""
    found: dict[str, dict[str, object]] = {}
    files = [*BACKENDS.glob("*/capabilities.json"), *BACKENDS.glob("contrib/*/capabilities.json")]
    for path in sorted(files, key=lambda file: file.parent.name):
        document = json.loads(path.read_text(encoding="utf-8"))
        backend = document["backend"]
        for kernels in document["ops"].values():
            for kernel in kernels:
                entry: dict[str, object] = {"id": kernel["kernel_id"]}
                if aliases := kernel.get("aliases"):
                    entry["aliases"] = aliases
                found[kernel["kernel_id"]] = {**entry, "backend": backend, "library": document.get("library", backend)}
    return [found[kernel] for kernel in sorted(found)]


def text() -> str:
    """The file, one kernel to a line."""
    return "[\n" + ",\n".join(json.dumps(entry) for entry in names()) + "\n]\n"


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        FILE.write_text(text(), encoding="utf-8")
    elif text() != FILE.read_text(encoding="utf-8"):
        sys.exit(f"{FILE} is not what the capabilities documents say: run scripts/names.py")
