"""SGLang with LayerZero's attention answers as with its torch backend. Only where SGLang is installed; on a CPU.

SGLang finds the plugin by its entry point, in the process of its scheduler too.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import installed_package
import pytest

ROOT = Path(__file__).parents[2]

if importlib.util.find_spec("sglang") is None:
    pytest.skip(
        "SGLang is not installed: tests/integrations/test_sglang.py runs the plugin without it", allow_module_level=True
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang")
    installed_package.entry_points(folder)
    return folder


def _engine(place: Path, model: str, backend: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests" / "support" / "sglang_engine.py"), str(place), model, backend]
    done = subprocess.run(
        command,
        env=installed_package.environment(place),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"tokens"')]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def test_answers_are_those_of_sglangs_torch_backend(place: Path) -> None:
    own, ours = (_engine(place, "Llama", backend) for backend in ("torch_native", "layerzero"))
    assert (own["backend"], ours["backend"]) == ("torch_native", "layerzero")
    assert ours["tokens"] == own["tokens"] and len({token for one in own["tokens"] for token in one}) > 20
    # Prompts with a common beginning find it.
    assert ours["cached"] == own["cached"] and max(ours["cached"]) >= 64
