"""A backend imports from `_shared` and from itself, never from another backend: read from the sources, not by importing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import layerzero
import pytest
from layerzero.backends import BACKENDS, UNPROVEN

PACKAGE = Path(layerzero.__file__).parent
FOLDER = PACKAGE / "backends"


def imported(file: Path, root: Path) -> Iterator[str]:
    """The modules a file imports, in full, with the names it imports from them: each may be a module as well."""
    package = list(file.relative_to(root).with_suffix("").parts)[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def owner(module: str) -> str | None:
    """The folder below `backends` that a module is in."""
    parts = [part for part in module.split(".") if part != "contrib"]
    return parts[2] if parts[:2] == ["layerzero", "backends"] and len(parts) > 2 else None


def others(backend: str, folder: Path = FOLDER) -> list[str]:
    """What a backend imports from other backends, by file."""
    allowed = (None, backend, "_shared")
    return [
        f"{file.relative_to(folder)} imports {module}"
        for file in sorted(next(folder.glob(f"**/{backend}")).rglob("*.py"))
        for module in imported(file, folder.parents[1])
        if owner(module) not in allowed
    ]


@pytest.mark.parametrize("backend", [*BACKENDS, *UNPROVEN, "_shared"])
def test_a_backend_imports_no_other_backend(backend: str) -> None:
    assert others(backend) == []


@pytest.mark.parametrize(
    "line",
    [
        "from ..torch import attention",
        "from ..torch.attention import attend",
        "import layerzero.backends.torch.attention",
        "def f():\n    from layerzero.backends.torch import adapter",
    ],
)
def test_an_import_from_another_backend_is_found(tmp_path: Path, line: str) -> None:
    folder = tmp_path / "layerzero" / "backends"
    (folder / "one").mkdir(parents=True)
    (folder / "one" / "adapter.py").write_text(f"from . import adapter\nfrom .._shared import operands\n{line}\n")
    assert len(others("one", folder)) == 1


def test_every_folder_is_a_backend_or_shared() -> None:
    assert {file.parent.name for file in FOLDER.glob("*/__init__.py")} == {*BACKENDS, "_shared", "contrib"}
    assert {file.parent.name for file in FOLDER.glob("contrib/*/__init__.py")} == set(UNPROVEN)
