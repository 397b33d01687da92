"""FlashAttention 2, 3 and 4: what is declared, put to the engine; what is called, on functions of the same signatures."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import described
import fake_flash_attn as fakes
import layerzero as lz
import pytest
import torch
from attention_calls import Dense, Paged, dense_calls, least, paged_calls
from described import SM, adapter, takes
from flash_attn_installed import (
    DEVICES,
    PREFIX,
    VERSIONS,
    all_registered,
    backends,
    install,
    kernel,
    kernels,
    ran_right,
)
from layerzero import backend_files


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """All three, as if they were installed."""
    with all_registered():
        yield


# --- what is declared -------------------------------------------------------------------------------------------------

PLAIN = Dense(seq_q=128, seq_k=128, head_dim=128, v_dim=128)
TRAINED = "--requires-grad"
V2, V3, V4 = "flash_attn.v2", "flash_attn.v3", "flash_attn.v4"


@pytest.mark.parametrize(
    ("call", "device", "flags", "kernel_id", "reason"),
    [
        # Hardware: FA2 from Ampere on, FA3 on Hopper alone, FA4 from Ampere on.
        (PLAIN, "t4", (), V2, "[SM_TOO_OLD] requires SM 80 or newer, have SM 75"),
        (PLAIN, "a100", (), V2, None),
        (PLAIN, "l40s", (), V2, None),
        (PLAIN, "b200", (), V2, None),
        (PLAIN, "mi300x", (), V2, "[PLATFORM_MISMATCH] runs on cuda, this is rocm"),
        (PLAIN, "gaudi3", (), V2, "[PLATFORM_MISMATCH] runs on cuda, this is hpu"),
        (PLAIN, "a100", (), V3, "[SM_TOO_OLD] requires SM 90 or newer, have SM 80"),
        (PLAIN, "h100", (), V3, None),
        (PLAIN, "b200", (), V3, "[SM_TOO_NEW]"),
        (PLAIN, "t4", (), V4, "[SM_TOO_OLD]"),
        (PLAIN, "l40s", (), V4, None),
        (PLAIN, "b200", (), V4, None),
        # Dtypes.
        (replace(PLAIN, dtype="float32"), "h100", (), V2, "[DTYPE_UNSUPPORTED] 'query' is float32"),
        (replace(PLAIN, dtype="float8_e4m3fn"), "h100", (), V3, "[DTYPE_UNSUPPORTED] 'query' is float8_e4m3fn"),
        # Head sizes (001 §16.2 has 320 and 84).
        (replace(PLAIN, head_dim=320, v_dim=320), "h100", (), V2, "[HEAD_DIM_TOO_LARGE]"),
        (replace(PLAIN, head_dim=84, v_dim=84), "h100", (), V2, None),
        (replace(PLAIN, head_dim=84, v_dim=84), "h100", (), V3, "[HEAD_DIM_ALIGNMENT]"),
        (replace(PLAIN, head_dim=84, v_dim=84), "h100", (), V4, "[HEAD_DIM_ALIGNMENT]"),
        (replace(PLAIN, head_dim=192), "h100", (), V2, "[CONSTRAINT_FAILED] v_dim == head_dim"),
        (replace(PLAIN, head_dim=192), "h100", (), V3, None),
        (replace(PLAIN, head_dim=192), "h100", (), V4, None),
        (replace(PLAIN, head_dim=256, v_dim=256), "a100", (), V4, "[CONSTRAINT_FAILED] head_dim <= 128"),
        (replace(PLAIN, head_dim=256, v_dim=256), "b200", (), V4, None),
        (replace(PLAIN, head_dim=256, v_dim=256, softcap=9.0), "b200", (), V4, "[CONSTRAINT_FAILED] head_dim <= 128"),
        (replace(PLAIN, head_dim=256, v_dim=256, softcap=9.0), "h100", (), V4, None),
        # Shared heads, masks (001 §15.4), windows, softcap, slopes, dropout.
        (replace(PLAIN, heads=8, kv_heads=2), "h100", (), V2, None),
        (replace(PLAIN, causal=False, mask="bool"), "h100", (), V2, "[ATTN_MASK_UNSUPPORTED]"),
        (replace(PLAIN, causal=False, mask="float16"), "h100", (), V4, "[ATTN_MASK_UNSUPPORTED]"),
        (replace(PLAIN, window_left=64), "h100", (), V2, None),
        (replace(PLAIN, softcap=30.0), "h100", (), V3, None),
        (replace(PLAIN, alibi=True), "h100", (), V2, None),
        (replace(PLAIN, alibi=True), "h100", (), V3, "[INPUT_UNSUPPORTED]"),
        (replace(PLAIN, alibi=True), "h100", (), V4, "[INPUT_UNSUPPORTED]"),
        # FA2 loses keys of queries that stand before the first key, in windows that look ahead.
        (replace(PLAIN, seq_k=64, causal=False, window_left=9), "h100", (), V2, "[CONSTRAINT_FAILED] causal or"),
        (replace(PLAIN, seq_q=64, causal=True, window_left=9), "h100", (), V2, None),
        (replace(PLAIN, seq_k=64, causal=False, window_left=9), "h100", (), V3, None),
        # Gradients and determinism: the forward is deterministic, the backward by choice.
        (PLAIN, "h100", (TRAINED,), V2, "[AUTOGRAD_UNSUPPORTED]"),
        (PLAIN, "h100", (TRAINED,), f"{V2}.train", None),
        (PLAIN, "h100", (), f"{V2}.train", "[CONSTRAINT_FAILED] context.requires_grad"),
        (PLAIN, "h100", ("--deterministic",), V2, None),
        (PLAIN, "h100", (TRAINED, "--deterministic"), f"{V2}.train", "[NON_DETERMINISTIC]"),
        (PLAIN, "h100", (TRAINED, "--deterministic"), f"{V2}.train.deterministic", None),
        (replace(PLAIN, head_dim=256, v_dim=256), "h100", (TRAINED,), f"{V3}.train", None),
        (
            replace(PLAIN, head_dim=256, v_dim=256),
            "h100",
            (TRAINED,),
            f"{V3}.train.deterministic",
            "[HEAD_DIM_TOO_LARGE]",
        ),
        (PLAIN, "a100", (TRAINED,), f"{V4}.train", "[SM_TOO_OLD]"),
        # Graphs.
        (PLAIN, "h100", ("--capturing",), V2, None),
        (PLAIN, "h100", ("--capturing",), V4, None),
    ],
)
def test_what_is_declared(call: Dense, device: str, flags: tuple[str, ...], kernel_id: str, reason: str | None) -> None:
    reasons = call.ask(device, *flags)[kernel_id]
    if reason is None:
        assert not reasons
    else:
        assert any(line.startswith(reason) for line in reasons), reasons


def test_dropout_excludes_softcap_and_graphs() -> None:
    shapes = PLAIN.shapes

    def reasons(*flags: str, **params: Any) -> list[str]:
        return described.ask("attention", "h100", shapes, "float16", *flags, layout="BSHD", **params)[V2]

    assert not reasons(dropout_p=0.1)
    assert reasons(dropout_p=0.1, softcap=5.0)[0].startswith("[CONSTRAINT_FAILED] softcap == 0.0 or dropout_p == 0.0")
    assert reasons("--capturing", dropout_p=0.1)[0].startswith("[CONSTRAINT_FAILED] dropout_p == 0.0 or not context")
    for other in (V3, V4):
        answer = described.ask("attention", "h100", shapes, "float16", layout="BSHD", dropout_p=0.1)
        assert answer[other][0].startswith("[PARAM_UNSUPPORTED] dropout_p")
    wide = replace(PLAIN, head_dim=256, v_dim=256).shapes
    for device, taken in (("a100", True), ("h100", True), ("l40s", False)):
        answer = described.ask("attention", device, wide, "float16", TRAINED, layout="BSHD", dropout_p=0.1)
        assert (not answer[f"{V2}.train"]) is taken


def test_a_last_dimension_with_gaps_is_copied_first() -> None:
    shapes = Dense(batch=1, heads=2, kv_heads=2).shapes
    gaps = {"query": (24 * 2 * 64 * 2, 2 * 64 * 2, 64 * 2, 2)}
    printed = described.command(
        "explain", "--op", "attention", "--device", "h100", "--dtype", "fp16", "--layout", "BSHD",
        *(f"--shape={name}={'x'.join(map(str, shape))}" for name, shape in shapes.items()),
        *(f"--strides={name}={'x'.join(map(str, steps))}" for name, steps in gaps.items()),
    )  # fmt: skip
    assert "needs contiguous" in next(
        line for line in printed.splitlines() if f"  {V2} " in line and "priority" in line
    )
    strict = described.ask("attention", "h100", shapes, "float16", "--strict", strides=gaps, layout="BSHD")[V2]
    assert [line.partition("]")[0] for line in strict] == ["[STRIDE_LAST_DIM"]


def test_pages_are_strict() -> None:
    call = Paged()
    assert not call.ask("a100")[f"{V2}.paged.decode.gqa"]
    assert not call.ask("h100")[f"{V3}.paged.decode.gqa"]
    for change, reason in (
        ({"block_size": 16}, "[CONSTRAINT_FAILED] block_size"),
        ({"index_dtype": "int64"}, "[DTYPE_UNSUPPORTED] 'block_tables' is int64"),
        ({"cache_dtype": "float8_e4m3fn"}, "[KV_CACHE_DTYPE_MISMATCH]"),
        ({"cache_dtype": "bfloat16"}, "[CONSTRAINT_FAILED] key_cache.dtype == query.dtype"),
        ({"head_dim": 20}, "[HEAD_DIM_ALIGNMENT]"),
    ):
        reasons = replace(call, **change).ask("a100")[f"{V2}.paged.decode.gqa"]
        assert any(line.startswith(reason) for line in reasons), reasons
    assert not replace(call, block_size=16).ask("h100")[f"{V3}.paged.decode.gqa"]
    packed = replace(call, prefill=True)
    assert packed.ask("a100", "--capturing")[f"{V2}.paged.prefill.gqa"][0].startswith("[CUDA_GRAPH_UNSAFE]")
    assert packed.ask("a100")[f"{V4}.paged.prefill.gqa"][0].startswith("[SM_TOO_OLD]")
    assert not packed.ask("h100")[f"{V4}.paged.prefill.gqa"]


@backends
@pytest.mark.parametrize(
    ("version", "taken"), [("2.7.4", False), ("2.8.0.post2", True), ("4.0.0b4", False), ("4.0.0b10", True)]
)
def test_versions_are_asked_for(backend: str, version: str, taken: bool) -> None:
    major = {"flash_attn": "2", "flash_attn_3": "3", "flash_attn_4": "4"}[backend]
    if not version.startswith(major):
        pytest.skip("another library's version")
    with described.registered(backend, version):
        reasons = PLAIN.ask("h100")[PREFIX[backend]]
        assert (not reasons) is taken and all(line.startswith("[VERSION_UNSUPPORTED]") for line in reasons)
    # The document of this test run again.
    lz.register_backend(
        backend_files.folder(backend) / "capabilities.json", adapter(backend).KERNELS, version=VERSIONS[backend]
    )


# --- what is called ---------------------------------------------------------------------------------------------------


def test_matrix_products_and_loops_agree_on_the_contract() -> None:
    torch.manual_seed(2)
    for call in dense_calls(5, 40, seq_q=(1, 5, 9), head_dim=(8,), mask=(None,), alibi=(False, True)):
        call = replace(call, alibi=call.alibi and not call.cross)
        tensors = call.tensors()
        torch.testing.assert_close(call.contract(tensors), call.expected(tensors), rtol=1e-9, atol=1e-9)
    for mask in ("bool", "float16"):
        call = Dense(causal=False, mask=mask, seq_q=5, seq_k=9)
        tensors = call.tensors()
        torch.testing.assert_close(call.contract(tensors), call.expected(tensors), rtol=1e-9, atol=1e-9)


@backends
def test_calls_the_engine_lets_through_are_right(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    fake = install(monkeypatch, backend)
    torch.manual_seed(0)
    ran: dict[str, int] = {}
    for number, call in enumerate(
        dense_calls(7, 90, alibi=(False, False, True) if backend == "flash_attn" else (False,))
    ):
        call = replace(call, alibi=call.alibi and not call.cross)
        device = DEVICES[backend][number % len(DEVICES[backend])]
        fake.sm = SM[device]
        for name in takes(call.ask(device), PREFIX[backend]):
            tensors = call.tensors()
            before = {key: t.clone() for key, t in tensors.items()}
            function = kernel(backend, name)
            call.check(function(**call.arguments(function, tensors)), call.contract(tensors))
            assert all(torch.equal(t, before[key]) for key, t in tensors.items()), "an argument was written to"
            ran[name] = ran.get(name, 0) + 1
    others = (".paged.", ".train", ".varlen", ".lse", ".sinks")
    wanted = {name for name in kernels(backend) if not any(other in name for other in others)}
    assert set(ran) == wanted and min(ran.values()) >= least(5), ran


@backends
def test_paged_calls_the_engine_lets_through_are_right(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    fake = install(monkeypatch, backend)
    torch.manual_seed(1)
    sizes = (256, 256, 16) if backend == "flash_attn" else (1, 16, 256)
    calls = paged_calls(3, 160, block_size=sizes, index_dtype=("int32", "int32", "int64"), prefill=(False, True, True))
    ran = ran_right(fake, backend, calls)
    wanted = {name for name in kernels(backend) if ".paged." in name}
    assert set(ran) == wanted and min(ran.values()) >= least(3), ran


@backends
def test_nothing_is_copied_that_can_be_turned(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    fake = install(monkeypatch, backend)
    function = kernel(backend, PREFIX[backend])
    for layout in ("BSHD", "BHSD"):
        call = Dense(layout=layout)
        tensors = call.tensors()
        output = function(**call.arguments(function, tensors))
        seen = fake.calls[-1]
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
            assert seen[theirs].data_ptr() == tensors[ours].data_ptr()
            assert seen[theirs].shape[1:3] == (24, 4)
        assert output.shape == call.shape(24, 4, 64)


@backends
def test_what_kernels_cannot_load_from_is_copied(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    install(monkeypatch, backend)
    function = kernel(backend, PREFIX[backend])
    call = Dense(batch=1, heads=2, kv_heads=2)
    whole = torch.randn(1 * 24 * 2 * 64 + 1).half()
    moved = whole[1:].view(1, 24, 2, 64)
    wide = torch.randn(1, 24, 2, 68).half()[..., :64]
    shared = torch.randn(1, 1, 2, 64).half().expand(1, 24, 2, 64)
    for key in (moved, wide, shared):
        tensors = {**call.tensors(), "key": key}
        call.check(function(**call.arguments(function, tensors)), call.expected(tensors))


def test_heads_of_a_group_are_worked_on_together_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "flash_attn_4")
    call = Dense(heads=8, kv_heads=2)
    for name, packed in ((V4, None), (f"{V4}.unpacked", False)):
        function, tensors = kernel("flash_attn_4", name), call.tensors()
        call.check(function(**call.arguments(function, tensors)), call.contract(tensors))
        assert fake.calls[-1]["pack_gqa"] is packed
        run, operands = function.direct(*call.arguments(function, tensors).values())
        call.check(run(*operands), call.contract(tensors))
        assert fake.calls[-1]["pack_gqa"] is packed
    assert f"{V4}.unpacked" in takes(call.ask("h100"), V4)
    assert f"{V4}.unpacked" not in takes(Dense(heads=4, kv_heads=4).ask("h100"), V4)


@backends
def test_the_plan_is_the_call(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    install(monkeypatch, backend)
    function = kernel(backend, PREFIX[backend])
    planned = 0
    for call in dense_calls(11, 40, head_dim=(64,), cross=(False,)):
        call = replace(call, v_dim=64)
        tensors = call.tensors()
        arguments = call.arguments(function, tensors)
        plan = function.direct(*arguments.values())
        # The fourth turns operands within its one call.
        turned = call.layout == "BSHD" or backend == "flash_attn_4"
        assert (plan is not None) is (turned and (call.scale is None or call.scale > 0.0))
        if plan is not None and takes(call.ask("h100"), PREFIX[backend]):
            run, positional, keywords = (*plan, {})[:3]
            assert all(any(t is given for given in tensors.values()) for t in positional if isinstance(t, torch.Tensor))
            call.check(run(*positional, **keywords), call.contract(tensors))
            planned += 1
    assert planned >= least(5)
    if backend == "flash_attn_4":
        call = Dense(batch=2)
        one, other = (function.direct(*call.arguments(function, call.tensors()).values()) for _ in range(2))
        assert one[0] is other[0], "what a launch has found out is there for all plans of its kind"
        assert one[1][0] is not other[1][0]
    odd = torch.randn(1, 24, 4, 68).half()[..., :64]
    call = Dense(batch=1)
    arguments = call.arguments(function, {**call.tensors(), "key": odd})
    assert function.direct(*arguments.values()) is None


@backends
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_gradients_come_back_to_the_arguments(monkeypatch: pytest.MonkeyPatch, backend: str, layout: str) -> None:
    fake = install(monkeypatch, backend)
    call = Dense(layout=layout, window_left=5, softcap=3.0, scale=-0.1, heads=4, kv_heads=2)
    tensors = {name: t.requires_grad_() for name, t in call.tensors().items()}
    expected = torch.autograd.grad(call.contract(tensors).sum(), list(tensors.values()))
    for name in [n for n in adapter(backend).KERNELS if ".train" in n and "cross" not in n]:
        function = kernel(backend, name)
        output = function(**call.arguments(function, tensors))
        assert fake.calls[-1]["deterministic"] is name.endswith(".deterministic")
        got = torch.autograd.grad(output.double().sum(), list(tensors.values()))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_dropout_is_a_function_of_the_seed_and_leaves_the_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn")
    function = kernel("flash_attn", V2)
    call = Dense(causal=False)
    tensors = call.tensors()
    arguments = {**call.arguments(function, tensors), "dropout_p": 0.25}
    assert function.direct(*arguments.values()) is None
    state = torch.random.get_rng_state()
    first, again, other = (function(**{**arguments, "seed": seed}) for seed in (5, 5, 6))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_slopes_that_want_a_gradient_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn")
    function = kernel("flash_attn", f"{V2}.train")
    call = Dense(alibi=True)
    tensors = call.tensors()
    tensors["alibi_slopes"].requires_grad_()
    arguments = call.arguments(function, tensors)
    assert function.direct(*arguments.values()) is None
    with pytest.raises(RuntimeError, match="no gradient for alibi_slopes"):
        function(**arguments)
    with torch.no_grad():
        call.check(function(**arguments), call.expected({k: t.detach() for k, t in tensors.items()}))


@pytest.mark.parametrize("returns_tuple", [False, True])
def test_a_build_may_return_more_than_the_output(monkeypatch: pytest.MonkeyPatch, returns_tuple: bool) -> None:
    install(monkeypatch, "flash_attn_3", fakes.FlashAttention3(returns_tuple=returns_tuple))
    function = kernel("flash_attn_3", V3)
    call = Dense()
    tensors = call.tensors()
    arguments = call.arguments(function, tensors)
    call.check(function(**arguments), call.expected(tensors))
    run, positional, keywords = function.direct(*arguments.values())
    call.check(run(*positional, **keywords), call.expected(tensors))


def test_rows_are_read_once_and_again_after_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "flash_attn")
    reads: list[int] = []
    packed = importlib.import_module("layerzero.backends._shared.packed_rows")
    read = packed._known._read
    monkeypatch.setattr(packed._known, "_read", lambda t: reads.append(1) or read(t))
    function = kernel("flash_attn", f"{V2}.paged.prefill.gqa")
    call = Paged(prefill=True, lengths=(40, 50), rows=(3, 4))
    tensors = call.tensors()

    def run(one: Paged) -> None:
        one.check(function(**one.arguments(function, tensors)), one.expected(tensors))

    run(call)
    run(call)
    assert len(reads) == 1 and fake.calls[-1]["max_seqlen_q"] == 4
    tensors["cu_seqlens_q"].copy_(torch.tensor([0, 1, 7]))
    run(replace(call, rows=(1, 6)))
    assert len(reads) == 2 and fake.calls[-1]["max_seqlen_q"] == 6
    # Another tensor, perhaps at the address of the one before it.
    del tensors["cu_seqlens_q"]
    gc.collect()
    tensors["cu_seqlens_q"] = torch.tensor([0, 5, 7], dtype=torch.int32)
    run(replace(call, rows=(5, 2)))
    assert len(reads) == 3
    with torch.inference_mode():
        tensors["cu_seqlens_q"] = torch.tensor([0, 5, 7], dtype=torch.int32)
        run(replace(call, rows=(5, 2)))
        run(replace(call, rows=(5, 2)))
    assert len(reads) == 5
    tensors["cu_seqlens_q"] = torch.tensor([0, 5, 3], dtype=torch.int32)
    with pytest.raises(lz.InvalidCallError, match=r"cu_seqlens_q\[2\] is 3, expected 5 or more"):
        function(**call.arguments(function, tensors))
    tensors["cu_seqlens_q"] = torch.tensor([0, 5, 9], dtype=torch.int32)
    with pytest.raises(lz.InvalidCallError, match=r"cu_seqlens_q\[2\] is 9, expected at most 7"):
        function(**call.arguments(function, tensors))


@backends
def test_a_cache_that_cannot_be_loaded_from_is_refused(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    install(monkeypatch, backend)
    call = Paged(prefill=True, lengths=(40, 50), rows=(3, 4))
    tensors = call.tensors()
    shape = tensors["key_cache"].shape
    tensors["key_cache"] = torch.randn(*shape[:3], shape[3] + 4).half()[..., : shape[3]]
    function = kernel(backend, f"{PREFIX[backend]}.paged.prefill.gqa")
    with pytest.raises(RuntimeError, match="does not lie on bounds of 16 bytes"):
        function(**call.arguments(function, tensors))
