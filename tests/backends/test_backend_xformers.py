"""xFormers: what is declared, put to the engine; what is called, on functions of the same signatures."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import described
import layerzero as lz
import pytest
import torch
from attention_calls import Dense, dense_calls, least
from described import SM, adapter, takes
from fake_xformers import LocalAttentionFromBottomRightMask, Xformers

BACKEND, VERSION = "xformers", "0.0.35"
FLASH, CUTLASS = "xformers.flash", "xformers.cutlass"
PLAIN = Dense(seq_q=128, seq_k=128, head_dim=128, v_dim=128)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if it were installed."""
    with described.registered(BACKEND, VERSION):
        yield


def install(monkeypatch: pytest.MonkeyPatch, fake: Xformers | None = None) -> Xformers:
    """Puts the library in place and has the adapter find it."""
    fake = fake or Xformers()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert adapter(BACKEND).detect() == VERSION
    return fake


def kernel(name: str) -> Any:
    """A kernel's function."""
    return adapter(BACKEND).KERNELS[name]


@pytest.mark.parametrize(
    ("call", "device", "flags", "kernel_id", "reason"),
    [
        (PLAIN, "t4", (), FLASH, "[SM_TOO_OLD]"),
        (PLAIN, "t4", (), CUTLASS, None),
        (replace(PLAIN, dtype="bfloat16"), "t4", (), CUTLASS, "[CONSTRAINT_FAILED] dtype != bfloat16 or sm >= 80"),
        (replace(PLAIN, dtype="float32"), "a100", (), CUTLASS, None),
        (replace(PLAIN, dtype="float32"), "a100", (), FLASH, "[DTYPE_UNSUPPORTED]"),
        (PLAIN, "b200", (), CUTLASS, "[SM_TOO_NEW]"),
        (PLAIN, "b200", (), FLASH, None),
        (PLAIN, "mi300x", (), FLASH, "[PLATFORM_MISMATCH]"),
        (replace(PLAIN, head_dim=320, v_dim=320), "h100", (), FLASH, "[HEAD_DIM_TOO_LARGE]"),
        (replace(PLAIN, head_dim=320, v_dim=320), "h100", (), CUTLASS, None),
        (replace(PLAIN, head_dim=84, v_dim=84), "h100", (), FLASH, "[HEAD_DIM_ALIGNMENT]"),
        (replace(PLAIN, head_dim=84, v_dim=84), "h100", (), CUTLASS, "[CONSTRAINT_FAILED] head_dim * dtype_bits % 128"),
        (replace(PLAIN, head_dim=84, v_dim=84, dtype="float32"), "h100", (), CUTLASS, None),
        (replace(PLAIN, v_dim=64), "h100", (), CUTLASS, None),
        # Groups of heads have no backward, and run on streams of their own in the CUTLASS operator.
        (replace(PLAIN, heads=8, kv_heads=2), "h100", (), FLASH, None),
        (replace(PLAIN, heads=8, kv_heads=2), "h100", (), CUTLASS, "[GQA_UNSUPPORTED]"),
        (replace(PLAIN, heads=8, kv_heads=2), "h100", ("--requires-grad",), f"{FLASH}.train", "[GQA_UNSUPPORTED]"),
        # Masks: of the query's dtype, on rows of 16 bytes.
        (replace(PLAIN, causal=False, mask="bool"), "h100", (), FLASH, "[ATTN_MASK_UNSUPPORTED]"),
        (replace(PLAIN, causal=False, mask="bool"), "h100", (), CUTLASS, None),
        (replace(PLAIN, causal=False, mask="float16"), "h100", (), CUTLASS, None),
        (
            replace(PLAIN, causal=False, mask="float32"),
            "h100",
            (),
            CUTLASS,
            "[CONSTRAINT_FAILED] not attn_mask.present",
        ),
        (replace(PLAIN, causal=False, mask="bool", seq_k=33), "h100", (), CUTLASS, "[CONSTRAINT_FAILED] not attn_mask"),
        (replace(PLAIN, causal=False, mask="bool"), "h100", ("--requires-grad",), f"{CUTLASS}.train", "[ATTN_MASK_UN"),
        # Positions.
        (replace(PLAIN, window_left=5), "h100", ("--requires-grad",), f"{CUTLASS}.train", "[PARAM_UNSUPPORTED]"),
        (replace(PLAIN, window_left=5), "h100", ("--requires-grad",), f"{FLASH}.train", None),
        (replace(PLAIN, softcap=5.0), "h100", (), FLASH, "[PARAM_UNSUPPORTED] softcap"),
        (replace(PLAIN, alibi=True), "h100", (), CUTLASS, "[INPUT_UNSUPPORTED]"),
        (PLAIN, "h100", ("--requires-grad", "--deterministic"), f"{FLASH}.train", "[NON_DETERMINISTIC]"),
        (PLAIN, "h100", ("--capturing",), FLASH, "[CUDA_GRAPH_UNSAFE]"),
    ],
)
def test_what_is_declared(call: Dense, device: str, flags: tuple[str, ...], kernel_id: str, reason: str | None) -> None:
    reasons = call.ask(device, *flags)[kernel_id]
    if reason is None:
        assert not reasons
    else:
        assert any(line.startswith(reason) for line in reasons), reasons


def test_calls_the_engine_lets_through_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    torch.manual_seed(0)
    ran: dict[str, int] = {}
    choices: dict[str, Any] = {
        "dtype": ("float32", "float16", "float16", "bfloat16"),
        "head_dim": (8, 8, 64, 20),
        "seq_k": (8, 16, 24, 40),
        "softcap": (0.0,),
        "window_left": (-1, -1, -1, 0, 5),
        "window_right": (-1, -1, -1, 3),
        "cross": (False, True),
        "mask": (None, None, None, "bool", "own", "float32"),
    }
    for number, call in enumerate(dense_calls(4, 130, **choices)):
        call = replace(call, mask=call.dtype if call.mask == "own" else call.mask)
        call = replace(call, causal=call.causal and call.mask is None)
        device = ("t4", "a100", "h100", "b200")[number % 4]
        fake.sm = SM[device]
        for name in takes(call.ask(device), BACKEND):
            tensors = call.tensors()
            function = kernel(name)
            call.check(function(**call.arguments(function, tensors)), call.contract(tensors))
            ran[name] = ran.get(name, 0) + 1
    assert set(ran) == {FLASH, CUTLASS, f"{FLASH}.cross", f"{CUTLASS}.cross"} and min(ran.values()) >= least(4), ran


@pytest.mark.parametrize("shape", [(24, 32), (1, 1, 24, 32), (2, 1, 1, 32), (1, 3, 24, 32), (2, 3, 24, 32)])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_masks_are_expanded_not_broadcast(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], layout: str) -> None:
    fake = install(monkeypatch)
    call = Dense(heads=3, kv_heads=3, seq_k=32, causal=False, mask="bool", layout=layout)
    tensors = call.tensors()
    for dtype in (torch.bool, torch.float16):
        mask = torch.rand(shape) > 0.4
        mask[..., :1, :] = False
        tensors["attn_mask"] = mask if dtype == torch.bool else torch.zeros(shape).masked_fill(~mask, -torch.inf).half()
        one = replace(call, mask="bool" if dtype == torch.bool else "float16")
        for name in (CUTLASS, f"{CUTLASS}.cross"):
            function = kernel(name)
            one.check(function(**one.arguments(function, tensors)), one.contract(tensors))
            bias = fake.calls[-1]["attn_bias"]
            assert bias.shape == (2, 3, 24, 32) and bias.device == tensors["query"].device
        if dtype != torch.bool:
            assert bias.data_ptr() == tensors["attn_mask"].data_ptr(), "the mask was copied"


def test_heads_that_share_keys_are_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    call = Dense(heads=6, kv_heads=2, layout="BHSD")
    tensors = call.tensors()
    function = kernel(FLASH)
    output = function(**call.arguments(function, tensors))
    seen = fake.calls[-1]
    assert seen["query"].shape == seen["key"].shape == (2, 24, 2, 3, 64)
    assert (
        seen["key"].data_ptr() == tensors["key"].data_ptr() and seen["query"].data_ptr() == tensors["query"].data_ptr()
    )
    call.check(output, call.contract(tensors))


def test_an_open_side_of_a_window_is_as_wide_as_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    function = kernel(FLASH)
    for left, right in ((3, -1), (-1, 2)):
        call = Dense(seq_q=9, seq_k=20, causal=False, window_left=left, window_right=right)
        tensors = call.tensors()
        call.check(function(**call.arguments(function, tensors)), call.contract(tensors))
        bias = fake.calls[-1]["attn_bias"]
        assert isinstance(bias, LocalAttentionFromBottomRightMask)


@pytest.mark.parametrize("name", ["flash", "cutlass"])
def test_dropout_is_a_function_of_the_seed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch)
    function = kernel(f"xformers.{name}.cross")
    call = Dense(cross=True)
    arguments = {**call.arguments(function, call.tensors()), "dropout_p": 0.25}
    state = torch.random.get_rng_state()
    first, again, other = (function(**{**arguments, "seed": seed}) for seed in (5, 5, 6))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("name", [f"{FLASH}.train", f"{CUTLASS}.train"])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_gradients_come_back_to_the_arguments(monkeypatch: pytest.MonkeyPatch, name: str, layout: str) -> None:
    install(monkeypatch)
    call = Dense(layout=layout, scale=-0.1)
    tensors = {key: t.requires_grad_() for key, t in call.tensors().items()}
    function = kernel(name)
    output = function(**call.arguments(function, tensors))
    got = torch.autograd.grad(output.double().sum(), list(tensors.values()))
    expected = torch.autograd.grad(call.contract(tensors).sum(), list(tensors.values()))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_the_engine_loads_the_document() -> None:
    known = {k.kernel_id for k in lz.list_kernels() if k.backend == BACKEND}
    assert known == set(adapter(BACKEND).KERNELS)


def test_a_wheel_for_another_torch_has_no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = RuntimeError("xFormers can't load C++/CUDA extensions.\n  Please reinstall xformers")
    with pytest.raises(RuntimeError, match="xformers 0.0.35 has no operators here: xFormers can't load") as caught:
        install(monkeypatch, Xformers(problem=problem))
    assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match="has no operators fa2F@2.5.7-pt, fa2B@2.5.7-pt with torch"):
        install(monkeypatch, Xformers(available=False))


def test_a_library_that_is_not_there_is_said_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xformers", None)
    with pytest.raises(ImportError, match="xformers cannot be imported") as caught:
        adapter(BACKEND).detect()
    assert "\n" not in str(caught.value)


ON_GPU = [
    Dense(seq_q=129, seq_k=129, head_dim=128, v_dim=128, dtype="bfloat16"),
    Dense(seq_q=64, seq_k=200, heads=8, kv_heads=2, layout="BHSD", scale=0.2),
    Dense(seq_q=128, seq_k=128, dtype="float32"),
    Dense(seq_q=300, seq_k=300, window_left=31),
    Dense(seq_q=150, seq_k=300, causal=False, window_left=16, window_right=8, layout="BHSD"),
    Dense(seq_q=64, seq_k=128, causal=False, mask="bool"),
    Dense(seq_q=64, seq_k=128, causal=False, mask="float16", layout="BHSD"),
    Dense(seq_q=96, seq_k=40, cross=True),
    Dense(seq_q=65, seq_k=90, scale=-0.3),
]


@pytest.fixture
def found() -> Iterator[str]:
    """The library itself, on this machine's GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        version: str = adapter(BACKEND).detect()
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    with described.registered(BACKEND, version):
        yield version


@pytest.mark.gpu
def test_the_library_itself_is_right(found: str) -> None:
    torch.manual_seed(0)
    ran: set[str] = set()
    for call in ON_GPU:
        tensors = call.tensors("cuda")
        keywords = call.keywords(tensors)
        for name in (n for n in adapter(BACKEND).KERNELS if "train" not in n):
            if lz.validate(name, **keywords)[0]:
                call.check(lz.run_kernel(name, **keywords), call.contract(tensors))
                ran.add(name)
    assert ran


@pytest.mark.gpu
def test_signatures_are_those_of_the_library(found: str) -> None:
    theirs = inspect.signature(importlib.import_module("xformers.ops.fmha").memory_efficient_attention).parameters
    ours = inspect.signature(Xformers().memory_efficient_attention).parameters
    assert list(ours)[:6] == list(theirs)[:6] and "op" in theirs
