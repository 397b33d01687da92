"""`layerzero bench start`: fresh processes, what they are timed by, and what they imported."""

from __future__ import annotations

import json

import pytest
from layerzero.bench import start


def test_one_process_tells_its_times() -> None:
    told = start._run("layerzero", "cpu")
    assert told["beyond_torch_s"] == pytest.approx(told["import_s"] + told["call_s"])
    assert min(told[name] for name in ("torch_s", "import_s", "call_s", "exit_s", "beyond_torch_cpu_s")) > 0
    # Whoever serves is torch or ours, and neither needs a package beside torch's.
    assert told["packages"] == [] and told["kernel"].partition(".")[0] in ("torch", "lz_cpu", "onednn")


def test_a_process_that_fails_is_said() -> None:
    with pytest.raises(RuntimeError, match="the process for 'torch' on no_such_device failed"):
        start._run("torch", "no_such_device")


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert start.main(["--rounds", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["rows"]) == list(start.CASES) and result["rounds"] == 1
    assert result["met"] == (result["rows"]["layerzero"]["beyond_torch_s"] <= result["target_s"])
    start._print(result)
    assert "beyond torch's own first call" in capsys.readouterr().out
