"""Which device is meant where nobody says: the tensors', else torch's accelerator in use, else the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import described
import layerzero as lz
import processes
import pytest
import torch
from layerzero import devices
from layerzero.compat import builds

#: Has torch say that it has two Intel GPUs, of which the second is in use. For a process of its own: the engine keeps them.
ACCELERATOR = """
import types, torch
gpus = types.SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 2,
    get_device_name=lambda index: f"Made up {index}",
    get_device_properties=lambda index: types.SimpleNamespace(total_memory=1 << 34),
    synchronize=lambda *_: None,
)
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("xpu")
torch.accelerator.current_device_index = lambda: 1
torch.accelerator.synchronize = lambda *_: None
torch.get_device_module = lambda device=None: gpus
import layerzero as lz
from layerzero import _native, devices
CALL = {"op": "rms_norm", "tensors": {"input": {"dtype": "float32", "shape": [4, 8]}}}
"""


def on_the_accelerator(code: str) -> Any:
    """What code answers in a process whose torch says it has one."""
    return processes.forked(ACCELERATOR + code)


def test_without_an_accelerator_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert devices.resolve() == devices.in_use() == "cpu" and devices.number() == 0
    monkeypatch.setattr(lz.loading, "torch_is_there", lambda: False)
    assert devices.resolve() == "cpu" and devices.described("xpu") == []


def test_tensors_go_before_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    meta, here = torch.empty(1, device="meta"), torch.empty(1)
    assert devices.resolve(of=[meta, here]) == "cpu"
    assert devices.resolve(of=[lz.TensorSpec((2,), device="cuda:1"), here]) == "cuda:1"
    assert devices.resolve(of=[meta]) == devices.resolve() == "cuda:3"
    # A device without a number is the current one of its kind.
    assert devices.resolve(of=[lz.TensorSpec((2,), device="cuda")]) == "cuda:3"
    assert devices.resolve(of=[lz.TensorSpec((2,), device="xpu")]) == "xpu:0"
    assert devices.resolve(of=[{"device": "cuda:2"}, {"device": None}]) == "cuda:2"
    # What is said wins, whatever there is.
    assert devices.resolve("cpu", [lz.TensorSpec((2,), device="cuda:1")]) == "cpu"
    assert devices.resolve(torch.device("cpu", 0)) == "cpu"


@pytest.mark.parametrize(
    ("device", "why"),
    [("moon", "device type at start of device string"), ("cuda:77", "there is no device"), (3.5, "is no device")],
)
def test_a_device_that_is_none_is_an_error(device: Any, why: str) -> None:
    call = {"op": "rms_norm", "tensors": {"input": {"dtype": "float32", "shape": [4, 8]}}}
    for ask in (
        lambda: lz.tune("rms_norm", shapes=[(4, 8)], device=device),
        lambda: lz.regret("rms_norm", shapes=[(4, 8)], device=device),
        lambda: lz.workload("rms_norm", shapes=[(4, 8)], device=device),
        lambda: lz.explain_call(call, device),
        lambda: lz.warmup(calls=[call], device=device),
        lambda: lz.write_lockfile(calls=[call], device=device),
    ):
        with pytest.raises(lz.errors.ConfigurationError, match=why) as caught:
            ask()
        assert caught.value.code == "BAD_DEVICE" and caught.value.hint


def test_every_function_takes_the_accelerator_in_use() -> None:
    found = on_the_accelerator(
        """
workload = lz.workload("rms_norm", shapes=[(4, 8)])
report = lz.explain_call(CALL)
warmed = lz.warmup(calls=[CALL])
answer([devices.in_use(), workload.device, report.device, report.chosen, warmed.devices, warmed.already_warm[0].device,
        lz.explain_call(CALL, "cpu").chosen, lz.explain_call(CALL, "xpu").device])
        """
    )
    cpu_kernel = found.pop(6)
    assert found == ["xpu:1", "xpu:1", "Made up 1", "torch.any.rms_norm", ["xpu:1"], "xpu:1", "Made up 1"]
    assert not cpu_kernel.startswith("torch.any.")


def test_a_model_is_solved_for_the_device_it_is_on() -> None:
    """Weights on the first GPU, the second in use: the table, and what is compiled for it, are for the first."""
    device, calls, compiled = on_the_accelerator(
        """
from torch._subclasses.fake_tensor import FakeTensorMode
from layerzero import dispatch_table, warm_up
seen = []
warm_up.warmup = lambda **given: seen.append(given["device"])
with FakeTensorMode():
    model = torch.nn.RMSNorm(8, device="xpu:0")
with torch.no_grad():
    table = lz.solve(model, lz.TensorSpec((4, 8), "float32", device="xpu:0"), shape_buckets={"batch": [8]})
answer([table.device, len(table.plans), seen])
        """
    )
    assert (device, calls, compiled) == ("xpu:0", 1, ["xpu:0"])


def test_commands_take_the_accelerator_in_use() -> None:
    shown, chosen, told = on_the_accelerator(
        """
import io, os, tempfile
def command(*arguments):
    with tempfile.TemporaryFile() as printed:
        ours = os.dup(1)
        os.dup2(printed.fileno(), 1)
        code = _native.cli(["layerzero", *arguments])
        os.dup2(ours, 1)
        printed.seek(0)
        return printed.read().decode()
shown = json.loads(command("doctor", "--json"))
explain = json.loads(command("explain", "--json", "--op", "rms_norm", "--shape", "input=4x8"))
on_cpu = json.loads(command("explain", "--json", "--op", "rms_norm", "--shape", "input=4x8", "--device", "cpu"))
on_first = json.loads(command("explain", "--json", "--op", "rms_norm", "--shape", "input=4x8", "--device", "xpu:0"))
kernels = command("kernels", "--op", "rms_norm").splitlines()[0]
answer([[shown["device"], shown["devices"][-1]["name"], shown["selection"][0]["kernel_id"]],
        [explain["device"], explain["chosen"], on_first["device"], on_cpu["device"]], kernels])
        """
    )
    assert shown == ["xpu:1", "Made up 1", "torch.any.rms_norm"]
    assert chosen[:3] == ["Made up 1", "torch.any.rms_norm", "Made up 0"] and chosen[3] not in (
        "Made up 0",
        "Made up 1",
    )
    assert told.endswith("on Made up 1")


def test_a_command_does_not_import_torch_to_find_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import sys
from layerzero import devices
from layerzero.compat import builds
there = "torch" in sys.modules
builds.torch_build = lambda: builds.Build("2.11.0", "13.0")
gpu = [devices.in_use_by_files(0), devices.in_use_by_files(2)]
builds.torch_build = lambda: builds.Build("2.11.0")
answer([there, gpu, devices.in_use_by_files(2), "torch" in sys.modules])
"""
    assert processes.answer(code) == [False, ["cpu", "cuda:0"], "cpu", False]
    # A torch for ROCm or XPU, or one that loads another vendor's backend, is asked.
    monkeypatch.setattr(devices, "in_use", lambda: "asked")
    monkeypatch.setattr(builds, "torch_build", lambda: builds.Build("2.11.0", hip="6.3"))
    assert devices.in_use_by_files(0) == "asked"


def test_calls_of_several_devices_are_not_measured_as_one() -> None:
    model = torch.nn.RMSNorm(8)
    (call,) = lz.calls_of(model, torch.randn(4, 8))
    elsewhere = lz.models.replace(call, device="cuda:1")
    with pytest.raises(lz.errors.ConfigurationError, match="made on cpu, cuda:1"):
        lz.tune(calls=[call, elsewhere])
    assert lz.tune(calls=[call], budget="500ms").device == "cpu"


@pytest.mark.parametrize(
    ("device", "platform", "served"),
    [
        ("h100", "cuda", "torch.cuda."),
        ("mi300x", "rocm", "torch.any."),
        ("xpu-max1550", "xpu", "torch.any."),
        ("gaudi3", "hpu", "torch.any."),
        ("m4-max", "mps", "torch.any."),
        ("cpu", "cpu", ""),
    ],
)
def test_doctor_on_machines_of_every_vendor(device: str, platform: str, served: str, tmp_path: Path) -> None:
    if device == "cpu":
        file = tmp_path / "cpu.json"
        file.write_text(json.dumps({"platform": "cpu", "name": "Plain CPU", "vendor": "amd", "features": ["avx2"]}))
        device = str(file)
    report = json.loads(described.command("doctor", "--json", "--device", device, "--assume", "torch"))
    assert [d["platform"] for d in report["devices"]] == [platform]
    assert report["usable"] and not report["problems"]
    assert all(check["kernel_id"].startswith(served) for check in report["selection"])
    unproven = {one["backend"]: one for one in report["unproven"]}
    assert {"aiter", "habana", "xformers", "hub_flash_attn3", "torchao", "flash_attn"} <= set(unproven)
    assert unproven["aiter"]["installed"] is None and not unproven["aiter"]["named"] and unproven["aiter"]["why"]
    assert unproven["flash_attn"]["kernels"][0] == "flash_attn.v2.train" and unproven["aiter"]["kernels"] == []
    text = described.command("doctor", "--device", device, "--assume", "torch")
    assert "Unproven: used where the setting backends.unproven names them" in text and "aiter" in text
