"""The first steps of `make demo`: what is said of two commands that run at the same time, and what happens if one fails."""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script, without running it."""
    spec = importlib.util.spec_from_file_location("set_up", ROOT / "scripts" / "set_up.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printing(text: str, status: int = 0) -> list[str]:
    """A command that prints a text, and ends."""
    return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({status})"]


def ended(step: Any) -> Any:
    """The step, after its command."""
    step._reader.join()
    return step


def test_bytes_are_counted_from_what_uv_says(script: ModuleType) -> None:
    step = ended(
        script.Environment(printing("Downloading torch (1.5GiB)\nDownloading numpy (16.0MiB)\n Downloaded numpy"))
    )
    assert step.total == 1.5 * 2**30 + 16 * 2**20
    assert step.done == 16 * 2**20


def test_crates_are_counted_once_when_their_library_is_built(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def artifact(crate: str, kind: str, fresh: bool = False) -> str:
        built = {"reason": "compiler-artifact", "package_id": crate, "fresh": fresh}
        return json.dumps({**built, "target": {"kind": [kind]}})

    lines = [
        artifact("serde", "custom-build"),
        json.dumps({"reason": "build-script-executed", "package_id": "serde"}),
        artifact("serde", "lib"),
        artifact("serde", "lib"),
        artifact("stranger", "lib"),
        artifact("kept from the last time", "lib", fresh=True),
        "warning: a line that is no JSON",
        "{ neither is this",
        json.dumps({"reason": "build-finished", "success": True}),
    ]
    monkeypatch.setattr(script, "crate_weights", lambda: {"serde": 3.0, "pyo3": 5.0, "kept from the last time": 7.0})
    step = ended(script.Module(printing("\n".join(lines))))
    step._weigh()  # its own thread may still be about to
    assert (step.done, step.total) == (3.0, 8.0)
    assert step.output() == "warning: a line that is no JSON\n{ neither is this\n"


def test_time_left_follows_the_pace(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    step = script.Environment([sys.executable, "-c", "input()"])
    try:
        monkeypatch.setattr(script.time, "monotonic", lambda: step._began + 30.0)
        assert step.progress() == "Python environment 0:30"
        step.done, step.total = 25.0, 100.0
        assert step.progress() == "Python environment 25%, 0:30, about 1:30 left"
        # Nothing was done since: the same end, until it has passed.
        monkeypatch.setattr(script.time, "monotonic", lambda: step._began + 70.0)
        assert step.progress() == "Python environment 25%, 1:10, about 0:50 left"
        monkeypatch.setattr(script.time, "monotonic", lambda: step._began + 120.0)
        assert step.progress() == "Python environment 25%, 2:00"
        step.done = 80.0
        assert step.progress() == "Python environment 80%, 2:00, about 0:30 left"
    finally:
        step.process.kill()
        monkeypatch.undo()
        ended(step)


def test_a_step_that_fails_shows_its_output_and_ends_the_other(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = script.Environment([sys.executable, "-c", "import time; time.sleep(600)"])
    failing = script.Environment(printing("error: no space left on the device", 3))
    failing.name = "broken part"
    assert script.follow([waiting, failing]) == 3
    said = capsys.readouterr()
    assert "error: no space left on the device\n" in said.err
    assert said.err.endswith("The broken part could not be made: see above.\n")
    assert ended(waiting).process.returncode != 0


def test_every_crate_of_the_module_has_a_weight(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("cargo") is None:
        pytest.skip("cargo lists the crates")
    monkeypatch.setenv("HOME", pwd.getpwuid(os.getuid()).pw_dir)  # where cargo and its crates are
    weights = script.crate_weights()
    ours = {Path(name.partition("#")[0]).name for name in weights if name.startswith("path+")}
    assert {"lz-python", "lz-cpu", "layerzero"} <= ours
    assert len(weights) > 100 and min(weights.values()) > 0
    of_name = {name.rpartition("/")[2].partition("#")[0]: weight for name, weight in weights.items()}
    sources = sum(file.stat().st_size for file in (ROOT / "crates" / "lz-cpu" / "src").rglob("*.rs"))
    assert of_name["lz-cpu"] == pytest.approx(script.FACTORS["lz-cpu"] * sources)
    # A crate that is renamed or no longer needed has no factor.
    assert all(any(crate in name for name in weights) for crate in script.FACTORS)


def test_a_machine_without_rust_is_told_so(tmp_path: Path) -> None:
    options = ["--environment", str(tmp_path), "--module", str(tmp_path / "lib_native.so")]
    command = [sys.executable, str(ROOT / "scripts" / "set_up.py"), *options]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "There is no `cargo` here: install Rust 1.95 or newer, https://rustup.rs\n"
