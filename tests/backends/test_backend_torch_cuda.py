"""torch on CUDA: what is declared, put to the engine for devices that are not here; what is called, on CPU tensors. Where
aten has no CPU form of a kernel, a function of the same signature stands in its place and computes what it would."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import adapter_cases
import described
import pytest
import torch
from attention_calls import FULL, Dense, Paged, Varlen, attend, dense_calls, least, paged_calls, varlen_calls
from described import takes
from fake_torch_cuda import Aten
from layerzero.backends._shared.torch_device_functions import paged, sdpa, sparse, unfused, varlen
from layerzero.kernels import Turned
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

KERNELS: dict[str, Callable[..., Any]] = described.adapter("torch_cuda").KERNELS
PREFIX = "torch.cuda"
aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if torch had found a device."""
    with described.registered("torch_cuda", "2.11.0+cu130"):
        yield


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Aten:
    """The stand-ins, in their places."""
    stand_ins = Aten()
    monkeypatch.setattr(sdpa, "_flash", stand_ins.flash)
    monkeypatch.setattr(sdpa, "_cudnn", stand_ins.cudnn)
    monkeypatch.setattr(sdpa, "_efficient", stand_ins.efficient)
    monkeypatch.setattr(sdpa, "_flash_in_window", stand_ins.flash_forward)
    monkeypatch.setattr(sdpa, "_efficient_in_window", stand_ins.efficient_forward)
    monkeypatch.setattr(paged, "_flash_packed", stand_ins.flash_forward)
    monkeypatch.setattr(varlen, "_flash_packed", stand_ins.flash_forward)
    return stand_ins


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("flash", aten._scaled_dot_product_flash_attention.default),
        ("cudnn", aten._scaled_dot_product_cudnn_attention.default),
        ("efficient", aten._scaled_dot_product_efficient_attention.default),
        ("flash_forward", aten._flash_attention_forward.default),
        ("efficient_forward", aten._efficient_attention_forward.default),
    ],
)
def test_stand_ins_have_the_signatures_of_torch(name: str, schema: Any) -> None:
    ours = list(inspect.signature(getattr(Aten(), name)).parameters.values())
    theirs = schema._schema.arguments
    assert [p.name for p in ours] == [a.name for a in theirs]
    assert [p.kind is p.KEYWORD_ONLY for p in ours] == [a.kwarg_only for a in theirs]
    assert all(p.default == a.default_value for p, a in zip(ours, theirs, strict=True) if p.default is not p.empty)


# --- what is declared -------------------------------------------------------------------------------------------------

PLAIN = Dense(seq_q=128, seq_k=128, head_dim=128, v_dim=128)
SDPA, MASKED, FLASH = f"{PREFIX}.sdpa", f"{PREFIX}.sdpa.masked", f"{PREFIX}.sdpa.flash"
LITERAL = f"{PREFIX}.sdpa.literal"
CUDNN, EFFICIENT, UNFUSED = f"{PREFIX}.sdpa.cudnn", f"{PREFIX}.sdpa.efficient", f"{PREFIX}.attention.unfused"
TRAINED = "--requires-grad"


def wide(head_dim: int, v_dim: int | None = None) -> Dense:
    """The plain call with other heads."""
    return replace(PLAIN, head_dim=head_dim, v_dim=v_dim or head_dim)


@pytest.mark.parametrize(
    ("call", "device", "flags", "kernel_id", "reason"),
    [
        # Hardware (001 §10.13, §12.2).
        (PLAIN, "h200", (), SDPA, None),
        (PLAIN, "t4", (), SDPA, None),
        (PLAIN, "mi300x", (), SDPA, "[PLATFORM_MISMATCH] runs on cuda, this is rocm"),
        (PLAIN, "t4", (), FLASH, "[SM_TOO_OLD] requires SM 80 or newer, have SM 75"),
        (PLAIN, "t4", (), CUDNN, "[SM_TOO_OLD]"),
        (PLAIN, "t4", (), EFFICIENT, None),
        (replace(PLAIN, dtype="bfloat16"), "t4", (), EFFICIENT, "[CONSTRAINT_FAILED] dtype != bfloat16 or sm >= 80"),
        (PLAIN, "b200", (), FLASH, None),
        # Dtypes.
        (replace(PLAIN, dtype="float32"), "h200", (), SDPA, None),
        (replace(PLAIN, dtype="float32"), "h200", (), FLASH, "[DTYPE_UNSUPPORTED] 'query' is float32"),
        (replace(PLAIN, dtype="float32"), "h200", (), CUDNN, "[DTYPE_UNSUPPORTED] 'query' is float32"),
        (replace(PLAIN, dtype="float32"), "h200", (), EFFICIENT, None),
        (replace(PLAIN, dtype="float64"), "h200", (), EFFICIENT, "[DTYPE_UNSUPPORTED] 'query' is float64"),
        (replace(PLAIN, dtype="float8_e4m3fn"), "h200", (), UNFUSED, None),
        # Head sizes (§16.2).
        (wide(320), "h200", (), FLASH, "[HEAD_DIM_TOO_LARGE]"),
        (wide(320), "h200", (), CUDNN, "[HEAD_DIM_TOO_LARGE]"),
        (wide(320), "h200", (), EFFICIENT, None),
        (wide(84), "h200", (), FLASH, "[HEAD_DIM_ALIGNMENT]"),
        (wide(84), "h200", (), CUDNN, "[HEAD_DIM_ALIGNMENT]"),
        (wide(84), "h200", (), EFFICIENT, "[CONSTRAINT_FAILED] head_dim * dtype_bits % 128 == 0"),
        (wide(84), "h200", (), SDPA, None),
        (wide(256), "h200", (), CUDNN, None),
        (wide(256), "a100", (), CUDNN, "[CONSTRAINT_FAILED] v_dim == head_dim"),
        (wide(192, 128), "h200", (), CUDNN, None),
        (wide(192, 128), "h200", (), FLASH, "[CONSTRAINT_FAILED] v_dim == head_dim"),
        (wide(256), "h200", (TRAINED,), f"{CUDNN}.train", "[CONSTRAINT_FAILED] head_dim <= 128"),
        (wide(256), "h200", (TRAINED,), f"{FLASH}.train", None),
        (wide(224), "l40s", (TRAINED,), f"{FLASH}.train", "[CONSTRAINT_FAILED] head_dim <= 192"),
        # Shared heads, masks (§15.4), windows, softcap, slopes.
        (replace(PLAIN, heads=8, kv_heads=2), "h200", (), FLASH, None),
        (replace(PLAIN, heads=8, kv_heads=2), "h200", (), CUDNN, None),
        (replace(PLAIN, heads=8, kv_heads=2), "h200", (), EFFICIENT, "[GQA_UNSUPPORTED]"),
        (replace(PLAIN, causal=False, mask="bool"), "h200", (), FLASH, "[ATTN_MASK_UNSUPPORTED]"),
        (replace(PLAIN, causal=False, mask="bool"), "h200", (), CUDNN, "[ATTN_MASK_UNSUPPORTED]"),
        (replace(PLAIN, causal=False, mask="bool"), "h200", (), EFFICIENT, None),
        (replace(PLAIN, causal=False, mask="float16"), "h200", (), LITERAL, None),
        (replace(PLAIN, causal=False, mask="bool"), "h200", (), LITERAL, None),
        (replace(PLAIN, causal=False, mask="bool"), "h200", (), MASKED, "[CONSTRAINT_FAILED] alibi_slopes.present or"),
        (replace(PLAIN, causal=False, mask="bool", window_left=9), "h200", (), MASKED, None),
        (
            replace(PLAIN, causal=False, mask="bool", window_left=9),
            "h200",
            (),
            LITERAL,
            "[PARAM_UNSUPPORTED] window is",
        ),
        (replace(PLAIN, causal=False, mask="float32"), "h200", (), LITERAL, "[CONSTRAINT_FAILED] attn_mask.dtype =="),
        (replace(PLAIN, causal=False, mask="float32"), "h200", (), UNFUSED, None),
        (replace(PLAIN, window_left=64), "h200", (), SDPA, "[PARAM_UNSUPPORTED] window is"),
        (replace(PLAIN, window_left=64), "h200", (), MASKED, None),
        (replace(PLAIN, window_left=64), "h200", (), FLASH, None),
        (replace(PLAIN, window_left=64), "h200", (), EFFICIENT, None),
        (replace(PLAIN, window_left=64, causal=False), "h200", (), EFFICIENT, "[CONSTRAINT_FAILED] causal or"),
        (replace(PLAIN, seq_k=64, causal=False, window_left=9), "h200", (), FLASH, "[CONSTRAINT_FAILED] causal or"),
        (replace(PLAIN, softcap=30.0), "h200", (), FLASH, "[PARAM_UNSUPPORTED] softcap"),
        (replace(PLAIN, softcap=30.0), "h200", (), UNFUSED, None),
        (replace(PLAIN, alibi=True), "h200", (), FLASH, "[INPUT_UNSUPPORTED]"),
        (replace(PLAIN, alibi=True), "h200", (), MASKED, None),
        # Where torch's own alignment is another one.
        (replace(PLAIN, seq_k=256), "h200", (), SDPA, "[CONSTRAINT_FAILED] not causal or seq_q == seq_k"),
        (replace(PLAIN, seq_k=256), "h200", (), CUDNN, "[CONSTRAINT_FAILED] not causal or seq_q == seq_k"),
        (replace(PLAIN, seq_k=256), "h200", (), FLASH, None),
        (replace(PLAIN, seq_k=256), "h200", (), MASKED, None),
        (replace(PLAIN, seq_q=1), "h200", (), SDPA, None),
        (PLAIN, "h200", (), MASKED, "[CONSTRAINT_FAILED] alibi_slopes.present or"),
        # Gradients, determinism, graphs.
        (PLAIN, "h200", (TRAINED,), SDPA, "[AUTOGRAD_UNSUPPORTED]"),
        (PLAIN, "h200", (TRAINED,), f"{SDPA}.train", None),
        (PLAIN, "h200", ("--deterministic",), SDPA, None),
        (PLAIN, "h200", (TRAINED, "--deterministic"), f"{SDPA}.train", "[NON_DETERMINISTIC]"),
        (PLAIN, "h200", (TRAINED, "--deterministic"), UNFUSED, None),
        (PLAIN, "h200", ("--capturing",), SDPA, None),
        (PLAIN, "h200", ("--capturing",), CUDNN, None),
    ],
)
def test_what_is_declared(call: Dense, device: str, flags: tuple[str, ...], kernel_id: str, reason: str | None) -> None:
    reasons = call.ask(device, *flags)[kernel_id]
    if reason is None:
        assert not reasons
    else:
        assert any(line.startswith(reason) for line in reasons), reasons


def test_dropout_cannot_be_captured_and_sampling_can() -> None:
    def reasons(*flags: str) -> list[str]:
        return described.ask("attention", "h200", PLAIN.shapes, "float16", *flags, layout="BSHD", dropout_p=0.5)[SDPA]

    assert not reasons()
    assert reasons("--capturing")[0].startswith("[CONSTRAINT_FAILED] dropout_p == 0.0 or not context.capturing")
    # Sampling draws from torch's generator, whose state is safe in graphs.
    rows = {"logits": (4, 1000)}
    for given in (rows, {**rows, "uniform": (4,)}):
        answer = described.ask("sample_topk", "h200", given, "float32", "--capturing", k=5)
        assert not answer[f"{PREFIX}.topk"]


def test_a_graph_can_hold_every_kernel_that_does_not_draw() -> None:
    listed = [rules for kernels in adapter_cases.document("torch_cuda")["ops"].values() for rules in kernels]
    assert {rules["kernel_id"] for rules in listed} == set(KERNELS)
    # Kernels that work on each sequence by itself read where they are.
    reads = {rules["kernel_id"] for rules in listed if not rules.get("is_cuda_graph_safe")}
    assert reads == {f"{PREFIX}.{name}" for name in ("varlen.sdpa", "varlen.unfused", "lse.varlen.unfused")}


def test_without_a_device_detection_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    detect = described.adapter("torch_cuda").detect
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="finds no CUDA device"):
        detect()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="was built without CUDA"):
        detect()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert detect() == torch.__version__


# --- what is called ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_calls_the_engine_lets_through_are_right(kernels: Aten) -> None:
    torch.manual_seed(0)
    ran: dict[str, int] = {}
    choices: dict[str, Any] = {
        "alibi": (False, False, True),
        "mask": (None, None, "bool", "float16", "float32"),
        "dtype": ("float16", "bfloat16", "float32", "float64"),
    }
    plain: dict[str, Any] = {"window_left": (-1,), "window_right": (-1,), "softcap": (0.0,)}
    for call in (*dense_calls(11, 200, **choices), *dense_calls(12, 60, **plain)):
        free = call.mask is None
        call = replace(call, alibi=call.alibi and free and not call.cross, causal=call.causal and free)
        for name in takes(call.ask("h200"), PREFIX):
            tensors = call.tensors()
            before = {key: t.clone() for key, t in tensors.items()}
            output = KERNELS[name](**call.arguments(KERNELS[name], tensors))
            call.check(output, call.contract(tensors))
            assert all(torch.equal(t, before[key]) for key, t in tensors.items()), "an argument was written to"
            ran[name] = ran.get(name, 0) + 1
    others = (".paged", ".varlen", ".lse", ".sinks")
    dense = {n for n in KERNELS if (".sdpa" in n or ".attention" in n) and not any(other in n for other in others)}
    assert set(ran) == {n for n in dense if not n.endswith(".train")} and min(ran.values()) >= least(5), ran


@pytest.mark.slow
def test_paged_calls_the_engine_lets_through_are_right(kernels: Aten) -> None:
    torch.manual_seed(1)
    ran: dict[str, int] = {}
    choices: dict[str, Any] = {
        "dtype": ("float16", "bfloat16", "float32"),
        "cache_dtype": (None, None, "float8_e4m3fn"),
        "block_size": (1, 16, 64),
        "prefill": (False, True, True),
    }
    for call in paged_calls(5, 120, **choices):
        for name in takes(call.ask("h200"), PREFIX):
            tensors = call.tensors()
            # What lies beyond a context was never written.
            _spoil(tensors, call.layout)
            function = KERNELS[name]
            call.check(function(**call.arguments(function, tensors)), call.expected(tensors))
            ran[name] = ran.get(name, 0) + 1
    assert set(ran) == {n for n in KERNELS if ".paged." in n and "mla" not in n and ".lse." not in n} and min(
        ran.values()
    ) >= least(3), ran


def _spoil(tensors: dict[str, Tensor], layout: str) -> None:
    """Puts NaN where no sequence has a token."""
    for name in ("key_cache", "value_cache"):
        cache = tensors[name] if layout == "NHD" else tensors[name].transpose(1, 2)
        kept = torch.zeros(cache.shape[:2], dtype=torch.bool)
        for pages, length in zip(tensors["block_tables"].tolist(), tensors["context_lens"].tolist(), strict=True):
            for token in range(length):
                kept[pages[token // cache.shape[1]], token % cache.shape[1]] = True
        if cache.element_size() == 1:
            cache.view(torch.uint8)[~kept] = 0x7F
        else:
            cache[~kept] = torch.nan


def test_packed_calls_the_engine_lets_through_are_right(kernels: Aten) -> None:
    torch.manual_seed(2)
    ran: dict[str, int] = {}
    for number, call in enumerate(varlen_calls(5, 90, dtype=("float16", "bfloat16", "float32"))):
        for name in takes(call.ask("h200"), PREFIX):
            function, tensors = KERNELS[name], call.tensors()
            if number % 2 and "sinks" in inspect.signature(function).parameters:
                tensors["sinks"] = torch.randn(call.heads)
            call.check(function(**call.arguments(function, tensors)), call.expected(tensors))
            ran[name] = ran.get(name, 0) + 1
    assert set(ran) == {f"{PREFIX}.varlen.{kind}" for kind in ("flash", "sdpa", "unfused")}, ran
    assert min(ran.values()) >= least(5), ran


def test_logarithms_and_sinks_of_fused_kernels_are_those_of_matrix_products(kernels: Aten) -> None:
    torch.manual_seed(3)
    lengths = {"rows": (2, 7, 1), "lengths": (5, 30, 9), "head_dim": 64, "v_dim": 64}
    calls: list[tuple[str, Any]] = [
        ("lse", Dense(seq_q=5, seq_k=9, head_dim=64, v_dim=64, causal=causal, window_left=left, layout=layout))
        for causal, left, layout in ((True, -1, "BSHD"), (False, -1, "BHSD"), (True, 3, "BSHD"))
    ]
    calls += [("lse.varlen", Varlen(**lengths, causal=causal, tail=(2, 0))) for causal in (True, False)]
    calls += [("lse.paged", Paged(True, (5, 30, 0), (2, 7, 3), block_size=16, window_left=left)) for left in (-1, 4)]
    for op, call in calls:
        tensors = call.tensors()
        flash, unfused = (KERNELS[f"{PREFIX}.{op}.{kind}"] for kind in ("flash", "unfused"))
        got, want = (run(**call.arguments(run, tensors)) for run in (flash, unfused))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
        assert got[1].dtype == torch.float32 and got[1].shape == got[0].shape[:-1]
    call = Dense(seq_q=5, seq_k=9, head_dim=64, v_dim=64)
    tensors = {**call.tensors(), "sinks": torch.randn(call.heads)}
    flash, unfused = KERNELS[f"{FLASH}.sinks"], KERNELS[UNFUSED]
    got, want = (run(**call.arguments(run, tensors)) for run in (flash, unfused))
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


OPERATIONS = sorted({op for kernel in adapter_cases.kernels("torch_cuda") for op in kernel.ops})


def taken(op: str, case: adapter_cases.Case, here: dict[str, adapter_cases.Kernel]) -> list[str]:
    """The kernels that take a case."""
    if not op.startswith(("attention", "posenc.rope")):
        return [name for name, kernel in here.items() if adapter_cases.reason_to_skip(kernel, case) is None]
    shapes = {name: tuple(stored["shape"]) for name, stored in case.tensors.items()}
    layout = None if "mla" in op else case.layout
    first = next(iter(case.dtypes.values()))
    return takes(described.ask(op, "h200", shapes, first, dtypes=case.dtypes, layout=layout, **case.params), PREFIX)


@pytest.mark.parametrize("op", OPERATIONS)
def test_kernels_agree_with_the_cases(kernels: Aten, op: str) -> None:
    here = {kernel.id: kernel for kernel in adapter_cases.kernels("torch_cuda") if op in kernel.ops}
    wrong, reached = {}, set()
    # The engine is made for each question: `make test` asks about one case in three.
    asked = 3 if op.startswith("attention") and not FULL else 1
    for case in adapter_cases.cases(op)[::asked]:
        # A device is not asked whether indices are within bounds, and NaN among what gets no weight may spread.
        unsure = case.name.startswith(("nan", "layout_from")) and op.startswith("attention")
        if case.expect is None or unsure:
            continue
        for name in taken(op, case, here):
            reached.add(name)
            if problems := adapter_cases.run(replace(here[name], run=KERNELS[name]), case):
                wrong[f"{name}: {case.name}"] = problems
    assert not wrong
    # The cases are of small heads, which some kernels do not take.
    # Those of sampling give the numbers, and literal ones draw their own.
    small = (".train", ".cudnn", ".efficient", ".flash", ".cross", ".literal")
    assert reached >= {name for name in here if not any(part in name for part in small)}


def test_the_plan_is_the_call() -> None:
    plan = sdpa.sdpa.direct  # type: ignore[attr-defined]
    for call in (Dense(layout="BHSD"), Dense(layout="BHSD", heads=8, kv_heads=2, causal=False, scale=0.3)):
        arguments = call.arguments(sdpa.sdpa, call.tensors())
        function, given, keywords = plan(**arguments)
        assert torch.equal(function(*given, **keywords), sdpa.sdpa(**arguments))
    odd = Dense(layout="BHSD", scale=-0.3)
    assert plan(**odd.arguments(sdpa.sdpa, odd.tensors())) is None
    turned = Dense(layout="BSHD")
    arguments = turned.arguments(sdpa.sdpa, turned.tensors())
    function, given, keywords = plan(**arguments)
    heads_first = function(*(one.tensor.transpose(1, 2) for one in given), **keywords)
    assert torch.equal(heads_first.transpose(1, 2), sdpa.sdpa(**arguments))


def test_what_kernels_cannot_load_from_is_copied(kernels: Aten) -> None:
    call = Dense(batch=1, heads=2, kv_heads=2, layout="BSHD")
    moved = torch.randn(24 * 2 * 64 + 1).half()[1:].view(1, 24, 2, 64)
    gaps = torch.randn(1, 24, 2, 68).half()[..., :64]
    shared = torch.randn(1, 1, 2, 64).half().expand(1, 24, 2, 64)
    for name in (SDPA, FLASH, CUDNN, EFFICIENT):
        for key in (moved, gaps, shared):
            tensors = {**call.tensors(), "key": key}
            call.check(KERNELS[name](**call.arguments(KERNELS[name], tensors)), call.contract(tensors))


@pytest.mark.parametrize("name", [f"{SDPA}.train", f"{LITERAL}.train", f"{MASKED}.train", UNFUSED])
def test_gradients(name: str) -> None:
    torch.manual_seed(4)
    calls = [
        Dense(1, 5, 5, 4, 2, 8, 8, "float64"),
        Dense(1, 5, 5, 2, 2, 8, 8, "float64", causal=False, mask="float64"),
        Dense(1, 3, 7, 2, 2, 8, 8, "float64", window_left=2),
        Dense(1, 3, 7, 2, 2, 8, 8, "float64", alibi=True),
        Dense(1, 3, 7, 2, 1, 8, 8, "float64", softcap=3.0),
    ]
    checked = 0
    for call in calls:
        if call.ask("h200", TRAINED).get(name):
            continue
        tensors = {key: t.double().requires_grad_() for key, t in call.tensors().items()}
        expected = torch.autograd.grad(call.contract(tensors).sin().sum(), list(tensors.values()))
        output = KERNELS[name](**call.arguments(KERNELS[name], tensors))
        given = torch.autograd.grad(output.sin().sum(), list(tensors.values()))
        for one, other in zip(given, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
        checked += 1
    assert checked


def test_masked_queries_of_any_kind_give_zeros(kernels: Aten) -> None:
    for dtype in ("float16", "float32"):
        call = Dense(dtype=dtype, causal=False, mask="bool")
        tensors = call.tensors()
        tensors["attn_mask"][:, :, 3] = False
        for name in (LITERAL, MASKED, EFFICIENT, UNFUSED):
            output = KERNELS[name](**call.arguments(KERNELS[name], tensors))
            assert not output[:, 3].any() and output[:, 4].any()


def _unsafe_sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: Any = None, enable_gqa: Any = False
) -> Tensor:
    """What a kernel that promises nothing of masked queries makes of a call: NaN where all is masked."""
    if enable_gqa:
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("added", [False, True], ids=["bools", "numbers"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 5, 7), (1, 4, 5, 7), (2, 4, 5, 7)], ids=str)
def test_a_mask_alone_is_one_call_of_torch(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], added: bool, layout: str
) -> None:
    """The plan gives what the kernel gives: float64 arithmetic row by row, zeros where a query attends to nothing."""
    monkeypatch.setattr(sdpa, "_sdpa", _unsafe_sdpa)
    make = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, seq, 8, generator=make, dtype=torch.float64) for heads, seq in ((4, 5), (2, 7), (2, 7))
    )
    mask = torch.rand(shape, generator=make) < 0.6
    mask[..., 2, :] = False
    mask[..., 3, 0] = True
    given: Tensor = (
        torch.randn(shape, generator=make, dtype=torch.float64).masked_fill(~mask, -torch.inf) if added else mask
    )
    want = torch.zeros(2, 4, 5, 8, dtype=torch.float64)
    full = given.expand(2, 4, 5, 7)
    for b, h, i in ((b, h, i) for b in range(2) for h in range(4) for i in range(5)):
        there = [j for j in range(7) if mask.expand(2, 4, 5, 7)[b, h, i, j]]
        if there:
            scores = (k[b, h // 2, there] @ q[b, h, i]) * 0.3 + (full[b, h, i, there] if added else 0.0)
            weights = torch.exp(scores - scores.max())
            want[b, h, i] = (weights / weights.sum()) @ v[b, h // 2, there]
    tensors = [one if layout == "BHSD" else one.transpose(1, 2).contiguous() for one in (q, k, v)]
    arguments = (*tensors, given, None, False, 0.3, -1, -1, 0.0, 0, layout)
    kernel = KERNELS[MASKED]
    got = kernel(*arguments)
    torch.testing.assert_close(got if layout == "BHSD" else got.transpose(1, 2), want, rtol=1e-12, atol=1e-12)
    function, parts, keywords = kernel.direct(*arguments)
    turned = [one.tensor.transpose(1, 2) if isinstance(one, Turned) else one for one in parts]
    torch.testing.assert_close(function(*turned, **keywords), want, rtol=1e-12, atol=1e-12)
    # Anything more than the mask is no single call.
    for number, value in ((5, True), (7, 3), (9, 0.5), (6, -1.0)):
        assert kernel.direct(*(value if at == number else one for at, one in enumerate(arguments))) is None


def test_masked_queries_are_cleared_in_two_launches() -> None:
    class Counted(TorchDispatchMode):
        calls: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    output, mask = torch.randn(1, 4, 5, 8), torch.ones(5, 7, dtype=torch.bool)
    with Counted():
        sdpa._nothing_is_zero(output, mask)
    assert [name for name in Counted.calls if name not in ("scalar_tensor", "lift_fresh")] == ["any", "where"]


def test_half_width_products_are_widened_where_gradients_are_wanted() -> None:
    half = torch.ones(1, 2, 3, dtype=torch.float16)
    assert not unfused.stays_narrow(half)
    assert unfused.product(half, half.transpose(1, 2), False).dtype == torch.float32


def test_blocks_beyond_the_list_are_not_listed() -> None:
    query = torch.randn(4, 2, 8)
    indptr = torch.tensor([1, 2, 2])
    output = sparse.block(query, query, query, indptr, torch.tensor([1, 0, 1]), 2, 2, None)
    want = attend(query[:2].transpose(0, 1), query[:2].transpose(0, 1), query[:2].transpose(0, 1), None, 8**-0.5)
    torch.testing.assert_close(output[:2].double(), want.transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert not output[2:].any()
