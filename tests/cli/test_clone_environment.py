"""The environment of a clone: LayerZero from its tree, the packages of the shared environment, and the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder like a clone, with a space in its name."""
    folder = tmp_path / "a clone"
    folder.mkdir()
    (folder / "python").symlink_to(ROOT / "python")
    return folder


def made(clone: Path) -> None:
    script = ROOT / "scripts" / "clone_venv.sh"
    subprocess.run(["bash", script, sys.prefix], cwd=clone, check=True, timeout=60)


def said(clone: Path, *command: str) -> str:
    """What a program of the environment prints, called from elsewhere and without a path of ours."""
    done = subprocess.run(
        [clone / ".venv" / "bin" / command[0], *command[1:]],
        cwd=clone.parent,
        env={"PATH": "/usr/bin:/bin", "HOME": str(clone.parent)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_the_command_and_the_package_are_there(clone: Path) -> None:
    made(clone)
    assert said(clone, "layerzero", "--version").startswith("layerzero ")
    imported = "import layerzero, pytest; print(layerzero.__file__)"
    assert said(clone, "python", "-c", imported) == str(clone / "python" / "layerzero" / "__init__.py")


def test_a_link_of_an_older_clone_is_replaced_and_what_it_shows_is_kept(clone: Path) -> None:
    shared = clone.parent / "shared"
    shared.mkdir()
    (shared / "kept").touch()
    (clone / ".venv").symlink_to(shared)
    made(clone)
    made(clone)
    assert (shared / "kept").exists() and not (clone / ".venv").is_symlink()
    assert said(clone, "layerzero", "--version")
