"""Gaudi: what is declared, put to the engine; what is called, on functions of the same signatures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import described
import layerzero as lz
import pytest
import torch
from attention_calls import Dense, dense_calls, least
from described import adapter, takes
from fake_habana import Habana
from layerzero import backend_files
from row_calls import Rope, Rows, ropes

VERSION = "1.22.0.740"
SDPA = "habana.fused_sdpa"
PLAIN = Dense(seq_q=128, seq_k=128, head_dim=128, v_dim=128, dtype="bfloat16")


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if it were installed."""
    with described.registered("habana", VERSION):
        yield


@pytest.fixture
def habana(monkeypatch: pytest.MonkeyPatch) -> Habana:
    """The framework in its place."""
    fake = Habana()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(metadata, "version", lambda _: VERSION)
    monkeypatch.setattr(torch, "hpu", SimpleNamespace(is_available=lambda: True), raising=False)
    assert adapter("habana").detect() == VERSION
    return fake


# --- what is declared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "device", "flags", "reason"),
    [
        (PLAIN, "gaudi3", (), None),
        (PLAIN, "h100", (), "[PLATFORM_MISMATCH] runs on hpu, this is cuda"),
        (PLAIN, "mi300x", (), "[PLATFORM_MISMATCH] runs on hpu, this is rocm"),
        (replace(PLAIN, dtype="float32"), "gaudi3", (), None),
        (replace(PLAIN, dtype="float16"), "gaudi3", (), "[DTYPE_UNSUPPORTED]"),
        (replace(PLAIN, head_dim=320, v_dim=320), "gaudi3", (), "[HEAD_DIM_TOO_LARGE]"),
        (replace(PLAIN, head_dim=192), "gaudi3", (), "[CONSTRAINT_FAILED] v_dim == head_dim"),
        (replace(PLAIN, heads=8, kv_heads=2), "gaudi3", (), None),
        (replace(PLAIN, seq_q=1), "gaudi3", (), None),
        (replace(PLAIN, seq_k=256), "gaudi3", (), "[CONSTRAINT_FAILED] not causal or seq_q == seq_k"),
        (replace(PLAIN, seq_k=256, causal=False), "gaudi3", (), None),
        (replace(PLAIN, causal=False, mask="bfloat16"), "gaudi3", (), None),
        (replace(PLAIN, causal=False, mask="bool"), "gaudi3", (), "[CONSTRAINT_FAILED] not attn_mask.present"),
        (replace(PLAIN, window_left=9), "gaudi3", (), "[PARAM_UNSUPPORTED] window is 9 to the left"),
        (replace(PLAIN, softcap=9.0), "gaudi3", (), "[PARAM_UNSUPPORTED] softcap"),
        (replace(PLAIN, alibi=True), "gaudi3", (), "[INPUT_UNSUPPORTED]"),
        (PLAIN, "gaudi3", ("--requires-grad",), "[AUTOGRAD_UNSUPPORTED]"),
        (PLAIN, "gaudi3", ("--deterministic",), "[NON_DETERMINISTIC]"),
    ],
)
def test_what_is_declared(call: Dense, device: str, flags: tuple[str, ...], reason: str | None) -> None:
    reasons = call.ask(device, *flags)[SDPA]
    assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


@pytest.mark.parametrize(
    ("call", "kernel_id", "reason"),
    [
        (Rows("norm.rms"), "habana.rms_norm", None),
        (Rows("norm.rms", given=()), "habana.rms_norm", "["),
        (Rows("norm.rms", weight_dtype="float32"), "habana.rms_norm", "["),
        (Rows("norm.fused_add_rms", dtype="float32"), "habana.add_rms_norm", None),
        (Rope(), "habana.rope", None),
        (Rope(positions="all", positions_dtype="int32"), "habana.rope", None),
        (Rope(table_dtype="float32"), "habana.rope", "["),
    ],
)
def test_what_is_declared_of_rows(call: Rows | Rope, kernel_id: str, reason: str | None) -> None:
    reasons = call.ask("gaudi3")[kernel_id]
    assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


def test_older_frameworks_are_not_used() -> None:
    with described.registered("habana", "1.15.1"):
        assert PLAIN.ask("gaudi3")[SDPA][0].startswith("[VERSION_UNSUPPORTED]")
    lz.register_backend(
        backend_files.folder("habana") / "capabilities.json", adapter("habana").KERNELS, version=VERSION
    )


# --- what is called ---------------------------------------------------------------------------------------------------


def test_calls_the_engine_lets_through_are_right(habana: Habana) -> None:
    torch.manual_seed(0)
    ran: dict[str, int] = {}
    for call in dense_calls(
        7, 160, dtype=("float32", "bfloat16"), window_left=(-1,), window_right=(-1,), softcap=(0.0,), mask=(None, "own")
    ):
        masked = call.mask is not None and (call.cross or not call.causal)
        call = replace(call, mask=call.dtype if masked else None)
        for name in takes(call.ask("gaudi3"), SDPA):
            tensors = call.tensors()
            before = {key: t.clone() for key, t in tensors.items()}
            function = adapter("habana").KERNELS[name]
            call.check(function(**call.arguments(function, tensors)), call.contract(tensors))
            assert all(torch.equal(t, before[key]) for key, t in tensors.items()), "an argument was written to"
            kind = f"{name}{' masked' if masked else ''}"
            ran[kind] = ran.get(kind, 0) + 1
    assert len(ran) == 4 and min(ran.values()) >= least(5), ran


def test_a_mask_for_all_is_given_four_dimensions(habana: Habana) -> None:
    call = Dense(causal=False, mask="bfloat16", dtype="bfloat16")
    tensors = call.tensors()
    function = adapter("habana").KERNELS[SDPA]
    for mask in (tensors["attn_mask"][0, 0], tensors["attn_mask"][0, 0, 5:6], tensors["attn_mask"][:, :, 3:4]):
        given = {**tensors, "attn_mask": mask}
        whole = {**tensors, "attn_mask": mask.expand(2, 1, 24, 24)}
        call.check(function(**call.arguments(function, given)), call.contract(whole))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 5, 40), (7,)])
def test_rows_are_right(habana: Habana, dtype: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for op, name in (("norm.rms", "habana.rms_norm"), ("norm.fused_add_rms", "habana.add_rms_norm")):
        Rows(op, shape, dtype).run(adapter("habana").KERNELS[name])


def test_rotations_are_right(habana: Habana) -> None:
    torch.manual_seed(0)
    calls = [call for call in ropes(("float32", "bfloat16"), positions_dtype="int32") if call.layout != "BHSD"]
    for call in calls:
        call.run(adapter("habana").KERNELS["habana.rope"])
    assert not [call for call in calls[::5] if call.ask("gaudi3")["habana.rope"]]


# --- what is found ----------------------------------------------------------------------------------------------------


def test_the_engine_loads_the_document() -> None:
    known = {k.kernel_id: k for k in lz.list_kernels() if k.backend == "habana"}
    assert set(known) == set(adapter("habana").KERNELS)
    assert all(k.platforms == ["hpu"] for k in known.values())


def test_what_is_missing_is_named(habana: Habana, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "hpu", SimpleNamespace(is_available=lambda: False))
    with pytest.raises(RuntimeError, match="no HPU device"):
        adapter("habana").detect()
    del sys.modules["habana_frameworks.torch.hpex.normalization"].FusedRMSNorm
    with pytest.raises(ImportError, match="hpex.normalization .* has no FusedRMSNorm"):
        adapter("habana").detect()
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.hpex.kernels", None)
    with pytest.raises(ImportError, match="hpex.kernels cannot be imported"):
        adapter("habana").detect()
    monkeypatch.undo()
    with pytest.raises(ImportError, match="cannot be imported: No module named 'habana_frameworks'"):
        adapter("habana").detect()
