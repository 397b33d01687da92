"""What one process measured, the next one goes by: from its first call on, on every device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import forked, python

CALL = '{"op": "rms_norm", "tensors": {"input": {"dtype": "bfloat16", "shape": [64, 512]}}}'


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_process_goes_by_what_another_one_measured(device: str, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    code = f"""
        import json, torch
        import layerzero as lz
        lz.configure(perfdb={{"path": {str(tmp_path / "perfdb.sqlite")!r}}})
        x = torch.randn(64, 512, dtype=torch.bfloat16, device={device!r})
    """
    tuned = forked(
        code
        + f"""
        report = lz.tune(calls=[json.loads({CALL!r})], device={device!r}, budget=2, progress=False).to_dict()
        answer([report["tuned"][0]["chosen"], lz.explain("rms_norm", x).basis])
    """
    )
    kernel, basis = tuned
    assert basis == "measured"
    asked = forked(
        code
        + """
        first = lz.explain("rms_norm", x)
        lz.rms_norm(x)
        answer([first.chosen, first.basis, lz.which("rms_norm", x).kernel_id])
    """
    )
    assert asked == [kernel, "measured", kernel]


SETUP = """
    import os, torch
    import layerzero as lz
    from layerzero import _native
    lz.configure(perfdb={"path": PATH})
    x = torch.randn(64, 512)
    lz.tune("rms_norm", shapes=[(64, 512)], budget=2, progress=False)
    weight = torch.ones(512)
    basis = lambda: lz.explain("rms_norm", x, weight).basis
    before = basis()
"""


@pytest.mark.parametrize("before", [False, True])
def test_a_forked_process_goes_by_what_was_measured(before: bool, tmp_path: Path) -> None:
    code = SETUP.replace("PATH", repr(str(tmp_path / "perfdb.sqlite")))
    if before:
        assert forked(code + "    answer(before)") == "measured"
        code = "\n".join(line for line in code.splitlines() if "lz.tune" not in line) + "\n"
    found = forked(
        code
        + """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _native.learn()
        os.write(writer, basis().encode())
        os._exit(0)
    os.waitpid(child, 0)
    answer([before, os.read(reader, 100).decode(), basis()])
    """
    )
    assert found == ["measured"] * 3


def test_what_cannot_be_kept_is_known_as_long_as_the_process_lives(tmp_path: Path) -> None:
    nowhere = tmp_path / "a file"
    nowhere.write_text("")
    code = SETUP.replace("PATH", repr(str(nowhere / "perfdb.sqlite")))
    assert forked(
        code
        + """
    known = _native.learn()
    answer([before, basis(), known > 0])
    """
    ) == ["measured", "measured", True]


def test_the_command_line_explains_what_processes_do(tmp_path: Path) -> None:
    config = tmp_path / "layerzero.yaml"
    config.write_text(f"perfdb:\n  path: {tmp_path / 'perfdb.sqlite'}\n")
    call = ("--op", "rms_norm", "--shape", "input=64x512", "--shape", "weight=512", "--json", "--config", config)
    found = []
    for _ in range(2):
        found.append(
            [json.loads(python("-m", "layerzero", command, *call).stdout) for command in ("explain", "select")]
        )
        tuned = python("-m", "layerzero", "tune", "rms_norm", "--shape", "64x512", "--budget", "2s", "--config", config)
        assert tuned.returncode == 0, tuned.stderr
    (before, _), (after, selected) = found
    assert (before["basis"], after["basis"]) == ("declared", "measured")
    assert selected["kernel_id"] == after["chosen"]
