"""bench/gpu/models.py on a tiny model: every step by every variant, and a table."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script, as a module."""
    path = Path(__file__).parents[2] / "bench" / "gpu" / "models.py"
    spec = importlib.util.spec_from_file_location("bench_gpu_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # two minutes: models are compiled for every step
def test_every_variant_runs_every_step(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.json"
    bench.main(["--tiny", "--device", "cpu", "--compile-seconds", "0", "--rounds", "1", "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["failures"] == {}
    assert [(row["kind"], row["batch"]) for row in result["rows"]] == [
        ("prefill", 1), ("prefill", 1), ("prefill", 1), ("decode", 1), ("decode", 16), ("decode", 128)
    ]  # fmt: skip
    assert all(set(row["ms"]) == set(bench.VARIANTS) for row in result["rows"])
    assert {one["operation"] for one in result["optimized"]["replaced"]} >= {
        "attention",
        "rms_norm",
        "silu_mul",
        "rope",
    }
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| step | eager | sdpa | layerzero | optimize | graphs |"
    assert sum(line.startswith("| decode") for line in table) == 3


def test_a_table_names_what_failed(bench: ModuleType) -> None:
    rows = [{"kind": "prefill", "batch": 1, "tokens": 512, "ms": {"sdpa": 10.0, "layerzero": 5.0}}]
    text = bench.table({"rows": rows, "failures": {"eager, prefill": "out of memory"}})
    assert "| prefill, 512 tokens | 51,200 | 102,400 (2.00×) |" in text
    assert "- eager, prefill: out of memory" in text
