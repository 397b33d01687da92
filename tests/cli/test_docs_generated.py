"""What the documentation says about the sources is what the sources say: generated pages, the chart, codes, the API, Rust."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import layerzero as lz
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def script(name: str) -> ModuleType:
    """A script of the repository."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chart_is_of_the_run_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    chart = script("chart")
    monkeypatch.setattr(sys, "argv", ["chart.py", "--check"])
    chart.main()
    assert chart.RUN.name in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_chart_that_is_out_of_date_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chart = script("chart")
    old = tmp_path / "h200.svg"
    old.write_text(chart.CHART.read_text(encoding="utf-8").replace("3.01×", "4.01×"), encoding="utf-8")
    monkeypatch.setattr(chart, "CHART", old)
    monkeypatch.setattr(sys, "argv", ["chart.py", "--check"])
    with pytest.raises(SystemExit, match="run scripts/chart.py"):
        chart.main()


# The command line's page takes a process for each command: `make check` compares it.
@pytest.mark.parametrize("page", ["reasons.md", "schemas.md"])
def test_reference_pages_are_up_to_date(page: str) -> None:
    assert script("reference").PAGES[page]() == (DOCS / page).read_text(encoding="utf-8"), "run `make reference`"


def test_every_reason_is_on_its_page() -> None:
    source = (ROOT / "crates" / "lz-model" / "src" / "reason.rs").read_text(encoding="utf-8")
    body = source.split("pub enum Reason {")[1].split("\n}")[0]
    variants = re.findall(r"^    ([A-Z]\w+)(?: \{|,)", body, re.MULTILINE)
    page = (DOCS / "reasons.md").read_text(encoding="utf-8")
    assert len(variants) > 60
    assert page.count("\n| `") == len(variants)


def test_every_error_code_is_in_troubleshooting() -> None:
    python = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "python" / "layerzero").rglob("*.py"))
    codes = set(re.findall(r'\bcode="([A-Z_]+)"', python))
    rust = ["layerzero/src/error.rs", "lz-model/src/call.rs", "lz-cli/src/error.rs"]
    for path in rust:
        text = (ROOT / "crates" / path).read_text(encoding="utf-8")
        body = text[text.index("pub fn code(&self)") :].partition("\n    }\n")[0]
        codes |= set(re.findall(r'"([A-Z][A-Z_]+)"', body))
    for path in (ROOT / "crates" / "lz-python" / "src").rglob("*.rs"):
        text = path.read_text(encoding="utf-8")
        codes |= set(re.findall(r'(?:invalid|argument|configuration)\(py, "([A-Z_]+)"', text))
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    # `ERROR` is the code of the base class; nobody but our own adapters can cause `BAD_DOUBT`.
    assert len(codes) > 70 and codes - {"ERROR", "BAD_DOUBT"} - set(re.findall(r"`([A-Z_]+)`", page)) == set()


def test_the_api_page_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    there = {
        *re.findall(r"^::: layerzero\.(\w+)$", page, re.MULTILINE),
        *re.findall(r"^### (\w+)$", page, re.MULTILINE),
    }
    assert there == set(lz.__all__) - {"__version__"}


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert {path.name for path in DOCS.glob("*.md")} <= named


def test_rust_on_the_pages_is_rust_that_runs() -> None:
    source = (ROOT / "crates" / "layerzero" / "src" / "lib.rs").read_text(encoding="utf-8")
    lines = (line.removeprefix("//!").removeprefix(" ") for line in source.splitlines() if line.startswith("//!"))
    documented = "\n".join(line for line in lines if not line.startswith("# "))
    shown = [
        block
        for path in DOCS.glob("*.md")
        for block in re.findall(r"^```rust\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    ]
    assert len(shown) == 2
    assert all(block in documented for block in shown)
