"""Writes the table of what was run on which hardware into the documentation, from `backends/hardware.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "python" / "layerzero" / "backends" / "hardware.json"
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- hardware: written by scripts/hardware.py -->", "<!-- hardware: end -->"
NEVER = "**not run on hardware**"


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
    made = table(json.loads(DATA.read_text(encoding="utf-8")))
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        if text() != PAGE.read_text(encoding="utf-8"):
            sys.exit(f"{PAGE} is not what {DATA.name} says: run scripts/hardware.py")
    else:
        PAGE.write_text(text(), encoding="utf-8")
