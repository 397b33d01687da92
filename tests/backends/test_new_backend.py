"""A new backend is one folder and one line: `scripts/new_backend.py` adds one to a copy of the package, and it works."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import layerzero
import pytest

PACKAGE = Path(layerzero.__file__).parent
ROOT = PACKAGE.parents[1]
NAME = "lz_acme"
#: A library that is installed, and computes by itself.
LIBRARY = """
import torch
__version__ = "0"
def rmsnorm(input, eps):
    return (input.double() / (input.double().square().mean(-1, keepdim=True) + eps).sqrt()).to(input.dtype)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A copy of the package, of links to its files; only the list of backends and the folder of new ones are its own."""
    copy = tmp_path / "site" / "layerzero"
    (copy / "backends" / "contrib").mkdir(parents=True)
    own = {PACKAGE / "backends", PACKAGE / "backends" / "contrib", PACKAGE / "backends" / "__init__.py"}
    for folder in (PACKAGE, PACKAGE / "backends", PACKAGE / "backends" / "contrib"):
        for entry in folder.iterdir():
            if entry not in own and entry.name != "__pycache__":
                (copy / entry.relative_to(PACKAGE)).symlink_to(entry)
    registry = (PACKAGE / "backends" / "__init__.py").read_text(encoding="utf-8")
    (copy / "backends" / "__init__.py").write_text(registry, encoding="utf-8")
    return tmp_path / "site"


def python(site: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the interpreter with the copy."""
    caches = {"XDG_CACHE_HOME": str(site / "cache"), "OMP_NUM_THREADS": "1", "LAYERZERO_PERFDB_ENABLED": "0"}
    environment = {**os.environ, **caches, "PYTHONPATH": str(site), **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def add(site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Adds a backend to the copy."""
    script = ROOT / "scripts" / "new_backend.py"
    where = ("--package", site / "layerzero", "--tests", site / "tests")
    return python(site, script, NAME, "--distribution", "lz-acme-kernels", *options, *where)


def test_a_backend_is_one_folder_and_one_line(site: Path) -> None:
    before = {file: file.read_text(encoding="utf-8") for file in site.rglob("*.py") if not file.is_symlink()}
    done = add(site, "--op", "norm.rms", "--function", "rmsnorm", "--platform", "cpu")
    assert done.returncode == 0, done.stderr
    folder = site / "layerzero" / "backends" / "contrib" / NAME
    made = {"__init__.py", "adapter.py", "capabilities.json", "library.json"}
    assert {file.name for file in folder.iterdir()} == made
    changed = {
        str(file.relative_to(site)): [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        for file, text in before.items()
        if (lines := list(difflib.unified_diff(text.splitlines(), file.read_text(encoding="utf-8").splitlines())))
    }
    # All there is to do outside of the folder, besides its test.
    assert changed == {"layerzero/backends/__init__.py": [f'+    "{NAME}",']}

    # Its own test passes, with the fake.
    test = site / "tests" / f"test_backend_{NAME}.py"
    lines = [f"import sys; sys.path[:0] = {[str(path) for path in places_of_support()]}"]
    (site / "tests" / "conftest.py").write_text("\n".join(lines) + "\n")
    ran = python(site, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", ROOT / "pyproject.toml", test)
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout + ran.stderr

    # With a library that is installed it is found, loaded and right.
    (site / "lz_acme_kernels.py").write_text(LIBRARY)
    record = site / "lz_acme_kernels-0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: lz-acme-kernels\nVersion: 0\n")
    (record / "RECORD").write_text("lz_acme_kernels.py,,\n")
    tried = python(site, "-m", "layerzero", "compat", "--json", "--backends", NAME, LAYERZERO_BACKENDS_UNPROVEN=NAME)
    assert tried.returncode == 0, tried.stdout + tried.stderr
    entry = next(entry for entry in json.loads(tried.stdout)["entries"] if entry["backend"] == NAME)
    assert (entry["status"], entry["reason"]) == ("ok", None), entry


def places_of_support() -> list[Path]:
    """The folders of the modules that tests share."""
    tests = ROOT / "tests"
    return sorted({file.parent for file in tests.rglob("adapter_cases.py")} | {tests})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--op", "norm.rm"), "'norm.rm' is not an operation; one of: norm.rms"),
        (("--op", "norm.rms", "--function", "a-b"), "'a-b' is not the name of a function"),
        (("--op", "norm.rms", "--optional", "wait"), "norm.rms has no wait; it has input, weight, eps"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(site: Path, options: tuple[str, ...], said: str) -> None:
    before = sorted(site.rglob("*"))
    done = add(site, *options)
    assert done.returncode != 0 and said in done.stderr
    assert [file for file in sorted(site.rglob("*")) if "__pycache__" not in str(file)] == before


def test_a_name_that_is_taken_is_refused(site: Path) -> None:
    script = ROOT / "scripts" / "new_backend.py"
    done = python(site, script, "aiter", "--distribution", "x", "--op", "norm.rms", "--package", site / "layerzero")
    assert done.returncode == 2 and "there is a backend 'aiter' already" in done.stderr
