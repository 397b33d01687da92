"""cuDNN's frontend: what is declared, put to the engine; what is called, on a graph of the same methods."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import described
import fake_cudnn
import layerzero as lz
import pytest
import torch
from attention_calls import Dense, dense_calls, least
from described import SM, adapter, takes
from layerzero import backend_files

VERSION = "1.23.0"
PLAIN = Dense(seq_q=128, seq_k=128, head_dim=128, v_dim=128)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As if it were installed."""
    with described.registered("cudnn", VERSION):
        yield


class Stream:
    """What CUDA would say of streams."""

    current = 7
    capturing = False


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> fake_cudnn.Library:
    """The library in its place, on a device that is the CPU."""
    return install(monkeypatch, fake_cudnn.Library())


def install(monkeypatch: pytest.MonkeyPatch, library: fake_cudnn.Library) -> fake_cudnn.Library:
    """Puts a library in place and has the adapter find it."""
    plans = importlib.import_module("layerzero.backends.cudnn.plans")
    monkeypatch.setattr(Stream, "current", 7)
    monkeypatch.setattr(Stream, "capturing", False)
    monkeypatch.setattr(plans, "current_stream", lambda device: Stream.current)
    monkeypatch.setattr(plans, "is_current", lambda device: True)
    monkeypatch.setattr(plans, "is_capturing", lambda: Stream.capturing)
    monkeypatch.setitem(sys.modules, "cudnn", library.module())
    assert adapter("cudnn").detect() == VERSION
    return library


# --- what is declared -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "device", "flags", "reason"),
    [
        (PLAIN, "t4", (), "[SM_TOO_OLD] requires SM 80 or newer, have SM 75"),
        (PLAIN, "a100", (), None),
        (PLAIN, "l40s", (), None),
        (PLAIN, "h100", (), None),
        (PLAIN, "h200", (), None),
        (PLAIN, "b200", (), None),
        (PLAIN, "mi300x", (), "[PLATFORM_MISMATCH] runs on cuda, this is rocm"),
        (PLAIN, "gaudi3", (), "[PLATFORM_MISMATCH] runs on cuda, this is hpu"),
        (replace(PLAIN, dtype="float32"), "h100", (), "[DTYPE_UNSUPPORTED] 'query' is float32"),
        (replace(PLAIN, head_dim=256, v_dim=256), "a100", (), "[CONSTRAINT_FAILED] max(head_dim, v_dim) <= 128"),
        (replace(PLAIN, head_dim=256, v_dim=256), "h100", (), None),
        (replace(PLAIN, head_dim=192), "h100", (), None),
        (replace(PLAIN, head_dim=264, v_dim=264), "h100", (), "[HEAD_DIM_TOO_LARGE]"),
        (replace(PLAIN, head_dim=84, v_dim=84), "h100", (), "[HEAD_DIM_ALIGNMENT]"),
        (replace(PLAIN, heads=8, kv_heads=2), "h100", (), None),
        (replace(PLAIN, seq_q=1), "h100", (), "[CONSTRAINT_FAILED] seq_q"),
        (replace(PLAIN, seq_k=64, causal=False), "h100", (), None),
        (replace(PLAIN, window_left=9), "h100", (), None),
        (replace(PLAIN, window_left=9, causal=False), "h100", (), "[CONSTRAINT_FAILED] causal or window_left < 0"),
        (replace(PLAIN, causal=False, mask="bool"), "h100", (), "[ATTN_MASK_UNSUPPORTED]"),
        (replace(PLAIN, softcap=3.0), "h100", (), "[PARAM_UNSUPPORTED] softcap"),
        (replace(PLAIN, alibi=True), "h100", (), "[INPUT_UNSUPPORTED]"),
        (PLAIN, "h100", ("--requires-grad",), "[AUTOGRAD_UNSUPPORTED]"),
        (PLAIN, "h100", ("--deterministic",), None),
        (PLAIN, "h100", ("--capturing",), "[CUDA_GRAPH_UNSAFE]"),
    ],
)
def test_what_is_declared(call: Dense, device: str, flags: tuple[str, ...], reason: str | None) -> None:
    reasons = call.ask(device, *flags)["cudnn.sdpa"]
    assert not reasons if reason is None else any(line.startswith(reason) for line in reasons), reasons


def test_older_frontends_are_not_used() -> None:
    with described.registered("cudnn", "1.9.0"):
        reasons = PLAIN.ask("h100")["cudnn.sdpa"]
    assert reasons and all(line.startswith("[VERSION_UNSUPPORTED]") for line in reasons)
    lz.register_backend(backend_files.folder("cudnn") / "capabilities.json", adapter("cudnn").KERNELS, version=VERSION)


# --- what is called ---------------------------------------------------------------------------------------------------


def test_calls_the_engine_lets_through_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ran: dict[str, int] = {}
    for number, call in enumerate(dense_calls(7, 160, head_dim=(8, 64, 128, 256), softcap=(0.0,))):
        device = ("a100", "h100", "b200")[number % 3]
        library = install(monkeypatch, fake_cudnn.Library(sm=SM[device], workspace=number % 2 * 64))
        for name in takes(call.ask(device), "cudnn."):
            tensors = call.tensors()
            before = {key: t.clone() for key, t in tensors.items()}
            function = adapter("cudnn").KERNELS[name]
            got = function(**call.arguments(function, tensors))
            assert got.shape == call.shape(call.seq_q, call.heads, call.v_dim) and got.is_contiguous()
            call.check(got, call.contract(tensors))
            assert all(torch.equal(t, before[key]) for key, t in tensors.items()), "an argument was written to"
            assert len(library.graphs) == 1
            ran[name] = ran.get(name, 0) + 1
    assert set(ran) == set(adapter("cudnn").KERNELS) and min(ran.values()) >= least(5), ran


def run(call: Dense, **tensors: torch.Tensor) -> torch.Tensor:
    """One call, checked."""
    given = {**call.tensors(), **tensors}
    function = adapter("cudnn").KERNELS["cudnn.sdpa"]
    got: torch.Tensor = function(**call.arguments(function, given))
    call.check(got, call.contract(given))
    return got


def test_a_plan_is_built_once_for_a_kind_of_call(library: fake_cudnn.Library) -> None:
    call = Dense()
    for _ in range(3):
        run(call)
    assert len(library.graphs) == 1 and len(library.runs) == 3
    others = [
        replace(call, batch=3),
        replace(call, seq_k=40),
        replace(call, causal=False),
        replace(call, scale=0.3),
        replace(call, window_left=3),
        replace(call, dtype="bfloat16"),
        replace(call, layout="BHSD"),
    ]
    for number, other in enumerate(others):
        run(other)
        run(other)
        assert len(library.graphs) == number + 2
    # A window that holds nothing back is none.
    run(replace(call, window_left=24))
    assert len(library.graphs) == len(others) + 1


def test_old_plans_make_room(library: fake_cudnn.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("layerzero.backends.cudnn.plans"), "MOST_PLANS", 2)
    for batch in (1, 2, 3, 3, 2, 1):
        run(Dense(batch=batch))
    assert len(library.graphs) == 4


def test_nothing_is_copied_that_can_be_turned(library: fake_cudnn.Library) -> None:
    for layout in ("BSHD", "BHSD"):
        run(Dense(layout=layout, heads=4, kv_heads=2))
        query = library.graphs[-1].inputs[0]
        assert query.dim == [2, 4, 24, 64]
        assert query.stride == ([24 * 256, 64, 256, 1] if layout == "BSHD" else [4 * 24 * 64, 24 * 64, 64, 1])


def test_what_cannot_be_loaded_from_is_copied(library: fake_cudnn.Library) -> None:
    call = Dense(batch=1, heads=2, kv_heads=2)
    run(call, key=torch.randn(24 * 2 * 64 + 1).half()[1:].view(1, 24, 2, 64))
    run(call, key=torch.randn(1, 24, 2, 68).half()[..., :64])
    run(call, key=torch.randn(1, 1, 2, 64).half().expand(1, 24, 2, 64))
    # Of one batch or one head the stride may be anything.
    run(call, query=torch.randn(24 * 2 * 64).half().as_strided((1, 24, 2, 64), (1, 128, 64, 1)))
    run(Dense(batch=1, heads=1, kv_heads=1, seq_k=40, layout="BHSD"))
    assert library.graphs[-1].inputs[0].stride[:2] == [24 * 64, 24 * 64]


def test_a_handle_follows_its_threads_stream(library: fake_cudnn.Library) -> None:
    run(Dense())
    Stream.current = 9
    run(Dense())
    assert [stream for _, stream in library.runs] == [7, 9] and len(library.handles) == 1
    other = threading.Thread(target=run, args=(Dense(),))
    other.start()
    other.join()
    assert len(library.handles) == 2 and len(library.graphs) == 1


def test_nothing_is_built_while_a_graph_is_captured(library: fake_cudnn.Library) -> None:
    Stream.capturing = True
    with pytest.raises(RuntimeError, match="handle cannot be made while a CUDA graph is captured"):
        run(Dense())
    Stream.capturing = False
    run(Dense())
    Stream.capturing = True
    run(Dense())
    with pytest.raises(RuntimeError, match="plan cannot be built while a CUDA graph is captured"):
        run(Dense(batch=5))
    assert len(library.graphs) == 1


# --- what is found ----------------------------------------------------------------------------------------------------


def test_the_engine_loads_the_document() -> None:
    known = {k.kernel_id: k for k in lz.list_kernels() if k.backend == "cudnn"}
    assert set(known) == set(adapter("cudnn").KERNELS)
    assert all(k.platforms == ["cuda"] for k in known.values())


def test_what_cannot_be_used_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(ImportError) as caught:
        adapter("cudnn").detect()
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "cudnn", type(sys)("cudnn"))
    with pytest.raises(ImportError, match="cudnn has no backend_version, .*; install nvidia-cudnn-frontend"):
        adapter("cudnn").detect()
    monkeypatch.setitem(sys.modules, "cudnn", fake_cudnn.Library(version=90800).module())
    with pytest.raises(RuntimeError, match="cuDNN 90800 is older than 91002"):
        adapter("cudnn").detect()


# --- on a GPU ---------------------------------------------------------------------------------------------------------

ON_GPU = [
    Dense(seq_q=128, seq_k=128, head_dim=128, v_dim=128, dtype="bfloat16"),
    Dense(seq_q=129, seq_k=129, heads=8, kv_heads=2, layout="BHSD"),
    Dense(seq_q=64, seq_k=200, heads=8, kv_heads=2, layout="BHSD", scale=0.2),
    Dense(seq_q=200, seq_k=64, causal=False),
    Dense(seq_q=300, seq_k=300, window_left=31),
    Dense(seq_q=150, seq_k=300, window_left=16, layout="BHSD"),
    Dense(seq_q=65, seq_k=90, scale=-0.3),
    Dense(seq_q=65, seq_k=90, scale=0.0, causal=False),
    Dense(seq_q=96, seq_k=40, cross=True, heads=6, kv_heads=2),
    Dense(seq_q=66, seq_k=66, head_dim=256, v_dim=256),
    Dense(seq_q=66, seq_k=66, head_dim=192, v_dim=128, dtype="bfloat16"),
    Dense(seq_q=66, seq_k=80, head_dim=64, v_dim=128, heads=4, kv_heads=1),
    Dense(batch=1, seq_q=2, seq_k=2, heads=1, kv_heads=1),
]


@pytest.fixture
def found() -> Iterator[str]:
    """The library itself, on this machine's GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        version = adapter("cudnn").detect()
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    with described.registered("cudnn", version):
        yield version


@pytest.mark.gpu
def test_the_library_itself_is_right(found: str) -> None:
    torch.manual_seed(0)
    for call in ON_GPU:
        tensors = call.tensors("cuda")
        keywords = call.keywords(tensors)
        name = "cudnn.sdpa.cross" if call.cross else "cudnn.sdpa"
        accepted, reasons = lz.validate(name, **keywords)
        assert accepted, reasons
        call.check(lz.run_kernel(name, **keywords).cpu(), call.contract(tensors).cpu())


@pytest.mark.gpu
def test_a_planned_call_can_be_captured(found: str) -> None:
    torch.manual_seed(0)
    function: Any = adapter("cudnn").KERNELS["cudnn.sdpa"]
    call = Dense(seq_q=200, seq_k=300, heads=8, kv_heads=2, dtype="bfloat16")
    tensors = call.tensors("cuda")
    arguments = call.arguments(function, tensors)
    function(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(**arguments)
    for _ in range(3):
        for name, tensor in call.tensors("cuda").items():
            tensors[name].copy_(tensor)
        graph.replay()
        call.check(output.cpu(), call.contract(tensors).cpu())
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        other = replace(call, seq_q=100)
        function(**other.arguments(function, {**tensors, "query": tensors["query"][:, :100]}))
