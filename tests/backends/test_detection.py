"""Questions are answered without importing libraries, and for described devices as if they were installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from layerzero import detection
from layerzero.backends import BACKENDS

ATTENTION = [
    *("--op", "attention.causal", "--dtype", "bf16"),
    *("--shape", "query=1x2048x32x128", "--shape", "key=1x2048x8x128", "--shape", "value=1x2048x8x128"),
]
#: Runs the command line, then says which of these modules it has imported.
PROGRAM = """
import sys
from layerzero import _native
code = _native.cli(["layerzero", *sys.argv[1:]])
print("imported:", *(name for name in ("torch", "triton", "tokenizers", "numpy") if name in sys.modules))
raise SystemExit(code)
"""


def layerzero(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """The JSON a command printed."""
    text = done.stdout[: done.stdout.rindex("imported:")]
    data: dict[str, object] = json.loads(text)
    return data


def test_what_is_found_is_what_an_import_finds() -> None:
    """Versions decide which measurements count: those that are found must be those an import gives."""
    import importlib

    found = detection.found()
    assert found is not None
    assert [name for name, *_ in found] == list(BACKENDS)
    for name, text, versions, why in found:
        try:
            imported = importlib.import_module(f"layerzero.backends.{name}.adapter").detect()
        except (ImportError, RuntimeError, OSError):
            continue  # Whether an installed library can be imported is not known before.
        assert why is None, name
        assert versions[name] == imported == json.loads(text)["backend_version"]


def test_what_is_not_installed_is_said_to_be_so() -> None:
    assert detection.installed("no_such_library") is None
    assert detection.installed("json.no_such_part") is None


@pytest.mark.parametrize("command", [["explain", "--op", "rms_norm", "--shape", "input=8x4096"], ["doctor"]])
def test_questions_import_no_library(command: list[str]) -> None:
    done = layerzero(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("imported:"), done.stdout


def test_doctor_says_what_it_has_not_tried() -> None:
    done = layerzero("doctor", "--json")
    backends = {backend["name"]: backend for backend in answer(done)["backends"]}  # type: ignore[attr-defined]
    assert backends["lz_cpu"]["imported"] is True
    assert backends["torch"]["imported"] is False
    assert backends["torch"]["unavailable"] is None
    assert "installed, not imported" in layerzero("doctor").stdout


@pytest.mark.parametrize("device", ["h100", "a100"])
def test_a_described_device_has_the_libraries(device: str) -> None:
    done = layerzero("explain", *ATTENTION, "--device", device, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = answer(done)
    assert report["chosen"]
    served = {c["kernel_id"] for c in report["candidates"] if c["accepted"]}  # type: ignore[attr-defined]
    assert {"flash_attn.v2", "torch.cuda.sdpa"} <= served
    assert "all known libraries are assumed to be installed" in done.stderr
    assert done.stdout.rstrip().endswith("imported:")


def test_libraries_can_be_named() -> None:
    done = layerzero("explain", *ATTENTION, "--device", "h100", "--json", "--assume", "flash_attn=2.8.1")
    assert "flash_attn=2.8.1 and torch are assumed to be installed" in done.stderr
    candidates = {c["kernel_id"]: c for c in answer(done)["candidates"]}  # type: ignore[attr-defined]
    assert candidates["flash_attn.v2"]["accepted"]
    assert candidates["flash_attn.v2"]["version"] == "2.8.1"
    assert candidates["torch.cuda.sdpa"]["accepted"]
    others = [c for c in candidates.values() if c["accepted"] and c["backend"] not in ("flash_attn", "torch_cuda")]
    assert others == []
    old = layerzero("explain", *ATTENTION, "--device", "h100", "--json", "--assume", "flash_attn=2.5")
    reasons = {c["kernel_id"]: c["reasons"] for c in answer(old)["candidates"]}  # type: ignore[attr-defined]
    assert [r["code"] for r in reasons["flash_attn.v2"]] == ["VERSION_UNSUPPORTED"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--device", "h100", "--assume", "flash_atn"], "no library is called 'flash_atn'; did you mean 'flash_attn'?"),
        (["--assume", "flash_attn"], "--assume is for a described device"),
    ],
)
def test_what_cannot_be_assumed_is_an_error(arguments: list[str], error: str) -> None:
    done = layerzero("explain", *ATTENTION, *arguments)
    assert done.returncode == 2
    assert error in done.stderr


@pytest.mark.parametrize("command", [["select"], ["policy", "explain"]])
def test_the_other_questions_assume_the_same(command: list[str]) -> None:
    done = layerzero(*command, *ATTENTION, "--device", "h100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "assumed to be installed" in done.stderr
