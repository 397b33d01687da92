"""AMD GPUs: torch, AITER, and FlashAttention on Composable Kernel and on Triton. What is declared, put to the engine; what
is called, on functions of the same signatures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import described
import fake_rocm
import layerzero as lz
import pytest
import torch
from attention_calls import Dense, dense_calls, least
from described import adapter, takes
from layerzero import backend_files
from row_calls import Rope, Rows, ropes

VERSIONS = {"torch_rocm": "2.11.0", "aiter": "0.1.20", "flash_attn_ck": "2.8.3", "flash_attn_triton": "2.8.3"}
PREFIX = {"aiter": "aiter.flash_attn", "flash_attn_ck": "flash_attn.ck", "flash_attn_triton": "flash_attn.triton"}
PLAIN = Dense(seq_q=128, seq_k=128, head_dim=128, v_dim=128)
AITER, CK, TRITON = PREFIX.values()
libraries = pytest.mark.parametrize("backend", list(PREFIX))


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """All of them, as if they were installed."""
    with ExitStack() as stack:
        for backend, version in VERSIONS.items():
            stack.enter_context(described.registered(backend, version))
        yield


def rocm(monkeypatch: pytest.MonkeyPatch, *processors: str) -> None:
    """A torch for ROCm that finds these processors."""
    monkeypatch.setattr(torch.version, "hip", "6.3.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(processors))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(processors))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda n: SimpleNamespace(gcnArchName=f"{processors[n]}:sramecc+:xnack-")
    )


def install(monkeypatch: pytest.MonkeyPatch, backend: str) -> Any:
    """Puts a library in place and has the adapter find it."""
    rocm(monkeypatch, "gfx942")
    monkeypatch.setattr(metadata, "version", lambda _: VERSIONS[backend])
    fake: Any = fake_rocm.Aiter() if backend == "aiter" else fake_rocm.FlashAttention(backend == "flash_attn_triton")
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert adapter(backend).detect() == VERSIONS[backend]
    return fake


# --- what is declared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "device", "flags", "kernel_id", "reason"),
    [
        (PLAIN, "mi300x", (), AITER, None),
        (PLAIN, "mi300x", (), CK, None),
        (PLAIN, "mi300x", (), TRITON, None),
        (PLAIN, "mi300x", (), "torch.rocm.sdpa", None),
        (PLAIN, "mi300x", (), "torch.rocm.sdpa.flash", None),
        (PLAIN, "mi300x", (), "torch.rocm.sdpa.efficient", None),
        (PLAIN, "h100", (), AITER, "[PLATFORM_MISMATCH] runs on rocm, this is cuda"),
        (PLAIN, "t4", (), CK, "[PLATFORM_MISMATCH]"),
        (PLAIN, "b200", (), "torch.rocm.sdpa", "[PLATFORM_MISMATCH]"),
        (PLAIN, "gaudi3", (), TRITON, "[PLATFORM_MISMATCH] runs on rocm, this is hpu"),
        (replace(PLAIN, dtype="float32"), "mi300x", (), AITER, "[DTYPE_UNSUPPORTED]"),
        (replace(PLAIN, dtype="float32"), "mi300x", (), "torch.rocm.sdpa.efficient", None),
        (replace(PLAIN, head_dim=320, v_dim=320), "mi300x", (), CK, "[HEAD_DIM_TOO_LARGE]"),
        (replace(PLAIN, head_dim=84, v_dim=84), "mi300x", (), CK, None),
        (replace(PLAIN, head_dim=84, v_dim=84), "mi300x", (), TRITON, "[HEAD_DIM_ALIGNMENT]"),
        (replace(PLAIN, head_dim=192), "mi300x", (), AITER, None),
        (replace(PLAIN, head_dim=192), "mi300x", (), CK, "[CONSTRAINT_FAILED] v_dim == head_dim"),
        (replace(PLAIN, heads=8, kv_heads=2), "mi300x", (), AITER, None),
        (replace(PLAIN, heads=8, kv_heads=2), "mi300x", (), "torch.rocm.sdpa", None),
        (replace(PLAIN, heads=8, kv_heads=2), "mi300x", (), "torch.rocm.sdpa.flash", "[GQA_UNSUPPORTED]"),
        (replace(PLAIN, window_left=9), "mi300x", (), AITER, None),
        (replace(PLAIN, window_left=0), "mi300x", (), AITER, "[CONSTRAINT_FAILED] window_left != 0"),
        (replace(PLAIN, window_left=9), "mi300x", (), CK, None),
        (replace(PLAIN, window_left=9), "mi300x", (), TRITON, "[PARAM_UNSUPPORTED] window is 9 to the left"),
        (replace(PLAIN, softcap=9.0), "mi300x", (), AITER, "[PARAM_UNSUPPORTED] softcap"),
        (replace(PLAIN, softcap=9.0), "mi300x", (), CK, "[PARAM_UNSUPPORTED] softcap"),
        (replace(PLAIN, softcap=9.0), "mi300x", (), TRITON, "[PARAM_UNSUPPORTED] softcap"),
        (replace(PLAIN, alibi=True), "mi300x", (), AITER, None),
        (replace(PLAIN, alibi=True), "mi300x", (), TRITON, None),
        (replace(PLAIN, causal=False, mask="bool"), "mi300x", (), AITER, "[ATTN_MASK_UNSUPPORTED]"),
        (replace(PLAIN, causal=False, mask="bool"), "mi300x", (), "torch.rocm.sdpa.masked", None),
        # AOTriton aligns top-left.
        (replace(PLAIN, seq_k=256), "mi300x", (), "torch.rocm.sdpa.flash", "[CONSTRAINT_FAILED] not causal or"),
        (replace(PLAIN, seq_q=1), "mi300x", (), "torch.rocm.sdpa.flash", "[CONSTRAINT_FAILED] not causal or"),
        (replace(PLAIN, seq_q=1), "mi300x", (), "torch.rocm.sdpa.efficient", None),
        (replace(PLAIN, seq_k=256), "mi300x", (), "torch.rocm.sdpa.masked", None),
        (PLAIN, "mi300x", ("--requires-grad",), AITER, "[AUTOGRAD_UNSUPPORTED]"),
        (PLAIN, "mi300x", ("--requires-grad",), "torch.rocm.sdpa.train", None),
        (PLAIN, "mi300x", ("--deterministic",), CK, None),
    ],
)
def test_what_is_declared(call: Dense, device: str, flags: tuple[str, ...], kernel_id: str, reason: str | None) -> None:
    reasons = call.ask(device, *flags)[kernel_id]
    assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


@pytest.mark.parametrize(
    ("call", "kernel_id", "reason"),
    [
        (Rows("norm.rms"), "aiter.rms_norm", None),
        (Rows("norm.rms", dtype="float32"), "aiter.rms_norm", "[DTYPE_UNSUPPORTED]"),
        (Rows("norm.rms", weight_dtype="float32"), "aiter.rms_norm", "["),
        (Rows("norm.rms", given=()), "aiter.rms_norm", "["),
        (Rows("norm.rms", (4, 16384)), "aiter.rms_norm", "[CONSTRAINT_FAILED] hidden"),
        (Rows("norm.layer"), "aiter.layer_norm", None),
        (Rows("norm.layer", given=("weight",)), "aiter.layer_norm", "["),
        (Rows("norm.fused_add_rms"), "aiter.add_rms_norm", None),
        (Rows("norm.rms"), "torch.rocm.rms_norm", None),
        (Rows("norm.rms", weight_dtype="float32"), "torch.rocm.rms_norm.composed", None),
        (Rows("activation.silu_mul"), "torch.rocm.silu_mul", None),
        (Rows("activation.gelu"), "torch.rocm.gelu", None),
        (Rope(), "aiter.rope", None),
        (Rope(positions="each"), "aiter.rope", None),
        (Rope(positions="each", positions_dtype="int32"), "aiter.rope", "[DTYPE_UNSUPPORTED] 'positions' is int32"),
        (Rope(table_dtype="float32"), "aiter.rope", "["),
        (Rope(table_dtype="float32"), "torch.rocm.rope", None),
    ],
)
def test_what_is_declared_of_rows(call: Rows | Rope, kernel_id: str, reason: str | None) -> None:
    reasons = call.ask("mi300x")[kernel_id]
    assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


def test_versions_are_asked_for() -> None:
    for backend, version, kernel in (("aiter", "0.1.5", AITER), ("flash_attn_ck", "2.7.4", CK)):
        with described.registered(backend, version):
            reasons = PLAIN.ask("mi300x")[kernel]
            assert reasons and all(line.startswith("[VERSION_UNSUPPORTED]") for line in reasons), reasons
        document = backend_files.folder(backend) / "capabilities.json"
        lz.register_backend(document, adapter(backend).KERNELS, version=VERSIONS[backend])


# --- what is called ---------------------------------------------------------------------------------------------------


@libraries
def test_calls_the_engine_lets_through_are_right(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    install(monkeypatch, backend)
    torch.manual_seed(0)
    ran: dict[str, int] = {}
    for call in dense_calls(7, 160, alibi=(False, False, True)):
        call = replace(call, alibi=call.alibi and not call.cross)
        for name in takes(call.ask("mi300x"), PREFIX[backend]):
            tensors = call.tensors()
            before = {key: t.clone() for key, t in tensors.items()}
            function = adapter(backend).KERNELS[name]
            call.check(function(**call.arguments(function, tensors)), call.contract(tensors))
            assert all(torch.equal(t, before[key]) for key, t in tensors.items()), "an argument was written to"
            ran[name] = ran.get(name, 0) + 1
    assert set(ran) == {PREFIX[backend], f"{PREFIX[backend]}.cross"} and min(ran.values()) >= least(5), ran


@libraries
def test_nothing_is_copied_that_can_be_turned(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    fake = install(monkeypatch, backend)
    function = adapter(backend).KERNELS[PREFIX[backend]]
    for layout in ("BSHD", "BHSD"):
        call = Dense(layout=layout)
        tensors = call.tensors()
        output = function(**call.arguments(function, tensors))
        assert fake.calls[-1]["q"].data_ptr() == tensors["query"].data_ptr()
        assert fake.calls[-1]["q"].shape == (2, 24, 4, 64) and output.shape == call.shape(24, 4, 64)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 40)])
def test_rows_are_right(monkeypatch: pytest.MonkeyPatch, dtype: str, shape: tuple[int, ...]) -> None:
    install(monkeypatch, "aiter")
    torch.manual_seed(0)
    kernels = {"norm.rms": "rms_norm", "norm.layer": "layer_norm", "norm.fused_add_rms": "add_rms_norm"}
    for op, name in kernels.items():
        call = Rows(op, shape, dtype)
        assert not call.ask("mi300x")[f"aiter.{name}"]
        call.run(adapter("aiter").KERNELS[f"aiter.{name}"])


def test_rotations_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "aiter")
    torch.manual_seed(0)
    calls = list(ropes(("float32", "bfloat16")))
    for call in calls:
        call.run(adapter("aiter").KERNELS["aiter.rope"])
    assert not [call for call in calls[::7] if call.ask("mi300x")["aiter.rope"]]


def test_what_torch_calls_is_right_on_the_cpu_too() -> None:
    torch.manual_seed(0)
    functions = adapter("torch_rocm").KERNELS
    for call in dense_calls(3, 60, softcap=(0.0,), head_dim=(64,)):
        for name in takes(call.ask("mi300x"), "torch.rocm.sdpa"):
            if "flash" not in name and "efficient" not in name:
                tensors = call.tensors()
                output = functions[name](**call.arguments(functions[name], tensors))
                call.check(output, call.contract(tensors))


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", list(VERSIONS))
def test_the_engine_loads_the_document(backend: str) -> None:
    known = {k.kernel_id: k for k in lz.list_kernels() if k.backend == backend}
    assert set(known) == set(adapter(backend).KERNELS)
    assert all(k.platforms == ["rocm"] for k in known.values())


def test_processors_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "aiter")
    for processors, reason in (
        (("gfx1100",), "AITER is for gfx942, gfx950, this is gfx1100"),
        (("gfx942", "gfx90a"), "this is gfx90a"),
        ((), "finds no ROCm device"),
    ):
        rocm(monkeypatch, *processors)
        with pytest.raises(RuntimeError, match=reason):
            adapter("aiter").detect()
    rocm(monkeypatch, "gfx1100")
    assert adapter("torch_rocm").detect() == str(torch.__version__)
    monkeypatch.setattr(torch.version, "hip", None)
    for backend in ("aiter", "torch_rocm"):
        with pytest.raises(RuntimeError, match="was built without ROCm"):
            adapter(backend).detect()


@pytest.mark.parametrize(
    ("backend", "other"), [("flash_attn_ck", "flash_attn_triton"), ("flash_attn_triton", "flash_attn_ck")]
)
def test_the_other_build_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch, backend: str, other: str) -> None:
    install(monkeypatch, other)
    with pytest.raises(ImportError, match="FLASH_ATTENTION_TRITON_AMD_ENABLE chooses"):
        adapter(backend).detect()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "aiter")
    monkeypatch.setattr(sys.modules["aiter.ops.mha"], "ENABLE_CK", False)
    with pytest.raises(ImportError, match="this aiter was built without Composable Kernel"):
        adapter("aiter").detect()
    del sys.modules["aiter"].rope_cached_fwd
    with pytest.raises(ImportError, match="has no rope_cached_fwd"):
        adapter("aiter").detect()
    monkeypatch.setitem(sys.modules, "aiter", None)
    with pytest.raises(ImportError, match="aiter cannot be imported"):
        adapter("aiter").detect()
