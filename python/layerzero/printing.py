"""Text for terminals: tables, a line that shows how far something is, and text that must not steer a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

# Every control character but the tab and the new line, as the command line has it.
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    r"""The text with its control characters shown (``\x1b``), but for new lines and tabs."""
    return _HIDDEN.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def aligned(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = ()) -> list[str]:
    """The lines of a table. The columns named in ``right``, those of numbers, are aligned on the right. Without names of
    columns there is no line of them."""
    rows = [columns, *rows] if columns else list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    at_right = {columns.index(name) for name in right}
    lines = []
    for row in rows:
        cells = (c.rjust(w) if i in at_right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return lines


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[str] | None = None) -> None:
    """Prints a table, two spaces in. Fractions have two digits. All columns but the first are aligned on the right, or
    those named in ``right``."""
    cells = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    for line in aligned(columns, cells, columns[1:] if right is None else right):
        print(f"  {line}".rstrip())


def show_status(text: str) -> None:
    """Shows a line on the terminal instead of the last one; an empty one removes it. Does nothing without a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
