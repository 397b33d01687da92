"""Plain torch on every device torch has: what is declared, on described devices of every vendor; what is called, on CPU
tensors and on a device that is none torch knows."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import adapter_cases
import described
import open_device
import processes
import pytest
import torch
from adapter_cases import Kernel

KERNELS = adapter_cases.kernels("torch_any")
DEVICES = ("mi300x", "xpu-max1550", "gaudi3", "m4-max", "privateuse1")
OPERATIONS = sorted(path.stem for path in (adapter_cases.ROOT / "testdata" / "ops").glob("*.json"))
# Weights are packed on a CPU, for a CPU.
OPERATIONS.remove("mlp.linear.packed")
#: How the command line writes what Python writes otherwise.
VALUES = {"True": "true", "False": "false"}
#: What only CUDA devices have, or what only there was seen to hold.
OF_CUDA = {"min_sm", "max_sm", "is_cuda_graph_safe", "grid_layout", "deterministic", "batch_invariant"}


def taken(kernel: Kernel) -> list[adapter_cases.Case]:
    """The cases a kernel takes whose data are not wrong: that is only looked for in host memory."""
    cases = (case for op in kernel.ops for case in adapter_cases.cases(op))
    return [case for case in cases if case.expect is not None and not adapter_cases.reason_to_skip(kernel, case)]


def test_the_document_says_no_more_than_that_of_cuda() -> None:
    def listed(backend: str) -> dict[str, dict[str, Any]]:
        ops = adapter_cases.document(backend)["ops"].values()
        return {kernel["kernel_id"]: kernel for kernels in ops for kernel in kernels}

    of_cuda = listed("torch_cuda")
    for name, kernel in listed("torch_any").items():
        same = of_cuda[name.replace("torch.any.", "torch.cuda.")]
        assert not OF_CUDA & set(kernel), name
        for key in {*kernel, *same} - OF_CUDA - {"kernel_id", "params", "conditions"}:
            assert kernel.get(key) == same.get(key), (name, key)
        assert set(kernel.get("params", {})) <= set(same.get("params", {})), name
        assert set(kernel.get("conditions", ())) <= set(same.get("conditions", ())), name
    assert adapter_cases.document("torch_any")["platform"] == ["rocm", "xpu", "hpu", "mps", "privateuse1"]
    assert set(adapter_cases.adapter("torch_any").KERNELS) == set(listed("torch_any"))


@pytest.mark.parametrize("kernel", [k for k in KERNELS if not k.id.endswith(".train")], ids=lambda k: k.id)
def test_kernels_agree_with_the_cases(kernel: Kernel) -> None:
    wrong = {f"{c.op} {c.name}": problems for c in taken(kernel) if (problems := adapter_cases.run(kernel, c))}
    assert not wrong
    assert taken(kernel), "no case reaches this kernel"


@pytest.mark.parametrize("device", DEVICES)
def test_every_operation_is_served_on_every_device(device: str, tmp_path: Path) -> None:
    if device == "privateuse1":
        file = tmp_path / "moon.json"
        file.write_text(json.dumps({"platform": "privateuse1", "name": "Moon", "torch_type": "moon"}))
        device = str(file)
    for op in OPERATIONS:
        case = next(
            c for c in adapter_cases.cases(op) if c.expect is not None and not c.name.startswith(("nan", "empty"))
        )
        shapes = {name: unpacked(stored) for name, stored in case.tensors.items()}
        dtype = next(iter(case.dtypes.values()))
        given = ((name, str(value)) for name, value in case.params.items() if not isinstance(value, list))
        flags = [flag for name, value in given for flag in ("--param", f"{name}={VALUES.get(value, value)}")]
        layout = None if ".mla." in op else case.layout
        answer = described.ask(op, device, shapes, dtype, *flags, dtypes=case.dtypes, layout=layout)
        assert described.takes(answer, "torch.any."), (op, case.name, answer)


def unpacked(stored: dict[str, Any]) -> list[int]:
    """The sizes of a tensor, as a call is described."""
    return list(stored["shape"])


def test_what_computes_in_float64_does_so_on_the_host_where_the_device_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    host = importlib.import_module(f"{adapter_cases.PACKAGE}.backends.torch_any.host")
    asked: list[str] = []

    def has_float64(torch_type: str) -> bool:
        asked.append(torch_type)
        return False

    seen: list[torch.Tensor] = []

    def twice(input: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(input)
        return input * count, input

    monkeypatch.setattr(host, "has_float64", has_float64)
    x = torch.randn(3)
    once, again = host.wide(twice)(x, 2)
    torch.testing.assert_close(once, 2 * x)
    torch.testing.assert_close(again, x)
    assert asked == ["cpu"] and list(inspect.signature(host.wide(twice)).parameters) == ["input", "count"]
    # A norm needs it only for an eps that float32 squares would lose.
    asked.clear()
    norm = adapter_cases.adapter("torch_any").KERNELS["torch.any.rms_norm"]
    norm(torch.randn(2, 4), None, 1e-6)
    assert not asked
    norm(torch.randn(2, 4), None, 1e-40)
    assert asked == ["cpu"]


@pytest.mark.slow
def test_every_case_on_a_device_torch_does_not_know() -> None:
    done = processes.python(processes.SUPPORT / "open_device_cases.py", built(), path=[processes.SUPPORT])
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert not found["wrong"]
    assert set(found["ran"]) == {kernel.id for kernel in KERNELS if not kernel.id.endswith(".train")}
    assert sum(found["ran"].values()) > 1500


@pytest.mark.slow
def test_calls_on_a_device_torch_does_not_know() -> None:
    code = f"""
    import warnings
    from pathlib import Path
    warnings.simplefilter("ignore")
    import open_device, torch
    open_device.open_up(Path({str(built())!r}))
    import layerzero as lz
    from layerzero import devices
    on = "moon:1"
    x, w = torch.randn(4, 8), torch.randn(8)
    q = torch.randn(1, 16, 4, 32)
    far, weight, query = x.to(on), w.to(on), q.to(on)
    normed, attended = lz.rms_norm(far, weight), lz.attention(query, query, query)
    torch.testing.assert_close(normed.cpu(), torch.nn.functional.rms_norm(x, (8,), w, 1e-6))
    right = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(attended.cpu(), right, rtol=1e-4, atol=1e-4)
    call = {{"op": "rms_norm", "tensors": {{"input": {{"dtype": "float32", "shape": [4, 8]}}}}}}
    table = lz.solve(torch.nn.RMSNorm(8).to(on), far, shape_buckets={{"batch": [8]}}, compile_jit=True)
    tuned = lz.tune("rms_norm", shapes=[(4, 8)], budget="1s")
    answer([
        str(normed.device), lz.which("rms_norm", far).kernel_id, devices.in_use(), lz.explain_call(call).device,
        table.device, table.hardware_signature, tuned.device, tuned.tuned[0].chosen,
    ])
    """
    told = processes.answer(code, path=[processes.SUPPORT])
    device, kernel, in_use, explained, solved, signature, tuned, chosen = told
    assert (device, in_use, solved, tuned) == ("moon:1",) * 4
    assert (kernel, explained, signature) == ("torch.any.rms_norm", "Moon 1", "privateuse1_moon-1")
    assert chosen.startswith("torch.any.")


def built() -> Path:
    """The backend of the device, compiled."""
    try:
        return open_device.library()
    except RuntimeError as error:
        pytest.skip(str(error))
