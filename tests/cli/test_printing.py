"""Tables and the line that shows how far something is."""

from __future__ import annotations

import io
import sys

import pytest
from layerzero import printing
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


class Terminal(io.StringIO):
    """What a terminal shows: a line is overwritten until it ends."""

    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with printing.Progress(None, "calls", of="gpt2") as progress:
        progress.say("importing")
        progress.show(1, 4, left_s=62.1, current="rms_norm")
    bar = "█" * 6 + "░" * 18
    assert screen.getvalue().split("\r\x1b[2K") == [
        "",
        "importing",
        f"{bar} gpt2: 1/4 calls, 1:03 left  rms_norm",
        "",
    ]


def test_progress_is_a_few_lines_elsewhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(printing.time, "monotonic", lambda: next(clock) * 0.7)
    with printing.Progress(True, "calls") as progress:
        for done in range(101):
            progress.show(done, 100)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "0/100 calls" and 3 <= len(said) <= 5, said
    with printing.Progress(None, "calls") as progress:
        progress.say("not a terminal, and nobody asked")
        progress.show(1, 2)
    assert capsys.readouterr().err == ""
