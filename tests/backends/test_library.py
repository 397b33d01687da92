"""`Library.find`: what it imports, which version it reads, and what it says where something is missing."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import layerzero
import pytest
from layerzero.backends._shared.library import Library


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages are found in, whose modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0].startswith("lz_made_up"):
            del sys.modules[name]


def package(site: Path, name: str, version: str | None = None, **modules: str) -> None:
    """A package with modules, and metadata if it has a version."""
    (site / name).mkdir()
    (site / name / "__init__.py").write_text(modules.pop("init", ""))
    for module, text in modules.items():
        (site / name / f"{module}.py").write_text(text)
    if version is not None:
        record = site / f"{name}-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    importlib.invalidate_caches()


def test_its_functions_are_attributes_once_it_is_found(site: Path) -> None:
    package(site, "lz_made_up_a", "1.2", init="def run(): return 7\n", other="def more(): return 8\n")
    library = Library("lz_made_up_a", "run", modules={"lz_made_up_a.other": ("more",)})
    with pytest.raises(AttributeError, match="lz_made_up_a was not imported yet"):
        library.run()
    assert "lz_made_up_a" not in sys.modules
    assert library.find() == "1.2"
    assert (library.run(), library.more()) == (7, 8)


@pytest.mark.parametrize(
    ("recorded", "said", "keywords", "want"),
    [
        ("1.2", "9.9", {}, "1.2"),
        ("1.2", "9.9", {"own_version": True}, "9.9"),
        ("1.2", None, {"own_version": True}, "1.2"),
        (None, "9.9", {}, "9.9"),
        (None, None, {"usual_version": "3.0"}, "3.0"),
    ],
)
def test_where_the_version_comes_from(
    site: Path, recorded: str, said: str, keywords: dict[str, str], want: str
) -> None:
    package(site, "lz_made_up_b", recorded, init=f"__version__ = {said!r}\n" if said else "")
    assert Library("lz_made_up_b", **keywords).find() == want


def test_what_is_missing_is_said_in_one_line(site: Path) -> None:
    package(site, "lz_made_up_c", "1.2", init="run = 1\n", broken="raise OSError('no\\n  symbol')\n")
    package(site, "lz_made_up_d")
    cases = [
        (Library("lz_made_up_none"), "lz_made_up_none cannot be imported: No module named 'lz_made_up_none'"),
        (Library("lz_made_up_c", "run", "a", "b", advice="install 2"), "lz_made_up_c 1.2 has no a, b; install 2"),
        (
            Library("lz_made_up_c", modules={"lz_made_up_c.broken": ()}),
            "lz_made_up_c.broken cannot be imported: no symbol",
        ),
        (Library("lz_made_up_d"), "lz_made_up_d is not installed"),
        (Library("lz_made_up_d", "run"), "lz_made_up_d has no run"),
    ]
    for library, want in cases:
        with pytest.raises(ImportError) as caught:
            library.find()
        assert str(caught.value) == want


def test_the_metadata_are_enough_for_installed(site: Path) -> None:
    package(site, "lz_made_up_e", "4.5", init="raise RuntimeError\n")
    assert Library("lz_made_up_e").installed() == "4.5"
    assert "lz_made_up_e" not in sys.modules


def test_no_adapter_looks_for_its_library_by_itself() -> None:
    """Adapters leave the metadata of libraries to `Library`."""
    folder = Path(layerzero.__file__).parent / "backends"
    found = [
        file
        for file in folder.rglob("*.py")
        if re.search(r"import (\w+, )*metadata\b", file.read_text(encoding="utf-8"))
    ]
    assert found == [folder / "_shared" / "library.py"]
