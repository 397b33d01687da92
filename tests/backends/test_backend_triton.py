"""Our kernels in Triton: what is declared, put to the engine; what is computed, in Triton's interpreter and on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import adapter_cases as cases
import described
import layerzero as lz
import pytest
import torch
from described import adapter
from interpreting import interpret
from processes import SUPPORT, forked
from triton_draws import hard_draws, large_draws, wrong_asides

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

VERSION = "3.6.0"
# What is in the data is not looked at: it gives NaN, not an error.
DATA = "error_"
FLASH8 = ("float8_e4m3fn", "float8_e5m2")


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if a device were here."""
    with described.registered("triton", VERSION):
        yield


# --- what is declared -------------------------------------------------------------------------------------------------

NORM: tuple[str, dict[str, tuple[int, ...]]] = ("norm.rms", {"input": (64, 4096), "weight": (4096,)})
TOPP: tuple[str, dict[str, tuple[int, ...]]] = ("sampling.topp", {"logits": (64, 128256)})
PAGED: tuple[str, dict[str, tuple[int, ...]]] = (
    "attention.gqa.decode.paged",
    {
        "query": (4, 32, 128),
        "key_cache": (64, 16, 8, 128),
        "value_cache": (64, 16, 8, 128),
        "block_tables": (4, 32),
        "context_lens": (4,),
    },
)
INDICES = {"block_tables": "int32", "context_lens": "int32"}


@pytest.mark.parametrize(
    ("call", "device", "dtype", "flags", "more", "kernel_id", "reason"),
    [
        (NORM, "h200", "bfloat16", (), {}, "triton.rms_norm", None),
        (NORM, "a100", "float32", (), {}, "triton.rms_norm", None),
        (NORM, "h200", "bfloat16", ("--capturing",), {}, "triton.rms_norm", None),
        (NORM, "h200", "bfloat16", ("--deterministic",), {}, "triton.rms_norm", None),
        (NORM, "t4", "float16", (), {}, "triton.rms_norm", "[SM_TOO_OLD]"),
        (NORM, "mi300x", "float16", (), {}, "triton.rms_norm", "[PLATFORM_MISMATCH]"),
        (NORM, "h200", "float64", (), {}, "triton.rms_norm", "[DTYPE_UNSUPPORTED]"),
        (NORM, "h200", "bfloat16", ("--requires-grad",), {}, "triton.rms_norm", "[AUTOGRAD_UNSUPPORTED]"),
        (TOPP, "h200", "float32", (), {"p": 0.9}, "triton.topp", None),
        (TOPP, "h200", "float32", ("--capturing",), {"p": 0.9}, "triton.topp", None),
        (PAGED, "h200", "bfloat16", ("--capturing",), {"dtypes": INDICES}, "triton.paged.decode.gqa", None),
    ],
)
def test_what_is_declared(
    call: tuple[str, dict[str, tuple[int, ...]]],
    device: str,
    dtype: str,
    flags: tuple[str, ...],
    more: dict[str, Any],
    kernel_id: str,
    reason: str | None,
) -> None:
    reasons = described.ask(call[0], device, call[1], dtype, *flags, **more)[kernel_id]
    if reason is None:
        assert not reasons
    else:
        assert any(line.startswith(reason) for line in reasons), reasons


@pytest.mark.parametrize(
    ("device", "cache", "reason"),
    [
        ("h200", "float8_e4m3fn", None),
        ("a100", "float8_e5m2", None),
        ("a100", "float8_e4m3fn", "[CONSTRAINT_FAILED] key_cache.dtype == query.dtype or"),
        ("h200", "float16", "[CONSTRAINT_FAILED] key_cache.dtype == query.dtype or"),
    ],
)
def test_caches_of_another_dtype(device: str, cache: str, reason: str | None) -> None:
    dtypes = {**INDICES, "key_cache": cache, "value_cache": cache}
    reasons = described.ask(PAGED[0], device, PAGED[1], "bfloat16", dtypes=dtypes)["triton.paged.decode.gqa"]
    assert not reasons if reason is None else reasons[0].startswith(reason), reasons


def test_without_a_device_nothing_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch sees none"):
        adapter("triton").detect()


def test_a_kind_of_call_is_planned_once() -> None:
    """What a plan calls is the same for all calls of the kind, and takes their tensors only."""
    x, w = torch.randn(4, 64), torch.randn(64)
    for name, arguments in (("triton.rms_norm", (x, w, 1e-6)), ("triton.silu_mul", (x, x.clone()))):
        run = adapter("triton").KERNELS[name]
        function, tensors = run.direct(*arguments)
        assert callable(function) and all(one is other for one, other in zip(tensors, arguments, strict=False))


# --- what is computed -------------------------------------------------------------------------------------------------


def kernels() -> dict[str, cases.Kernel]:
    """The kernels, without conditions that are about devices."""
    found = {kernel.id: kernel for kernel in cases.kernels("triton")}
    for kernel in found.values():
        # A step of one token under a mask has no kernel for calls without one.
        kernel.rules["conditions"] = ["attn_mask.present"] if "decode.masked" in kernel.id else []
    return found


def problems(name: str, device: str = "cpu", every: int = 1) -> list[str]:
    """What is wrong with a kernel on the cases of its operations."""
    kernel, wrong, ran = kernels()[name], [], 0
    for op in kernel.ops:
        for case in cases.cases(op)[::every]:
            if cases.reason_to_skip(kernel, case) or case.name.startswith(DATA):
                continue
            cache = case.dtypes.get("key_cache")
            if cache is not None and cache != case.dtypes["query"] and cache not in FLASH8:
                continue
            if device == "cpu" and case.dtypes.get("query") == "bfloat16":
                # The interpreter multiplies matrices of bfloat16 as if they were integers.
                continue
            wrong += [f"{name}: {op} {case.name}: {problem}" for problem in run(kernel, case, device)]
            ran += 1
    return wrong if ran else [f"{name}: nothing ran"]


def run(kernel: cases.Kernel, case: cases.Case, device: str) -> list[str]:
    """Runs a case on a device and says what is wrong with it."""
    inputs = {name: tensor.to(device) for name, tensor in case.inputs().items()}
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    result = kernel.run(**dict(cases.arguments(kernel, case, inputs)))
    results = result if isinstance(result, tuple) else (result,)
    wrong = [f"{name} was written to" for name, was in before.items() if not cases.same(inputs[name], was)]
    for (name, expected), got in zip((case.expect or {}).items(), results, strict=True):
        difference = cases.difference(got.cpu(), expected)
        wrong += [] if difference is None else [f"{name}: {difference}"]
    return wrong


def draws(rows: int, vocab: int, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Logits of many kinds."""
    make = torch.Generator(device).manual_seed(3)
    plain = torch.randn(rows, vocab, generator=make, device=device)
    ids = torch.rand(rows, vocab, generator=make, device=device)
    yield "wide", 4.0 * plain
    yield "bfloat16", plain.bfloat16()
    yield "few", torch.floor(4.0 * ids)
    yield "masked", plain.masked_fill(ids < 0.99, -math.inf)
    yield "far below", plain.masked_fill(ids < 0.9, -1e4).half()
    yield "a peak", torch.where(ids > 0.9995, plain + 15.0, plain)
    yield "strided", torch.randn(rows, 2 * vocab, generator=make, device=device)[:, 3 : 3 + vocab]
    yield "a NaN", plain.index_fill(1, torch.tensor([vocab // 2], device=device), math.nan)
    yield "infinite", plain.index_fill(1, torch.tensor([5], device=device), math.inf)
    yield "one", torch.full_like(plain, -math.inf).index_fill(1, torch.tensor([vocab - 1], device=device), 1.0)
    yield "none", torch.full_like(plain, -math.inf)


def wrong_draws(rows: int, vocab: int, device: str, few: bool = False) -> list[str]:
    """Draws that are not those of the sorted vocabulary."""
    sampling = import_module(f"{cases.PACKAGE}.backends._shared.torch_functions.sampling")
    found, wrong = kernels(), []
    topp, topk = found["triton.topp"].run, found["triton.topk"].run
    for kind, logits in list(draws(rows, vocab, device))[:: 4 if few else 1]:
        for p in (0.9, 1.0) if few else (0.3, 0.9, 0.9999, 1.0):
            uniform = torch.rand(rows, dtype=torch.float64, device=device)
            got, want = topp(logits, uniform, p, 0), sampling.topp_sorted(logits, uniform, p, 0)
            wrong += [] if torch.equal(got, want) else [f"top-p of {kind}, {p}: {got.tolist()} for {want.tolist()}"]
        for k in (40,) if few else (1, 40, vocab):
            uniform = torch.rand(rows, device=device)
            values, ids = logits.sort(stable=True, dim=-1, descending=True)
            probabilities = torch.softmax(values[:, :k].double(), -1)
            got, want = topk(logits, uniform, k, 0), sampling._drawn(ids[:, :k], probabilities, uniform.double())
            wrong += [] if torch.equal(got, want) else [f"top-k of {kind}, {k}: {got.tolist()} for {want.tolist()}"]
    return wrong


def interpreted(names: list[str]) -> list[str]:
    """What the interpreter finds wrong."""
    interpret()
    torch.manual_seed(0)
    wrong = [line for name in names for line in problems(name, every=6 if "top" in name else 1)]
    if "triton.topp" in names:
        topp, topk = (kernels()[name].run for name in ("triton.topp", "triton.topk"))
        wrong += wrong_draws(1, 4500, "cpu", few=True) + seeded() + hard_draws(topp, topk, 40) + large_draws(topp)
        wrong += wrong_asides()
    return wrong


def seeded() -> list[str]:
    """Draws without numbers that are not those of the reference."""
    logits, run, wrong = torch.randn(5, 50), kernels()["triton.topp"].run, []
    for seed in (0, 7, -3, 2**62):
        want = lz.run_kernel("lz_cpu.ref.sampling.topp", logits=logits, p=0.9, seed=seed)
        got = run(logits, None, 0.9, seed)
        wrong += [] if torch.equal(got, want) else [f"seed {seed}: {got.tolist()} for {want.tolist()}"]
    return wrong


@pytest.mark.parametrize(
    "names",
    [
        [
            "triton.rms_norm",
            "triton.layer_norm",
            "triton.add_rms_norm",
            "triton.silu_mul",
            "triton.gelu",
            "triton.rope",
            "triton.alibi",
            "triton.speculative",
            "triton.merge_states",
        ],
        ["triton.paged.decode", "triton.paged.decode.gqa", "triton.quantize", "triton.dequantize"],
        pytest.param(["triton.topk", "triton.topp"], marks=pytest.mark.slow),
    ],
    ids=["rows", "blocks", "draws"],
)
def test_the_interpreter_finds_nothing_wrong(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = f"import warnings\nwarnings.simplefilter('ignore')\nimport test_backend_triton as t\nanswer(t.interpreted({names}))"
    assert forked(code, path=[Path(__file__).parent, SUPPORT]) == []


# --- on a device ------------------------------------------------------------------------------------------------------


@pytest.fixture
def device() -> str:
    """A device, if there is one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


@pytest.mark.gpu
# What updates its inputs has tests of its own (test_backend_triton_caching.py), and so has what no case is wide enough for
# (test_backend_triton_prefill.py).
@pytest.mark.parametrize(
    "name",
    [name for name in adapter("triton").KERNELS if not name.startswith(("triton.kv_append", "triton.paged.prefill"))],
)
def test_the_cases_on_a_device(device: str, name: str) -> None:
    assert problems(name, device) == []


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 4500), (64, 32000), (1, 128256), (64, 128256), (2, 50257)])
def test_draws_on_a_device(device: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    assert wrong_draws(*shape, device) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (33, 1000), (5, 4096), (3, 5120), (2, 20000), (2, 70001)])
def test_norms_of_any_width(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    x, r = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    w, b = (torch.randn(shape[1], device=device).to(dtype) for _ in range(2))
    wide, total = x.double(), x.double() + r.double()
    tolerance = {"rtol": cases.TOLERANCES[dtype], "atol": cases.TOLERANCES[dtype]}

    def rms(rows: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * w.double()

    run = adapter("triton").KERNELS
    torch.testing.assert_close(run["triton.rms_norm"](x, w, 1e-6).double(), rms(wide), **tolerance)
    output, added = run["triton.add_rms_norm"](x, r, w, 1e-6)
    torch.testing.assert_close(output.double(), rms(total), **tolerance)
    torch.testing.assert_close(added, total.to(dtype), rtol=1e-6, atol=1e-6)
    want = torch.nn.functional.layer_norm(wide, shape[1:], w.double(), b.double(), 1e-5)
    torch.testing.assert_close(run["triton.layer_norm"](x, w, b, 1e-5).double(), want, **tolerance)
    sliced = torch.randn(shape[0], 2, 3 * shape[1], device=device).to(dtype)[..., shape[1] : 2 * shape[1]]
    torch.testing.assert_close(run["triton.rms_norm"](sliced, w, 1e-6).double(), rms(sliced.double()), **tolerance)


@pytest.mark.gpu
def test_tensors_beyond_32_bits(device: str) -> None:
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of memory")
    rows = 2**31 // 4096 + 8
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16, device=device)
    x[-1] = torch.randn(4096, device=device)
    run = adapter("triton").KERNELS
    want = x[-1:].double() * torch.rsqrt(x[-1:].double().square().mean() + 1e-6)
    torch.testing.assert_close(run["triton.rms_norm"](x, None, 1e-6)[-1:].double(), want, rtol=1e-2, atol=1e-2)
    want = torch.nn.functional.silu(x[-1:].double()) * x[-1:].double()
    torch.testing.assert_close(run["triton.silu_mul"](x, x)[-1:].double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_calls_can_be_captured_and_go_straight(device: str) -> None:
    torch.manual_seed(3)
    x, w = torch.randn(64, 4096, device=device).bfloat16(), torch.randn(4096, device=device).bfloat16()
    logits, uniform = torch.randn(8, 32000, device=device), torch.rand(8, device=device)
    cache = torch.randn(64, 16, 8, 128, device=device).bfloat16()
    tables = torch.randperm(64, device=device)[:32].view(4, 8).int()
    lens = torch.tensor([1, 17, 100, 128], device=device, dtype=torch.int32)
    query = torch.randn(4, 32, 128, device=device).bfloat16()
    run = adapter("triton").KERNELS
    calls = {
        "triton.rms_norm": (x, w, 1e-6),
        "triton.add_rms_norm": (x, x.clone(), w, 1e-6),
        "triton.silu_mul": (x, x.clone()),
        "triton.topp": (logits, uniform, 0.9, 0),
        "triton.topk": (logits, uniform, 50, 0),
        "triton.paged.decode.gqa": (query, cache, cache.clone(), tables, lens, None, -1, 0.0, "NHD"),
        "triton.quantize": (x, None, "int8", "per_channel", None, False),
    }
    for name, arguments in calls.items():
        first = run[name](*arguments)
        # Not every kernel comes down to one call.
        if (plan := run[name].direct(*arguments)) is not None:
            function, tensors = plan
            for _ in range(3):
                assert same(function(*tensors), first), name
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run[name](*arguments)
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, first), name


def same(one: Any, other: Any) -> bool:
    """Whether two results are the same."""
    pair = (one, other) if isinstance(one, tuple) else ((one,), (other,))
    return all(torch.equal(a, b) for a, b in zip(*pair, strict=True))
