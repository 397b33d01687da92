"""Text for terminals: tables, a line that shows how far something is, and text that must not steer a terminal."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Self

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
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()


class Progress:
    """How far something is, on stderr: a bar that moves on a terminal, elsewhere a line for each quarter of it.

        with Progress(True, "forward passes traced", of="gpt2") as progress:
            progress.show(1, 4, left_s=3.0)  # gpt2: 1/4 forward passes traced, 0:03 left

    ``shown=None`` shows it on a terminal only.
    """

    def __init__(self, shown: bool | None, what: str, of: str = "") -> None:
        self._moves = sys.stderr is not None and sys.stderr.isatty()
        self.shown = self._moves if shown is None else shown
        self._what, self._of = what, f"{visible(of)}: " if of else ""
        self._quarter, self._said_at = -1, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            show_status("")

    def say(self, text: str) -> None:
        """What happens before anything can be counted."""
        if self.shown and self._moves:
            show_status(text)
        elif self.shown:
            print(text, file=sys.stderr, flush=True)

    def show(self, done: int, total: int, left_s: float | None = None, current: str = "") -> None:
        """That so many are done, how long the others will take, and which one is in work."""
        full, left = 24 * done // max(total, 1), max(int((left_s or 0.0) + 0.999), 0)
        line = f"{self._of}{done}/{total} {self._what}"
        if left_s is not None:
            line += f", {left // 60}:{left % 60:02} left"
        if self._moves:
            self.say(f"{'█' * full + '░' * (24 - full)} {line}  {current}".rstrip())
        # Not more than a line per second.
        elif full // 6 > self._quarter and (self._quarter < 0 or time.monotonic() - self._said_at >= 1.0):
            self.say(line)
            self._quarter, self._said_at = full // 6, time.monotonic()
