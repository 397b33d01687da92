"""vLLM with LayerZero's attention answers as with its own. Only where vLLM is installed, with its kernels for CPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vLLM is not installed: tests/integrations/test_vllm.py runs the plugin without it", allow_module_level=True
    )

from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("this vLLM is not built for CPUs", allow_module_level=True)

from layerzero.integrations import vllm as plugin


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the package's entry points, as an installed package has them, and the models."""
    folder = tmp_path_factory.mktemp("vllm")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"{project['name'].replace('-', '_')}-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.0.0\n", encoding="utf-8"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@cache
def _engine(place: Path, model: str, arguments: str) -> dict[str, Any]:
    paths = [str(place), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "LAYERZERO_PERFDB_PRIORS": "false",
    }
    command = [sys.executable, str(ROOT / "tests" / "support" / "vllm_engine.py"), str(place), model, arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


#: Grouped heads; sliding windows; windows in every second layer and softcap.
@pytest.mark.parametrize("model", ["Llama", "Mistral", "Gemma2"])
def test_answers_are_those_of_vllms_own_attention(place: Path, model: str) -> None:
    plugin.register()
    own = _engine(place, model, "{}")
    ours = _engine(place, model, json.dumps({"attention_backend": plugin.name()}))
    assert own["ops"] == []
    assert {"kv_cache.append", "attention.gqa.decode.paged", "attention.gqa.prefill.paged"} <= set(ours["ops"])
    assert ours["tokens"] == own["tokens"] and len({token for one in own["tokens"] for token in one}) > 20
    # Prompts with a common beginning find its full pages.
    assert ours["cached"] == own["cached"] and max(ours["cached"]) == 64


@pytest.mark.skipif(importlib.util.find_spec("vllm.ir") is None, reason="this vLLM has no IR")
def test_norms_of_vllms_ir_are_provided(place: Path) -> None:
    own = _engine(place, "Llama", "{}")
    first = {"rms_norm": ["layerzero"], "fused_add_rms_norm": ["layerzero"]}
    ours = _engine(place, "Llama", json.dumps({"ir_op_priority": first}))
    assert ours["ops"] == ["norm.fused_add_rms", "norm.rms"] and ours["tokens"] == own["tokens"]
