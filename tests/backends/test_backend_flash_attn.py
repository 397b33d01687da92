"""FlashAttention 2, 3 and 4: what is declared, put to the engine; what is called, on functions of the same signatures."""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from typing import Any

import described
import fake_flash_attn as fakes
import layerzero as lz
import pytest
import reference
import torch
from attention_calls import Dense, Paged, Varlen, dense_calls, least, paged_calls, varlen_calls
from described import SM, adapter, fits, takes
from layerzero import backend_files

VERSIONS = {"flash_attn": "2.8.3", "flash_attn_3": "3.0.0b1", "flash_attn_4": "4.0.0b27"}
FAKES: dict[str, Any] = {
    "flash_attn": fakes.FlashAttention2,
    "flash_attn_3": fakes.FlashAttention3,
    "flash_attn_4": fakes.FlashAttention4,
}
MODULES = {"flash_attn": "flash_attn", "flash_attn_3": "flash_attn_interface", "flash_attn_4": "flash_attn.cute"}
DEVICES = {"flash_attn": ("a100", "h100", "b200"), "flash_attn_3": ("h100",), "flash_attn_4": ("a100", "h100", "b200")}
PREFIX = {"flash_attn": "flash_attn.v2", "flash_attn_3": "flash_attn.v3", "flash_attn_4": "flash_attn.v4"}
backends = pytest.mark.parametrize("backend", list(VERSIONS))


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """All three, as if they were installed."""
    with ExitStack() as stack:
        for backend, version in VERSIONS.items():
            stack.enter_context(described.registered(backend, version))
        stack.enter_context(described.registered("flash_attn_4_pages", VERSIONS["flash_attn_4"]))
        yield


def install(monkeypatch: pytest.MonkeyPatch, backend: str, fake: Any = None) -> Any:
    """Puts a library in place and has the adapter find it."""
    fake = fake or FAKES[backend]()
    name = MODULES[backend]
    monkeypatch.setitem(sys.modules, name, fake.module())
    if backend == "flash_attn_4":
        monkeypatch.setitem(sys.modules, "flash_attn", type(sys)("flash_attn"))
    monkeypatch.setattr(metadata, "version", lambda _: VERSIONS[backend])
    assert adapter(backend).detect() == VERSIONS[backend]
    return fake


def kernel(backend: str, name: str) -> Any:
    """A kernel's function."""
    return kernels(backend)[name]


def kernels(backend: str) -> dict[str, Any]:
    """All kernels of a library; those of the fourth for pages are not loaded."""
    more = adapter("flash_attn_4_pages").KERNELS if backend == "flash_attn_4" else {}
    return {**adapter(backend).KERNELS, **more}


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
    ran: dict[str, int] = {}
    sizes = (256, 256, 16) if backend == "flash_attn" else (1, 16, 256)
    for call in paged_calls(
        3, 160, block_size=sizes, index_dtype=("int32", "int32", "int64"), prefill=(False, True, True)
    ):
        device = DEVICES[backend][0] if backend != "flash_attn_4" else "h100"
        fake.sm = SM[device]
        for name in takes(call.ask(device), PREFIX[backend]):
            tensors = call.tensors()
            function = kernel(backend, name)
            call.check(function(**call.arguments(function, tensors)), call.expected(tensors))
            ran[name] = ran.get(name, 0) + 1
    wanted = {name for name in kernels(backend) if ".paged." in name}
    assert set(ran) == wanted and min(ran.values()) >= least(3), ran


@backends
def test_packed_calls_the_engine_lets_through_are_right(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    fake = install(monkeypatch, backend)
    torch.manual_seed(1)
    ran: dict[str, int] = {}
    for call in varlen_calls(3, 120):
        device = DEVICES[backend][0] if backend != "flash_attn_4" else "h100"
        fake.sm = SM[device]
        for name in takes(call.ask(device), PREFIX[backend]):
            tensors = call.tensors()
            function = kernel(backend, name)
            call.check(function(**call.arguments(function, tensors)), call.expected(tensors))
            ran[name] = ran.get(name, 0) + 1
    assert set(ran) == {f"{PREFIX[backend]}.varlen"} and min(ran.values()) >= least(20), ran


@backends
def test_logarithms_and_sinks_are_right(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    install(monkeypatch, backend)
    torch.manual_seed(4)
    cases: list[tuple[Any, str]] = [
        (Dense(seq_q=5, seq_k=9, causal=causal, window_left=left, softcap=cap, layout=layout), "")
        for causal, left, cap, layout in ((True, -1, 0.0, "BSHD"), (False, -1, 4.0, "BHSD"), (True, 3, 0.0, "BHSD"))
    ]
    cases += [(Varlen(causal=causal, lead=(1, 0), tail=(2, 1), scale=-0.2), ".varlen") for causal in (True, False)]
    for call, kind in cases:
        function, tensors = kernel(backend, f"{PREFIX[backend]}.lse{kind}"), call.tensors()
        output, lse = function(**call.arguments(function, tensors))
        want = call.expected(tensors)
        call.check(output, want)
        assert lse.dtype == torch.float32 and lse.shape == output.shape[:-1]
        if kind:
            starts, firsts = tensors["cu_seqlens_q"].tolist(), tensors["cu_seqlens_k"].tolist()
            assert all(bool((lse[row] == -torch.inf).all()) for row in (0, len(lse) - 1))
            rows = range(starts[0], starts[1])
            scores = [by_hand(call, tensors, row, rows, range(firsts[0], firsts[1])) for row in rows]
            torch.testing.assert_close(lse[starts[0] : starts[1]], torch.stack(scores), rtol=1e-3, atol=1e-3)
        else:
            function = kernel(backend, f"{PREFIX[backend]}.sinks")
            sinks = torch.randn(call.heads)
            got = function(**call.arguments(function, {**tensors, "sinks": sinks}))
            arrays = (tensors[name].double().numpy() for name in ("query", "key", "value"))
            options = {"causal": call.causal, "softcap": call.softcap, "layout": call.layout}
            window = (call.window_left, call.window_right)
            joined = reference.attention(*arrays, window=window, sinks=sinks.double().numpy(), **options)
            call.check(got, torch.from_numpy(joined.values.copy()))


def by_hand(call: Varlen, tensors: dict[str, torch.Tensor], row: int, rows: range, keys: range) -> torch.Tensor:
    """The logarithms of a row: of every head, over the keys its position reaches."""
    query, key = tensors["query"][row].double(), tensors["key"][list(keys)].double()
    scores = torch.einsum("hd,khd->hk", query, key.repeat_interleave(call.heads // call.kv_heads, 1)) * call.scale
    reached = len(keys) if not call.causal else len(keys) - (rows.stop - row) + 1
    return scores[:, :reached].logsumexp(-1).float()


@backends
def test_packed_calls_name_the_longest_sequence(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    fake = install(monkeypatch, backend)
    function, call = kernel(backend, f"{PREFIX[backend]}.varlen"), Varlen(rows=(2, 4), lengths=(5, 9))
    tensors = call.tensors()
    function(**call.arguments(function, tensors))
    assert (fake.calls[-1]["max_seqlen_q"], fake.calls[-1]["max_seqlen_k"]) == (4, 9)
    wrong = {**call.arguments(function, tensors), "max_seqlen_k": 8}
    with pytest.raises(lz.InvalidCallError, match="max_seqlen_k is 8, expected at least 9"):
        function(**wrong)


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


# --- what is found ----------------------------------------------------------------------------------------------------


@backends
def test_the_engine_loads_the_document(backend: str) -> None:
    known = {k.kernel_id: k for k in lz.list_kernels() if k.backend == backend}
    assert set(known) == set(adapter(backend).KERNELS)
    assert all(k.platforms == ["cuda"] for k in known.values())


@backends
def test_a_library_that_is_not_there_is_said_so_in_one_line(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setitem(sys.modules, MODULES[backend].partition(".")[0], None)
    with pytest.raises(ImportError) as caught:
        adapter(backend).detect()
    assert "\n" not in str(caught.value)


def test_the_package_of_version_4_is_not_taken_for_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", type(sys)("flash_attn"))
    with pytest.raises(ImportError, match="flash_attn has no flash_attn_func, .*; install flash-attn 2.8"):
        adapter("flash_attn").detect()


@pytest.mark.parametrize("backend", ["flash_attn", "flash_attn_3"])
def test_a_wheel_for_another_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    install(monkeypatch, backend)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for version, usable in (("2.8.3+cu12torch2.8cxx11abiTRUE", False), ("3.0.0b1+cu130torch2110cxx11abitrue", True)):
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        if usable:
            assert adapter(backend).detect() == version
        else:
            with pytest.raises(RuntimeError, match="was built for CUDA 12, torch .* for CUDA 13"):
                adapter(backend).detect()


# --- on a GPU ---------------------------------------------------------------------------------------------------------

ON_GPU = [
    Dense(seq_q=129, seq_k=129, head_dim=128, v_dim=128, dtype="bfloat16"),
    Dense(seq_q=64, seq_k=200, heads=8, kv_heads=2, layout="BHSD", scale=0.2),
    Dense(seq_q=200, seq_k=64, heads=4, kv_heads=4, causal=False),
    Dense(seq_q=1, seq_k=333, heads=8, kv_heads=1, dtype="bfloat16"),
    Dense(seq_q=300, seq_k=300, window_left=31),
    Dense(seq_q=150, seq_k=300, causal=False, window_left=16, window_right=8, layout="BHSD"),
    Dense(seq_q=128, seq_k=256, softcap=5.0, scale=1.0, dtype="bfloat16"),
    Dense(seq_q=70, seq_k=70, alibi=True),
    Dense(seq_q=65, seq_k=90, scale=-0.3),
    Dense(seq_q=65, seq_k=90, scale=0.0),
    Dense(seq_q=96, seq_k=40, cross=True, heads=6, kv_heads=2),
    Dense(seq_q=66, seq_k=66, head_dim=256, v_dim=256),
]
PAGED_ON_GPU = [
    Paged(lengths=(5, 700, 0, 256), rows=(1, 1, 1, 1), heads=8, kv_heads=2, head_dim=128, dtype="bfloat16"),
    Paged(lengths=(33, 511), rows=(1, 1), heads=4, kv_heads=4, layout="HND", window_left=100),
    Paged(prefill=True, lengths=(5, 700, 0, 256), rows=(5, 100, 2, 256), lead=1, tail=2, heads=8, kv_heads=2),
    Paged(prefill=True, lengths=(64, 300), rows=(64, 30), block_size=16, heads=4, kv_heads=4, window_left=20),
]


@pytest.fixture
def found(backend: str) -> Iterator[str]:
    """The library itself, on this machine's GPU."""
    with described.library_itself(backend) as version:
        yield version


@pytest.mark.gpu
@backends
def test_the_library_itself_is_right(found: str, backend: str) -> None:
    torch.manual_seed(0)
    ran: list[str] = []
    for call in [*ON_GPU, *PAGED_ON_GPU]:
        tensors = call.tensors("cuda")
        keywords = call.keywords(tensors)
        for name in (n for n in kernels(backend) if "train" not in n):
            if fits(name, keywords) and (".cross" in name) is (isinstance(call, Dense) and call.cross):
                want = call.contract(tensors).cpu() if isinstance(call, Dense) else call.expected(tensors)
                call.check(lz.run_kernel(name, **keywords).cpu(), want)
                ran.append(name)
    assert ran


@pytest.mark.gpu
@backends
def test_gradients_of_the_library_itself(found: str, backend: str) -> None:
    torch.manual_seed(0)
    ran: list[str] = []
    for call in [c for c in ON_GPU if not c.alibi and c.seq_q <= c.seq_k]:
        tensors = {name: t.requires_grad_() for name, t in call.tensors("cuda").items()}
        expected = torch.autograd.grad(call.contract(tensors).sum(), list(tensors.values()))
        for name in (n for n in adapter(backend).KERNELS if ".train" in n and ("cross" in n) is call.cross):
            keywords = call.keywords(tensors)
            if lz.validate(name, **keywords)[0]:
                output = lz.run_kernel(name, **keywords)
                got = torch.autograd.grad(output.float().sum(), list(tensors.values()))
                for one, other in zip(got, expected, strict=True):
                    torch.testing.assert_close(one.double(), other.double(), rtol=3e-2, atol=3e-2)
                ran.append(name)
    assert ran


@pytest.mark.gpu
@backends
def test_signatures_are_those_of_the_library(found: str, backend: str) -> None:
    fake, module = FAKES[backend](), importlib.import_module(MODULES[backend])
    for name in adapter(backend)._FUNCTIONS:
        theirs = inspect.signature(getattr(module, name)).parameters
        ours = inspect.signature(getattr(fake, name)).parameters
        other = [key for key in set(ours) & set(theirs) if theirs[key].default != ours[key].default]
        assert not other, f"{name}: the defaults of {other} are others"
        assert {"q", "softmax_scale", "causal", "window_size", "softcap"} <= set(theirs)
