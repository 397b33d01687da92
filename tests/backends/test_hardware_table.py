"""The table of what was run on which hardware: as the data say, of every backend, and as the backends themselves say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from layerzero import backend_files
from layerzero.backends import BACKENDS, UNPROVEN

ROOT = Path(__file__).parents[2]
#: Kernels of libraries that were run, added since: nobody has run them on their hardware.
NOT_RUN_YET = {
    *(f"flash_attn.v{version}.{kind}" for version in (2, 3, 4) for kind in ("lse", "lse.varlen", "sinks", "varlen")),
    "flashinfer.mla.prefill.paged",
    "flashinfer.ragged_prefill.varlen",
}
DATA = {name: backend_files.description(name) for name in (*BACKENDS, *UNPROVEN)}


def script() -> object:
    """The script that writes the table."""
    spec = importlib.util.spec_from_file_location("hardware", ROOT / "scripts" / "hardware.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "hardware.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_page_that_is_out_of_date_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = script()
    page = tmp_path / "gpu.md"
    page.write_text(module.PAGE.read_text(encoding="utf-8").replace("| `triton` |", "| `treeton` |"), encoding="utf-8")
    monkeypatch.setattr(module, "PAGE", page)
    assert module.text() != page.read_text(encoding="utf-8")
    page.write_text(module.text(), encoding="utf-8")
    assert "| `triton` |" in page.read_text(encoding="utf-8")


def test_every_backend_describes_its_library() -> None:
    for name, entry in DATA.items():
        assert entry["distribution"] and entry["serves"] and (entry["run"] or entry["why"]), name
        assert all(one["on"] and one["with"] for one in entry["run"]), name


@pytest.mark.parametrize("name", sorted({*BACKENDS, *UNPROVEN}))
def test_documents_adapters_and_table_agree(name: str) -> None:
    document = backend_files.document(name)
    text = " ".join((backend_files.folder(name) / "adapter.py").read_text(encoding="utf-8").split())
    assert document.get("proven", True) == (name in BACKENDS)
    # Plain torch serves on devices nobody has tried it on: nothing else could.
    assert bool(DATA[name]["run"]) == (name in BACKENDS and name != "torch_any")
    if not DATA[name]["run"]:
        assert "not run on hardware" in text.lower(), f"{name}: the adapter does not say so"
    elif any("H200" in one["on"] for one in DATA[name]["run"]):
        assert "Run on an H200" in text, f"{name}: the adapter does not say so"


def test_what_is_unproven_in_backends_that_were_run() -> None:
    found = {
        kernel["kernel_id"]
        for name in BACKENDS
        for kernels in backend_files.document(name)["ops"].values()
        for kernel in kernels
        if not kernel.get("proven", True)
    }
    trained = {kernel for kernel in found if ".train" in kernel}
    assert {kernel.rpartition(".train")[0] for kernel in trained} == {
        "flash_attn.v2",
        "flash_attn.v2.cross",
        "flash_attn.v3",
        "flash_attn.v3.cross",
    }
    # What was added after the libraries were last run.
    assert found - trained == NOT_RUN_YET
