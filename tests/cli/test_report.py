"""The page of ``layerzero report`` in a real browser, and its figures as PNG files."""

from __future__ import annotations

import builtins
import html.parser
import importlib.util
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from layerzero import plots
from layerzero.errors import LayerZeroError
from processes import python

CHROMIUM = shutil.which("chromium")
DEVICE = "GPU-00000000-1111-2222-3333-444444444444"
HOSTILE = "\"><script>console.error('broken out')</script><img src=x onerror=alert(1)>'"


def row(kernel: str, op: str, call: dict[str, Any], us: float | None, error: str | None = None) -> dict[str, Any]:
    """One measurement as it is exported."""
    unknown = dict.fromkeys(
        ["variance_us", "warmup_ms", "max_error", "kernel_version", "backend_version", "layerzero_version"]
        + ["capabilities_hash", "cuda_version", "driver_version", "device_uuid", "temperature", "memory_pressure"]
        + ["power_state", "contest", "invalid_why"]
    )
    return {
        **unknown,
        "schema_version": 2,
        "kernel_id": kernel,
        "operation": op,
        "device_id": DEVICE,
        "mode": "eager",
        "call": json.dumps(call),
        "sm_version": 90,
        "dtype": "float32",
        "head_dim": 0,
        "seq_bucket": 0,
        "batch_bucket": 0,
        "outcome": "failed" if us is None else "ok",
        "error": error,
        "median_us": us,
        "p95_us": us and us * 1.1,
        "spread_us": us and us * 0.02,
        "samples": 0 if us is None else 20,
        "baseline": kernel.startswith("torch."),
        "torch_version": "2.10.0",
        "measured_at": 1_772_368_440_000,
        "valid": True,
    }


def norm(rows: int) -> dict[str, Any]:
    return {"op": "norm.rms", "tensors": {"input": {"dtype": "float32", "shape": [rows, 64]}}}


def linear(rows: int, out: int) -> dict[str, Any]:
    shapes = {"input": [rows, 64], "weight": [out, 64]}
    return {"op": "mlp.linear", "tensors": {name: {"dtype": "float32", "shape": shapes[name]} for name in shapes}}


def measured() -> list[dict[str, Any]]:
    """Two operations over several sizes, kernels that fail, and texts that would break a careless page."""
    rows = []
    for size in (1, 16, 256):
        rows.append(row("torch.rms_norm", "norm.rms", norm(size), 10.0 + size))
        rows.append(row("fast.rms_norm", "norm.rms", norm(size), 4.0 + size * 1.05))
        rows.append(row(f"odd.{HOSTILE}", "norm.rms", norm(size), None, f"RuntimeError: {HOSTILE}\n" * 3))
        for out in (64, 128, 512):
            rows.append(row("torch.linear", "mlp.linear", linear(size, out), 20.0 + out / 8))
            rows.append(row("slow.linear", "mlp.linear", linear(size, out), 900.0 + out))
    return rows


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page, and the same as JSON."""
    folder = tmp_path_factory.mktemp("report")
    lines = folder / "rows.jsonl"
    lines.write_text("".join(json.dumps(line) + "\n" for line in measured()))
    database, page = folder / "perfdb.sqlite", folder / "report.html"
    done = python("-m", "layerzero", "perfdb", "--db", database, "import", lines)
    assert done.returncode == 0, done.stderr
    done = python("-m", "layerzero", "report", "--db", database, "-o", page, "--json", "--title", f"All {HOSTILE}")
    assert done.returncode == 0, done.stderr
    return page, json.loads(done.stdout)


class Tags(html.parser.HTMLParser):
    """Counts elements, and keeps the attributes that could do something."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.active: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.active += [f"{tag} {name}={value}" for name, value in attrs if name.startswith("on") or name == "src"]


def count(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    return tags


def chromium(page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    # The first start on a slow machine takes its time.
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --disable-dev-shm-usage --enable-logging=stderr --hide-scrollbars"
    )
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={profile}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the page wrote to the console, refusals of its policy included."""
    return [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def test_the_page_says_what_was_measured(report: tuple[Path, dict[str, Any]]) -> None:
    page, document = report
    tags = count(page.read_text())
    assert tags.elements["article"] == len(document["contests"]) == 12
    assert (tags.elements["script"], tags.elements["img"], tags.active) == (1, 0, [])
    chosen = {(c["op"], c["chosen"]) for c in document["contests"]}
    assert chosen == {("norm.rms", "fast.rms_norm"), ("norm.rms", "torch.rms_norm"), ("mlp.linear", "torch.linear")}


def test_a_browser_shows_it_without_errors(report: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    page, document = report
    done = chromium(page, tmp_path / "profile", "--dump-dom", "--window-size=1280,900")
    assert done.returncode == 0, done.stderr
    assert said(done) == []
    tags = count(done.stdout)
    # The script ran: headings have become buttons, and the tools are shown.
    assert tags.elements["button"] == 9
    assert 'class="tools">' in done.stdout.replace(' hidden=""', "")
    assert "<table" in done.stdout
    assert tags.elements["svg"] > len(document["contests"])
    assert tags.elements["article"] == len(document["contests"])
    assert (tags.elements["script"], tags.elements["img"], tags.active) == (1, 0, [])


def test_the_console_is_listened_to(tmp_path: Path) -> None:
    """What the test above relies on."""
    page = tmp_path / "loud.html"
    page.write_text("<!DOCTYPE html><title>x</title><script>console.error('so'); undefinedFunction();</script>")
    lines = said(chromium(page, tmp_path / "profile", "--dump-dom"))
    assert any("so" in line for line in lines)
    assert any("undefinedFunction" in line for line in lines)


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_the_window(report: tuple[Path, dict[str, Any]], tmp_path: Path, width: int) -> None:
    # The page's own policy allows no further script, so the copy has none of it.
    text = report[0].read_text()
    start = text.index('<meta http-equiv="Content-Security-Policy"')
    text = text[:start] + text[text.index(">", start) + 1 :]
    page = tmp_path / "measured.html"
    measure = "document.title = 'wide ' + document.documentElement.scrollWidth + ' of ' + innerWidth"
    page.write_text(text.replace("</body>", f"<script>{measure}</script></body>"))
    # Chromium has no window narrower than 500; a frame has.
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"<!DOCTYPE html><iframe id=f src='{page.name}' style='width:{width}px;height:900px;border:0'></iframe>"
        "<script>f.onload = () => { document.title = f.contentDocument.title }</script>"
    )
    done = chromium(
        frame, tmp_path / "profile", "--dump-dom", "--allow-file-access-from-files", "--window-size=1400,1000"
    )
    assert f"<title>wide {width} of {width}</title>" in done.stdout, done.stdout[:300]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_figures_are_drawn(report: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    files = plots.write(report[1], tmp_path / "figures")
    names = {"speedup", "speedup-norm.rms", "speedup-mlp.linear", "winners-norm.rms", "winners-mlp.linear", "regret"}
    assert {path.stem for path in files} == names
    for path in files:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(data) > 3000
    assert "matplotlib.pyplot" not in sys.modules, "nothing global was touched"


def test_the_command_draws_figures(tmp_path: Path) -> None:
    database = tmp_path / "perfdb.sqlite"
    code = (
        "import sys, layerzero as lz; lz.configure(perfdb={'path': sys.argv[1]});"
        "lz.tune('rms_norm', dtype='float32', shapes=[(1, 64), (8, 64)], budget='2s')"
    )
    subprocess.run([sys.executable, "-c", code, str(database)], check=True, timeout=120)
    command = [sys.executable, "-m", "layerzero", "report", "--db", str(database), "-o", str(tmp_path / "page.html")]
    done = subprocess.run(
        [*command, "--png", str(tmp_path / "figures")], capture_output=True, text=True, timeout=120, check=True
    )
    assert "wrote" in done.stdout and (tmp_path / "page.html").stat().st_size > 10_000
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png"}
    together = f"--png={tmp_path / 'more figures'}"
    subprocess.run([*command, together], capture_output=True, timeout=120, check=True)
    drawn = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("figures", "more figures")]
    assert drawn[0] == drawn[1]
    done = subprocess.run([*command, "--png"], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "--png" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_figures_take_anything(tmp_path: Path) -> None:
    names = ["$x_{", "\\frac{", "a/../b", "a_.._b", "", "🦀"]
    nan = float("nan")
    contests = [
        {"device": "d", "op": op, "label": op, "dtype": op, "mode": op, "chosen": op, "times_baseline": ratio}
        for op in names
        for ratio in (0.5, 1.0, 1e9, 1e-9, nan, None)
    ]
    cells = [[{"kernel": op, "times_baseline": nan}, None, {"kernel": None, "times_baseline": None}] for op in names]
    grid = {"op": "$", "device": None, "across": "$", "columns": ["1", "2", "$"], "rows": names, "cells": cells}
    files = plots.write({"contests": contests, "maps": [grid, grid]}, tmp_path / "new" / "figures")
    assert len(set(files)) == len(files) == 1 + len(names) + 2
    assert all(path.parent == tmp_path / "new" / "figures" for path in files)
    assert plots.write({}, tmp_path / "empty") == []


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return imported(name, *rest, **more)

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(LayerZeroError, match="matplotlib") as error:
        plots.write({}, tmp_path / "none")
    assert "layerzero-kernels[plots]" in error.value.hint
    assert not (tmp_path / "none").exists()


def test_figures_tell_calls_apart_that_differ_in_more_than_sizes() -> None:
    calls = [
        {"label": "seq 4096", "dtype": "bfloat16", "mode": "graph", "variant": "BHSD, softcap=30.0"},
        {"label": "seq 4096", "dtype": "bfloat16", "mode": "graph", "variant": "BHSD, window_left=511"},
    ]
    softcap, window = plots._names(calls)
    assert softcap == "seq 4096 · BHSD, softcap=30.0 · bfloat16 · graph" and "window_left=511" in window
    assert plots._names(calls[:1]) == ["seq 4096 · bfloat16 · graph"]


def test_figures_list_calls_by_dtype_and_size() -> None:
    labels = ["rows 256 · 768→768", "rows 32 · 3072→768", "rows 32 · 768→768"]
    contests = [
        {"device": "d", "op": "mlp.linear", "label": label, "dtype": dtype, "mode": "eager", "times_baseline": 1.0}
        for label in labels
        for dtype in ("float32", "bfloat16")
    ]
    ((_, listed),) = plots._groups({"contests": contests}).items()
    by_size = ["rows 32 · 768→768", "rows 32 · 3072→768", "rows 256 · 768→768"]
    assert [c["label"] for c in listed] == by_size * 2
    assert [c["dtype"] for c in listed] == ["bfloat16"] * 3 + ["float32"] * 3
