"""Writes the table of what was run on which hardware into the documentation, from the `library.json` of each backend."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ROOT / "python" / "layerzero" / "backends"
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- hardware: written by scripts/hardware.py -->", "<!-- hardware: end -->"
NEVER = "**not run on hardware**"


def described() -> dict[str, dict[str, Any]]:
    """What each backend says of itself, in the order in which they are loaded."""
    lists = runpy.run_path(str(BACKENDS / "__init__.py"))
    files = [BACKENDS / name / "library.json" for name in lists["BACKENDS"]]
    files += [BACKENDS / "contrib" / name / "library.json" for name in lists["UNPROVEN"]]
    return {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in files}


def table(backends: dict[str, dict[str, Any]]) -> str:
    """The table, one backend to a row; what was never run last."""
    rows = ["| backend | serves | run on | with |", "|---|---|---|---|"]
    for name, entry in sorted(backends.items(), key=lambda item: not item[1]["run"]):
        seen = entry["run"]
        hardware = "; ".join(one["on"] + (f": {one['what']}" if "what" in one else "") for one in seen) or NEVER
        versions = "; ".join(dict.fromkeys(one["with"] for one in seen)) or entry.get("why", "")
        rows.append(f"| `{name}` | {entry['serves']} | {hardware} | {versions} |")
    return "\n".join(rows)


def text() -> str:
    """The page with the table in its place."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = table(described())
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        if text() != PAGE.read_text(encoding="utf-8"):
            sys.exit(f"{PAGE} is not what the library.json of the backends say: run scripts/hardware.py")
    else:
        PAGE.write_text(text(), encoding="utf-8")
