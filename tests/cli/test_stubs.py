"""The types of the package: the stub says what the native module is, and a checker reads calls as people mean them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tool(*arguments: str | Path) -> None:
    """Runs a module of Python's in the repository, and shows what it says when it fails."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stub_is_up_to_date() -> None:
    tool("scripts/stubs.py", "--check")


def test_the_stub_says_what_the_module_is(tmp_path: Path) -> None:
    # stubtest compares names, order and defaults; what torch's own types are does not matter to it, and reading them
    # takes half a minute.
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    tool("-m", "mypy.stubtest", "layerzero._native", "--mypy-config-file", config)


def test_every_line_is_typed_and_calls_are_read_as_people_mean_them() -> None:
    """`typed_calls.py` says of each call what its type is, and which calls are none."""
    tool(
        "-m",
        "mypy",
        "--strict",
        "python/layerzero",
        "scripts",
        "examples/quickstart.py",
        "tests/support/typed_calls.py",
    )
