"""`layerzero graph show`, and the page of a profile."""

from __future__ import annotations

import html.parser
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import graph_command, profile_page
from layerzero.graph_answers import TimedStep
from torch import nn


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """A model and its input."""
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(3, 6)


def alone() -> nn.Module:
    """A model without inputs."""
    return nn.Linear(4, 4)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A saved plan."""
    model, x = mlp()
    return lz.compile(model.eval(), x).save(tmp_path / "mlp.plan")


def show(*arguments: str) -> int:
    """The exit code of the command."""
    return graph_command.main(["show", *arguments])


def test_a_plan_is_shown(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(str(plan)) == 0
    text = capsys.readouterr().out
    assert text.startswith("graph ")
    assert text.count("linear(") == 2
    assert show(str(plan), "--dot") == 0
    assert capsys.readouterr().out.startswith("digraph")


def test_what_a_function_gives_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sys.modules["made_here"] = sys.modules[__name__]
    try:
        assert show("made_here:mlp", "--output", str(tmp_path / "graph.txt")) == 0
        assert capsys.readouterr().out == ""
        assert "linear(" in (tmp_path / "graph.txt").read_text()
        assert show("made_here:mlp", "--off", "linear") == 0
        assert "linear(" not in capsys.readouterr().out
        assert show("made_here:alone", "--input", "2x4") == 0
        assert "float32[2, 4]" in capsys.readouterr().out
        assert show("made_here:alone") == 2
        assert "says nothing of its inputs" in capsys.readouterr().err
        assert show("made_here:alone", "--input", "2x4:int64") == 1
        assert "BAD_GRAPH" in capsys.readouterr().err
    finally:
        del sys.modules["made_here"]


def test_a_configuration_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 3, "vocab_size": 32, "n_positions": 32}'
    )
    assert show(str(config), "--layers", "1", "--length", "5") == 0
    text = capsys.readouterr().out
    assert text.count("attention(") == 1
    assert "int64[1, 5]" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-model"], "unknown model"),
        (["no_such_module:name"], "cannot be imported"),
        (["math:no_such_name"], "cannot be imported"),
        (["math:sqrt", "--input", "2y"], "is not understood"),
        (["math:sqrt", "--input", "2:float99"], "is not understood"),
    ],
)
def test_what_cannot_be_found_is_an_error(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(*arguments) == 2
    assert said in capsys.readouterr().err


def raising() -> nn.Module:
    """A function that has no model."""
    raise RuntimeError("no weights here")


def test_what_a_users_code_raises_is_told_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sys.modules["made_here"] = sys.modules[__name__]
    (tmp_path / "broken_module.py").write_text("1 +")
    sys.path.insert(0, str(tmp_path))
    try:
        assert show("made_here:raising") == 2
        assert "gives no model: RuntimeError: no weights here" in capsys.readouterr().err
        assert show("broken_module:model") == 2
        assert "cannot be imported: SyntaxError" in capsys.readouterr().err
        assert show("torch:relu", "--input", "2", "--output", str(tmp_path / "absent" / "graph.txt")) == 2
        assert "graph.txt cannot be written: No such file" in capsys.readouterr().err
        assert show("torch:relu", "--input", "2") == 0
        assert "relu" in capsys.readouterr().out
    finally:
        del sys.modules["made_here"]
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("option", ["--length", "--layers"])
def test_counts_are_above_zero(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for count in ("0", "-3", "x"):
        with pytest.raises(SystemExit):
            show("gpt2", option, count)
        assert "is no number above 0" in capsys.readouterr().err


def test_a_damaged_plan_is_an_error(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.write_bytes(plan.read_bytes()[:-1])
    assert show(str(plan)) == 2
    assert "it was cut off" in capsys.readouterr().err


def test_drawing_needs_graphviz(
    plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert show(str(plan), "--svg") == 2
    said = capsys.readouterr().err
    assert "Graphviz is not installed" in said
    assert "--dot" in said
    # A program of that name draws.
    drawing = tmp_path / "dot"
    drawing.write_text("#!/bin/sh\ncat > /dev/null\necho '<svg/>'\n")
    drawing.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(drawing))
    assert show(str(plan), "--svg") == 0
    assert capsys.readouterr().out == "<svg/>\n"
    drawing.write_text("#!/bin/sh\ncat > /dev/null\necho 'out of paper' >&2\nexit 3\n")
    assert show(str(plan), "--svg") == 2
    assert "could not draw the graph: out of paper" in capsys.readouterr().err


class _Checked(html.parser.HTMLParser):
    """Opens and closes in order, and loads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe", "object", "form")
        assert not any(name in ("src", "href", "onload", "onclick") for name, _ in attrs)
        if tag != "meta" and tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(text: str) -> None:
    """Fails for a page that is not well formed, or that needs anything from elsewhere."""
    parser = _Checked()
    parser.feed(text)
    assert parser.open == []
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text
    assert "prefers-color-scheme: dark" in text


def test_a_profile_is_a_page(tmp_path: Path) -> None:
    model, x = mlp()
    compiled = lz.compile(model.eval(), x)
    text = compiled.save_profile(tmp_path / "profile.html", rounds=3).read_text()
    checked(text)
    assert "<h1>Sequential</h1>" in text
    for step in compiled.explain():
        assert step.kernel in text


def step(**other: Any) -> TimedStep:
    """A step that takes 10 µs."""
    made = TimedStep(
        op="linear", kernel="k", us=10.0, share=0.5, gflops=50.0, gbytes=20.0, output="y", origin="layers.0"
    )
    return replace(made, **other)


def test_steps_are_sorted_and_names_are_text() -> None:
    steps = [step(us=1.0), step(us=30.0, op="<b>", kernel="a&b", origin="</script>"), step(us=5.0)]
    text = profile_page.page("<i>", "CPU & co", steps, profile_page.Ceilings())
    checked(text)
    assert [float(us) for us in re.findall(r"<td class=n>([\d.]+) µs</td><td class=bar>", text)] == [30.0, 5.0, 1.0]
    assert "&lt;i&gt;" in text
    assert "a&amp;b" in text
    assert "peaks of this machine are not known" in text


def test_floors_are_shown_where_the_peaks_are_known() -> None:
    limits = profile_page.Ceilings(gbytes=40.0, gflops=200.0)
    assert limits.floor_us(step()) == 5.0
    assert profile_page.Ceilings(gflops=100.0).floor_us(step()) == 5.0
    assert profile_page.Ceilings().floor_us(step()) is None
    text = profile_page.page("model", "CPU", [step()], limits)
    checked(text)
    assert "floor ÷ time" in text
    assert "<td class=n>50 %</td></tr>" in text


def test_a_page_of_no_steps() -> None:
    checked(profile_page.page("model", "CPU", [], profile_page.Ceilings()))
