"""Tables and the line that shows how far something is."""

from __future__ import annotations

import io
import sys

import pytest
from layerzero.printing import aligned, show_status


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    lines = aligned(("name", "count", "why"), [("a", "1", ""), ("longer", "100", "two words")], ("count",))
    assert lines == ["name    count  why", "a           1", "longer    100  two words"]
    assert aligned(("name", "count"), []) == ["name  count"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_status_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", shown)
    show_status("half")
    show_status("")
    assert shown.getvalue() == ("\r\x1b[2Khalf\r\x1b[2K" if terminal else "")


def test_names_and_values_need_no_line_of_titles() -> None:
    assert aligned((), [("kernel", "torch.rms_norm"), ("op", "norm.rms")]) == [
        "kernel  torch.rms_norm",
        "op      norm.rms",
    ]
    assert aligned((), []) == []
