"""FlashInfer's attention: what is declared, put to the engine; what is called, on classes of the same signatures."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import described
import layerzero as lz
import pytest
import torch
from attention_calls import Dense, Paged, Varlen, dense_calls, least, paged_calls, varlen_calls
from described import SM, adapter, fits, takes
from fake_flashinfer import FlashInfer, install
from flashinfer_installed import (
    BACKEND,
    CORES,
    DECODE,
    PREFILL,
    PREFILLS,
    RAGGED,
    SINGLE,
    both_registered,
    kernel,
    kernels,
)

ONE = Dense(batch=1, seq_q=128, seq_k=128, head_dim=128, v_dim=128)
TWO = replace(ONE, batch=2)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if it were installed."""
    with both_registered():
        yield


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    """The library in place, and found."""
    return install(monkeypatch, FlashInfer())


@pytest.mark.parametrize(
    ("call", "device", "flags", "kernel_id", "reason"),
    [
        # From Turing on, which has no bfloat16 and little shared memory.
        (ONE, "t4", (), SINGLE, None),
        (replace(ONE, dtype="bfloat16"), "t4", (), SINGLE, "[CONSTRAINT_FAILED] dtype != bfloat16 or sm >= 80"),
        (replace(ONE, head_dim=256, v_dim=256), "t4", (), SINGLE, "[CONSTRAINT_FAILED] head_dim <= 128 or sm >= 80"),
        (replace(ONE, head_dim=256, v_dim=256), "b200", (), SINGLE, None),
        (ONE, "mi300x", (), SINGLE, "[PLATFORM_MISMATCH]"),
        (replace(ONE, dtype="float32"), "h100", (), SINGLE, "[DTYPE_UNSUPPORTED]"),
        # Head sizes it is compiled for.
        (replace(ONE, head_dim=80, v_dim=80), "h100", (), SINGLE, "[HEAD_DIM_INVALID]"),
        (replace(ONE, head_dim=192), "h100", (), SINGLE, None),
        (replace(ONE, head_dim=192, v_dim=192), "h100", (), SINGLE, "[CONSTRAINT_FAILED] head_dim != 192"),
        # No batch dimension.
        (TWO, "h100", (), SINGLE, "[CONSTRAINT_FAILED] batch"),
        (TWO, "h100", (), RAGGED, None),
        (ONE, "h100", (), RAGGED, "[CONSTRAINT_FAILED] batch"),
        (replace(ONE, heads=8, kv_heads=2), "h100", (), SINGLE, None),
        # Masks, windows, softcap, slopes, gradients.
        (replace(ONE, causal=False, mask="bool"), "h100", (), SINGLE, "[ATTN_MASK_UNSUPPORTED]"),
        (replace(ONE, window_left=16, softcap=5.0), "h100", (), SINGLE, None),
        (replace(ONE, window_left=16, window_right=3), "h100", (), SINGLE, None),
        (
            replace(ONE, causal=False, window_left=16),
            "h100",
            (),
            SINGLE,
            "[CONSTRAINT_FAILED] causal or window_left < 0",
        ),
        (replace(ONE, seq_k=64, causal=False), "h100", (), SINGLE, None),
        (replace(ONE, alibi=True), "h100", (), SINGLE, "[INPUT_UNSUPPORTED]"),
        (ONE, "h100", ("--requires-grad",), SINGLE, "[AUTOGRAD_UNSUPPORTED]"),
        (replace(TWO, batch=20000, seq_q=1, seq_k=4096), "h100", (), RAGGED, "[CONSTRAINT_FAILED] batch * seq_q"),
        # Graphs: a plan is made on the host.
        (ONE, "h100", ("--capturing",), SINGLE, None),
        (TWO, "h100", ("--capturing",), RAGGED, "[CUDA_GRAPH_UNSAFE]"),
        (Paged(), "h100", (), DECODE, None),
        (Paged(), "h100", ("--capturing",), DECODE, "[CUDA_GRAPH_UNSAFE]"),
        (Paged(block_size=7, index_dtype="int64"), "h100", (), DECODE, None),
        (Paged(heads=10), "h100", (), DECODE, "[CONSTRAINT_FAILED] heads / max(kv_heads, 1) in [1, 2, 3, 4, 8]"),
        (Paged(heads=10), "h100", (), CORES, None),
        (Paged(head_dim=96), "h100", (), DECODE, "[HEAD_DIM_INVALID]"),
        (Paged(cache_dtype="float8_e4m3fn"), "h100", (), DECODE, None),
        (Paged(cache_dtype="bfloat16"), "h100", (), DECODE, "[CONSTRAINT_FAILED] key_cache.dtype == query.dtype"),
        (Paged(cache_dtype="float32"), "h100", (), DECODE, "[KV_CACHE_DTYPE_MISMATCH]"),
        (Paged(prefill=True), "h100", (), PREFILL, None),
        (Paged(prefill=True, causal=False, window_left=3), "h100", (), PREFILL, "[CONSTRAINT_FAILED] causal or window"),
    ],
)
def test_what_is_declared(
    call: Dense | Paged, device: str, flags: tuple[str, ...], kernel_id: str, reason: str | None
) -> None:
    reasons = call.ask(device, *flags)[kernel_id]
    if reason is None:
        assert not reasons
    else:
        assert any(line.startswith(reason) for line in reasons), reasons


def test_heads_first_is_laid_out_anew_for_sequences_one_after_another() -> None:
    shapes = replace(TWO, layout="BHSD").shapes
    printed = described.command(
        "explain", "--op", "attention", "--device", "h100", "--dtype", "fp16", "--layout", "BHSD",
        *(f"--shape={name}={'x'.join(map(str, shape))}" for name, shape in shapes.items()),
    )  # fmt: skip
    assert "needs layout + contiguous" in next(l for l in printed.splitlines() if f" {RAGGED} " in l), printed


def test_calls_the_engine_lets_through_are_right(fake: FlashInfer) -> None:
    torch.manual_seed(0)
    ran: dict[str, int] = {}
    choices = {"head_dim": (64, 64, 128, 20), "window_right": (-1, -1, 2), "layout": ("BSHD", "BSHD", "BHSD")}
    for number, call in enumerate(dense_calls(9, 200, **choices)):
        call = replace(call, v_dim=call.head_dim if number % 5 else call.v_dim)
        device = ("t4", "h100", "b200")[number % 3]
        fake.sm = SM[device]
        for name in takes(call.ask(device, "--strict"), BACKEND):
            tensors = call.tensors()
            function = kernel(name)
            call.check(function(**call.arguments(function, tensors)), call.contract(tensors))
            ran[name] = ran.get(name, 0) + 1
    assert set(ran) == {SINGLE, RAGGED, f"{SINGLE}.cross", f"{RAGGED}.cross"} and min(ran.values()) >= least(2), ran


def test_paged_calls_the_engine_lets_through_are_right(fake: FlashInfer) -> None:
    torch.manual_seed(1)
    ran: dict[str, int] = {}
    choices: dict[str, Any] = {"head_dim": (64, 64, 128), "block_size": (1, 7, 16), "prefill": (False, True, True)}
    for call in paged_calls(5, 120, **choices, cache_dtype=(None, None, "float8_e4m3fn", "float8_e5m2")):
        for name in takes(call.ask("h100"), BACKEND):
            tensors = call.tensors()
            before = {key: t.clone() for key, t in tensors.items()}
            function = kernel(name)
            call.check(function(**call.arguments(function, tensors)), call.expected(tensors))
            assert all(torch.equal(t.double(), before[key].double()) for key, t in tensors.items())
            ran[name] = ran.get(name, 0) + 1
    wanted = {name for name in kernels() if ".paged." in name and "mla" not in name and "cascade" not in name}
    assert set(ran) == wanted and min(ran.values()) >= least(4), ran


def test_nothing_is_copied_that_can_be_turned(fake: FlashInfer) -> None:
    for layout in ("BSHD", "BHSD"):
        call = Dense(batch=1, seq_k=40, kv_heads=2, layout=layout)
        tensors = call.tensors()
        function = kernel(SINGLE)
        output = function(**call.arguments(function, tensors))
        seen = fake.calls[-1]
        assert all(seen[t].data_ptr() == tensors[name].data_ptr() for t, name in zip("qkv", tensors, strict=True))
        assert seen["kv_layout"] == "NHD" and [seen[t].shape for t in "qkv"] == [(24, 4, 64), (40, 2, 64), (40, 2, 64)]
        assert output.shape == tensors["query"].shape


def test_what_cannot_be_described_to_the_copy_engine_is_copied(fake: FlashInfer) -> None:
    """A dimension of one whose stride is odd, and one that is repeated."""
    calls = {
        "one query": (Dense(batch=1, seq_q=1, kv_heads=4), "query", 1),
        "one key": (Dense(batch=1, seq_q=1, seq_k=1, kv_heads=4), "key", 1),
        "one head": (Dense(batch=1, heads=1, kv_heads=1, layout="BHSD"), "value", 1),
        "one head of many sequences": (Dense(batch=3, heads=1, kv_heads=1), "query", 2),
        "repeated heads": (Dense(batch=1, heads=4, kv_heads=4, layout="BHSD"), "key", 1),
    }
    for what, (call, name, axis) in calls.items():
        tensors = call.tensors()
        one = tensors[name]
        if what == "repeated heads":
            tensors[name] = one[:, :1].expand_as(one)
        else:
            strides = list(one.stride())
            strides[axis] = 3
            tensors[name] = one.as_strided(one.shape, strides)
        function = kernel(SINGLE if call.batch == 1 else RAGGED)
        call.check(function(**call.arguments(function, tensors)), call.contract(tensors))


def test_packed_sequences(fake: FlashInfer) -> None:
    torch.manual_seed(5)
    name = "flashinfer.ragged_prefill.varlen"
    ran = 0
    for call in varlen_calls(5, 90, head_dim=(64, 128), index_dtype=("int32",)):
        if name in takes(call.ask("h100"), name):
            tensors = call.tensors()
            call.check(kernel(name)(**call.arguments(kernel(name), tensors)), call.expected(tensors))
            ran += 1
    assert ran >= least(20)
    call = Varlen(rows=(2, 4), lengths=(5, 9))
    with pytest.raises(lz.InvalidCallError, match="max_seqlen_k is 8, expected at least 9"):
        kernel(name)(**{**call.arguments(kernel(name), call.tensors()), "max_seqlen_k": 8})


# --- what is found ----------------------------------------------------------------------------------------------------


def test_the_engine_loads_the_document() -> None:
    for backend in (BACKEND, PREFILLS):
        assert {k.kernel_id for k in lz.list_kernels() if k.backend == backend} == set(adapter(backend).KERNELS)


def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="there is no CUDA toolkit; install one, or flashinfer-jit-cache"):
        install(monkeypatch, FlashInfer(compiler=False))
    compiled = tmp_path / "single_prefill"
    compiled.mkdir()
    (compiled / "single_prefill.so").touch()
    install(monkeypatch, FlashInfer(compiler=False, shipped=tmp_path))
    install(monkeypatch, FlashInfer(compiler=False, cached=tmp_path))
    del sys.modules["flashinfer"].__dict__["BlockSparseAttentionWrapper"]
    with pytest.raises(ImportError, match="flashinfer 0.6.18 has no BlockSparseAttentionWrapper; install 0.6 or newer"):
        adapter(BACKEND).detect()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match="flashinfer cannot be imported"):
        adapter(BACKEND).detect()


# --- on a GPU ---------------------------------------------------------------------------------------------------------

ON_GPU: list[Dense | Paged] = [
    Dense(batch=1, seq_q=129, seq_k=129, head_dim=128, v_dim=128, dtype="bfloat16"),
    Dense(batch=1, seq_q=64, seq_k=200, heads=8, kv_heads=2, head_dim=128, v_dim=128, dtype="bfloat16", layout="BHSD"),
    Dense(batch=1, seq_q=65, seq_k=90, head_dim=128, v_dim=128, dtype="bfloat16", scale=-0.3),
    Dense(batch=3, seq_q=70, seq_k=100, heads=8, kv_heads=2, head_dim=128, v_dim=128, dtype="bfloat16"),
    Dense(batch=3, seq_q=70, seq_k=100, heads=8, kv_heads=2, head_dim=128, v_dim=128, dtype="bfloat16", cross=True),
    Paged(lengths=(5, 700, 0, 256), heads=8, kv_heads=2, head_dim=128, block_size=16, dtype="bfloat16"),
    Paged(lengths=(33, 511), heads=10, kv_heads=2, head_dim=128, block_size=16, dtype="bfloat16", layout="HND"),
    Paged(
        prefill=True, lengths=(5, 700, 0, 256), rows=(8, 100, 2, 256), lead=1, tail=2, heads=8, head_dim=128,
        block_size=16, dtype="bfloat16",
    ),
]  # fmt: skip


@pytest.fixture
def found() -> Iterator[str]:
    """The library itself, on this machine's GPU."""
    with described.library_itself(BACKEND, PREFILLS) as version:
        yield version


@pytest.mark.gpu
def test_the_library_itself_is_right(found: str) -> None:
    torch.manual_seed(0)
    ran: set[str] = set()
    for call in ON_GPU:
        tensors = call.tensors("cuda")
        keywords = call.keywords(tensors)
        for name in kernels():
            ours = name.startswith(("flashinfer.single", "flashinfer.ragged", "flashinfer.paged"))
            same = (".cross" in name) is (isinstance(call, Dense) and call.cross)
            if ours and same and fits(name, keywords):
                want = call.contract(tensors).cpu() if isinstance(call, Dense) else call.expected(tensors)
                # Twice: planned, and by the plan that is kept.
                for _ in range(2):
                    call.check(lz.run_kernel(name, **keywords).cpu(), want)
                ran.add(name)
    assert {SINGLE, RAGGED, DECODE, CORES, PREFILL} <= ran


@pytest.mark.gpu
def test_signatures_are_those_of_the_library(found: str) -> None:
    library, fake = importlib.import_module("flashinfer"), FlashInfer().modules()["flashinfer"]
    assert {"q", "k", "v", "causal", "kv_layout", "sm_scale", "window_left", "logits_soft_cap"} <= set(
        inspect.signature(library.single_prefill_with_kv_cache).parameters
    )
    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"):
        ours = inspect.signature(getattr(fake, name).plan).parameters
        theirs = inspect.signature(getattr(library, name).plan).parameters
        assert list(ours)[:9] == list(theirs)[:9]
