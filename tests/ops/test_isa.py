"""The suite on other CPUs: parts of it run again, in processes of their own, with fewer instruction sets than this CPU has.

torch, oneDNN and LayerZero each have a limit of their own. `make test-isa` runs every file listed here under every limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import layerzero as lz
import processes
import pytest
import torch

ROOT = Path(__file__).parents[2]
FULL = os.environ.get("LZ_TEST_SCALE", "quick") != "quick"

#: CPUs by what they lack: LayerZero's limit, oneDNN's, torch's.
CPUS: dict[str, dict[str, str]] = {
    "as it is": {},
    "Sapphire Rapids without AMX": {
        "LAYERZERO_MAX_CPU_ISA": "avx512_fp16",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
        "ATEN_CPU_CAPABILITY": "avx512",
    },
    "Ice Lake": {
        "LAYERZERO_MAX_CPU_ISA": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "ATEN_CPU_CAPABILITY": "avx512",
    },
    "AVX2": {"LAYERZERO_MAX_CPU_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "no AVX": {"LAYERZERO_MAX_CPU_ISA": "baseline", "ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
    "oneDNN alone limited": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    # oneDNN keeps everything but AMX: with AMX, torch's own flash attention raises in half precision, see below.
    "torch alone limited": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
#: What depends on the CPU most: kernels against the cases, our own SIMD kernels, texts.
QUICK = (
    "tests/backends/test_adapters.py",
    "tests/ops/test_native_path.py",
    "tests/cli/test_docs.py",
    "tests/control/test_control_config.py",
    "-k",
    "onednn or two_parts or sdpa.flash] or torch.linear or native_path or inspect or lock_on_a_kernel_that_cannot_serve",
)
#: All that runs kernels or shows texts.
FILES = (
    "backends/test_adapters.py",
    "backends/test_torch_alternatives.py",
    *sorted(f"ops/{path.name}" for path in (ROOT / "tests" / "ops").glob("test_correct_*.py")),
    "torch/test_torch_ops.py",
    "torch/test_torch_autograd.py",
    "ops/test_spec_examples.py",
    "control/test_inspection.py",
    "control/test_control_config.py",
    "cli/test_docs.py",
)


def child(arguments: list[str], cpu: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, as on that CPU, at the quick scale."""
    limits = ("LAYERZERO_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "LZ_TEST_SCALE")
    environment = {name: value for name, value in os.environ.items() if name not in limits and "PYTEST" not in name}
    # As on a machine without a GPU, which is what these tests are about.
    environment |= CPUS[cpu] | {"PYTHONPATH": str(processes.PACKAGE), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "cpu", ["AVX2", pytest.param("Ice Lake", marks=pytest.mark.slow), pytest.param("no AVX", marks=pytest.mark.slow)]
)
@pytest.mark.skipif(FULL, reason="the whole matrix contains it")
def test_what_depends_on_the_cpu_passes_on_others(cpu: str) -> None:
    done = child([*QUICK], cpu)
    assert done.returncode == 0, f"{cpu}\n{done.stdout[-4000:]}{done.stderr[-1000:]}"


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.skipif(not FULL, reason="hours; LZ_TEST_SCALE=full")
def test_the_suite_passes_on_other_cpus(cpu: str, file: str) -> None:
    # That page lists the settings that were changed, and the limit of the CPU is one.
    done = child([f"tests/{file}", "-k", "not control.md"], cpu)
    assert done.returncode == 0, f"{cpu}: {file}\n{done.stdout[-8000:]}{done.stderr[-1000:]}"


# --- what is chosen for a CPU -----------------------------------------------------------------------------------------

#: What a level leaves of the instruction sets that documents name.
LEVELS = {
    "baseline": set(),
    "avx2": {"avx2"},
    "avx512": {"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"},
    "avx512_bf16": {"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx512bf16"},
    "avx512_fp16": {"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx512bf16", "avx512fp16"},
}


def needed() -> dict[str, set[str]]:
    """The instruction sets that the documents of the CPU backends name, and those of our own kernels, by kernel."""
    wanted: dict[str, set[str]] = {}
    for path in (processes.PACKAGE / "layerzero" / "backends").glob("*/capabilities.json"):
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if document["platform"] == "cpu":
            kernels = [kernel for listed in document["ops"].values() for kernel in listed]
            wanted |= {k["kernel_id"]: set(k.get("instruction_sets", ())) for k in kernels}
    ours = ["rms_norm", "add_rms_norm", "layer_norm", "silu_mul", "gelu", "softmax", "rope", "quantize", "dequantize"]
    ours += ["linear", "linear_packed", "linear_int8", "linear_int4"]
    ours += [f"attention.{kind}.decode" for kind in ("standard", "gqa", "cross")]
    ours += [f"attention.{kind}.decode.paged" for kind in ("standard", "gqa")]
    ours += [f"attention.{kind}.prefill" for kind in ("standard", "gqa", "cross")]
    ours += [f"attention.{kind}.prefill.varlen" for kind in ("standard", "gqa")]
    ours += ["sample_topk", "sample_topp"]
    wanted |= {f"lz_cpu.{name}.avx2": {"avx2"} for name in ours}
    avx512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    wanted |= {"lz_cpu.linear_packed.avx512_bf16": {*avx512, "avx512bf16"}}
    products = ["linear_packed", "linear_int8", "linear_int4"]
    wanted |= {f"lz_cpu.{name}.amx": {*avx512, "amx-tile", "amx-bf16"} for name in products}
    pairs = [name for name in ours if ".prefill" in name]
    wanted |= {f"lz_cpu.{name}.avx512_bf16": {*avx512, "avx512bf16"} for name in pairs}
    wanted |= {f"lz_cpu.{name}.amx": {*avx512, "avx512bf16", "amx-tile", "amx-bf16"} for name in pairs}
    return wanted | {f"lz_cpu.{name}.avx512": avx512 for name in ours}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.usefixtures("restored")
def test_a_level_excludes_exactly_the_kernels_beyond_it(level: str) -> None:
    here = {kernel.kernel_id for kernel in lz.list_kernels() if kernel.available}
    lz.configure(max_cpu_isa=level)
    left = {kernel.kernel_id for kernel in lz.list_kernels() if kernel.available}
    beyond = {kernel for kernel, sets in needed().items() if not sets <= LEVELS[level]}
    assert left == here - beyond


@pytest.mark.usefixtures("restored")
def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(lz.ConfigurationError, match="max_cpu_isa: expected baseline or avx2.*avx1024"):
        lz.configure(max_cpu_isa="avx1024")


def test_kernels_a_library_has_no_instruction_sets_for_are_not_chosen() -> None:
    """oneDNN told to use less than the CPU has: nothing is chosen that it then refuses, and the reason is named."""
    code = """
    import os
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    import layerzero as lz, torch
    x = torch.randn(4, 8, dtype=torch.float16)
    states = {}
    for kernel, op in (("onednn.gelu", "gelu"), ("onednn.gelu.bf16", "gelu"), ("onednn.gelu.f16", "gelu")):
        dtype = {"onednn.gelu": torch.float32, "onednn.gelu.bf16": torch.bfloat16}.get(kernel, torch.float16)
        accepted, reasons = lz.validate(kernel, x.to(dtype))
        states[kernel] = accepted or sorted({reason.code for reason in reasons})
    wanted = torch.nn.functional.gelu(x.double())
    off = float((lz.gelu(x).double() - wanted).abs().max())
    answer([states, off])
    """
    states, off = processes.answer(code)
    assert states == {
        "onednn.gelu": True,
        "onednn.gelu.bf16": ["INSTRUCTION_SET_MISMATCH"],
        "onednn.gelu.f16": ["INSTRUCTION_SET_MISMATCH"],
    }
    assert off < 1e-3 and torch.backends.mkldnn.is_available()


def test_a_kernel_that_torch_cannot_run_under_its_own_limit_does_not_fail_the_call() -> None:
    """Torch limited by `ATEN_CPU_CAPABILITY` on a CPU with AMX: its flash attention raises in half precision.

    "pack_vnni2 is only supported when avx512 is supported" is what `scaled_dot_product_attention` itself says there. The
    call must be served by another kernel, with the right answer.
    """
    code = """
    import os
    os.environ["ATEN_CPU_CAPABILITY"] = "default"
    import layerzero as lz, torch
    torch.manual_seed(0)
    tensors = [torch.randn(2, 64, 4, 64, dtype=torch.bfloat16) for _ in range(3)]
    given = lz.attention(*tensors, causal=False)
    wanted = torch.nn.functional.scaled_dot_product_attention(*(t.double().transpose(1, 2) for t in tensors))
    answer((given.double() - wanted.transpose(1, 2)).abs().max().item())
    """
    assert processes.answer(code) < 2e-2
