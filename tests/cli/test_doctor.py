"""`layerzero doctor --device`: what a machine of each vendor would have, asked on any other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from layerzero import _native

Asked = Callable[..., tuple[int, str]]

#: By described device: its platform, a backend for it, one that is for other hardware, and who serves a norm there.
VENDORS = {
    "h100": ("cuda", "flash_attn", "habana", "torch.cuda."),
    "b200": ("cuda", "flash_attn_4", "aiter", "torch.cuda."),
    "mi300x": ("rocm", "aiter", "flashinfer", "torch.any."),
    "gaudi3": ("hpu", "habana", "cudnn", "torch.any."),
    "xpu-max1550": ("xpu", "torch_any", "cudnn", "torch.any."),
    "m4-max": ("mps", "torch_any", "triton", "torch.any."),
}


@pytest.fixture
def asked(capfd: pytest.CaptureFixture[str]) -> Asked:
    """Asks the doctor: the status and what is printed."""

    def ask(*arguments: str) -> tuple[int, str]:
        status = _native.cli(["layerzero", "doctor", *arguments])
        return status, capfd.readouterr().out

    return ask


@pytest.mark.parametrize("device", VENDORS)
def test_a_machine_of_every_vendor_can_be_asked_about(device: str, asked: Asked) -> None:
    platform, ours, other, serves = VENDORS[device]
    status, out = asked("--device", device, "--json")
    found = json.loads(out)
    assert status == 0 and found["usable"] and found["described"] and not found["problems"]
    assert [one["platform"] for one in found["devices"]] == [platform]
    backends = {backend["name"]: backend for backend in found["backends"]}
    assert backends[ours]["for_devices"] and platform in backends[ours]["platforms"]
    assert not backends[other]["for_devices"] and platform not in backends[other]["platforms"]
    norm, attention = found["selection"]
    assert norm["kernel_id"].startswith(serves) and attention["kernel_id"] is not None


def test_what_is_assumed_is_not_said_to_be_installed() -> None:
    # In a process of its own: a library that another test has imported is not assumed.
    command = [sys.executable, "-m", "layerzero", "doctor", "--device", "mi300x"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    out = run.stdout
    assert "assumed to be installed" in out and "installed, not imported" not in out
    lines = [line for line in out.splitlines() if "for other hardware:" in line]
    assert len(lines) == 1 and "flashinfer" in lines[0] and "aiter" not in lines[0]
