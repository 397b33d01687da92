"""CUDA graphs: capture is seen, only what is safe there is chosen, and strict mode wants proof."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from layerzero import _native, kernel_runs
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
EPS = 1e-6


@pytest.fixture(autouse=True)
def database(tmp_path: Path) -> Iterator[None]:
    lz.configure(perfdb={"path": str(tmp_path / "perfdb.sqlite")})
    yield
    lz.reset()


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16), torch.ones(1024, device="cuda").bfloat16()


def captured(x: Tensor, weight: Tensor) -> Tensor:
    """A call in a graph, replayed on other numbers."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        result = lz.rms_norm(x, weight, EPS)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    return result


def test_capture_is_seen_by_questions_and_calls(inputs: tuple[Tensor, Tensor]) -> None:
    x, weight = inputs

    @lz.register_kernel(
        operation="norm.rms", kernel_id="test.unsafe", platform="cuda", supported_dtypes=["bfloat16"], priority=99
    )
    def unsafe(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        assert not torch.cuda.is_current_stream_capturing(), "not in here"
        return F.rms_norm(input, (input.shape[-1],), weight, eps)

    try:
        for _ in range(3):
            # Remembered outside the graph, and not used inside of it.
            lz.rms_norm(x, weight, EPS)
            assert lz.which("rms_norm", x, weight, EPS).kernel_id == "test.unsafe"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = [lz.which("rms_norm", x, weight, EPS).kernel_id for _ in range(2)]
            results = [lz.rms_norm(x, weight, EPS) for _ in range(3)]
        assert "test.unsafe" not in inside
        graph.replay()
        for result in results:
            assert torch.allclose(result.float(), F.rms_norm(x.float(), (1024,), None, EPS), atol=0.05)
        assert lz.which("rms_norm", x, weight, EPS).kernel_id == "test.unsafe"
    finally:
        lz.unregister_kernel("test.unsafe")


def right(x: Tensor) -> Tensor:
    return F.rms_norm(x.double(), (1024,), None, EPS).float()


def test_strict_mode_wants_proof(inputs: tuple[Tensor, Tensor]) -> None:
    x, weight = inputs
    lz.configure(graph_strict_mode=True)
    with pytest.raises(lz.CudaGraphUnsafeError) as refused:
        captured(x, weight)
    assert "lz.warmup" in str(refused.value)
    assert lz.rms_norm(x, weight, EPS).isfinite().all(), "outside nothing is missing"
    tuned = lz.tune("rms_norm", dtype=torch.bfloat16, shapes=[(64, 1024)], device="cuda", graph=True, budget="20s")
    assert tuned.tuned[0].chosen is not None
    assert torch.allclose(captured(x, weight).float(), right(x), atol=0.05)


def test_a_warm_up_proves_the_cell_of_its_sizes(inputs: tuple[Tensor, Tensor]) -> None:
    x, weight = inputs
    lz.configure(graph_strict_mode=True)
    report = lz.warmup("rms_norm", shapes=[(64, 1024)], dtype=torch.bfloat16, device="cuda")
    assert report.ok and report.proven, report
    assert torch.allclose(captured(x, weight).float(), right(x), atol=0.05)
    # 33 to 64 rows are one bucket, and 4096 are another.
    assert captured(x[:40].contiguous(), weight).isfinite().all()
    large = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(lz.CudaGraphUnsafeError):
        captured(large, weight)
    torch.cuda.synchronize()
    assert lz.warmup("rms_norm", shapes=[(4096, 1024)], dtype=torch.bfloat16, device="cuda").proven
    assert torch.allclose(captured(large, weight).float(), right(large), atol=0.05)


def test_validate_captures_in_strict_mode(inputs: tuple[Tensor, Tensor]) -> None:
    x, weight = inputs
    lz.configure(graph_strict_mode=True)
    assert lz.validate("torch.cuda.rms_norm", x, weight, EPS) == (True, [])
    assert torch.allclose(captured(x, weight).float(), right(x), atol=0.05), "what was validated is proven"


def register(kernel_id: str, run: Callable[[Tensor, Tensor | None, float], Tensor]) -> None:
    @lz.register_kernel(
        operation="norm.rms",
        kernel_id=kernel_id,
        platform="cuda",
        supported_dtypes=["bfloat16"],
        priority=99,
        is_cuda_graph_safe=True,
    )
    def kernel(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return run(input, weight, eps)


def waits(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    torch.cuda.synchronize()
    return F.rms_norm(input, (input.shape[-1],), weight, eps)


_KEPT: list[Tensor] = []


def keeps(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    _KEPT.append(torch.zeros(4 << 20, dtype=torch.int8, device=input.device))
    return F.rms_norm(input, (input.shape[-1],), weight, eps)


_CALLS = [0]


def counts(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    # A number of the host's, baked into the graph.
    _CALLS[0] += 1
    return F.rms_norm(input, (input.shape[-1],), weight, eps) + float(_CALLS[0])


@pytest.mark.parametrize(("run", "kind"), [(waits, "synchronizes"), (keeps, "allocates"), (counts, "differs")])
def test_a_proof_fails_for_a_reason(
    inputs: tuple[Tensor, Tensor], run: Callable[[Tensor, Tensor | None, float], Tensor], kind: str
) -> None:
    x, weight = inputs
    lz.configure(graph_strict_mode=True, verify="off")
    register("test.bad", run)
    try:
        valid, reasons = lz.validate("test.bad", x, weight, EPS)
        assert not valid and [(r.code, r.fields["why"]["kind"]) for r in reasons] == [("CUDA_GRAPH_UNSAFE", kind)]
        # A warm-up goes on to the next best, unless that was proven before.
        report = lz.warmup("rms_norm", shapes=[(64, 1024)], dtype=torch.bfloat16, device="cuda")
        assert report.ok and "test.bad" not in [one.kernel for one in report.proven]
        assert torch.allclose(captured(x, weight).float(), right(x), atol=0.05)
    finally:
        _KEPT.clear()
        lz.unregister_kernel("test.bad")


def test_a_capture_that_breaks_leaves_the_allocator_as_it_was(inputs: tuple[Tensor, Tensor]) -> None:
    """torch's allocator frees nothing of its cache while it takes a capture to be under way."""
    x, weight = inputs
    lz.configure(graph_strict_mode=True, verify="off")
    register("test.bad", waits)
    try:
        assert not lz.validate("test.bad", x, weight, EPS)[0]
    finally:
        lz.unregister_kernel("test.bad")
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_reserved()
    del held
    torch.cuda.empty_cache()
    assert before - torch.cuda.memory_reserved() >= 1 << 30


def test_a_recording_makes_a_users_own_capture_safe(inputs: tuple[Tensor, Tensor]) -> None:
    """cuBLAS, cuDNN and Triton in one graph, none of which was called before."""
    x, weight = inputs
    lz.configure(jit={"fail_on_no_fallback": False})
    wanted = {"mlp.linear": "torch.cuda.linear", "attention": "torch.cuda.sdpa.cudnn", "norm.rms": "triton.rms_norm"}
    for operation, kernel in wanted.items():
        lz.force_kernel(operation, kernel, optional=True)
    matrix = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) / 32

    def model() -> Tensor:
        q = lz.linear(lz.rms_norm(x, weight, EPS), matrix).view(1, 64, 8, 128)
        return lz.attention(q, q, q, causal=True)

    with lz.capture() as recorded:
        eager = model()
    assert len(recorded.calls) == 3 and all(one.error is None for one in recorded.calls), recorded
    held = {one.call["op"]: one.kernel for one in recorded.calls}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = lz.which("rms_norm", x, weight, EPS).kernel_id
        result = model()
    assert inside == held["norm.rms"]
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    h = F.rms_norm(x.double(), (1024,), weight.double(), EPS).bfloat16().double() @ matrix.double().T
    q = h.bfloat16().double().view(1, 64, 8, 128).transpose(1, 2)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
    assert torch.allclose(result.double(), expected, atol=0.05, rtol=0.05)
    assert eager.shape == result.shape
    lz.release_captures()


def test_a_recording_is_not_made_inside_a_capture() -> None:
    x = torch.randn(8, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(lz.InvalidCallError, match="captured already"), lz.capture():
            pass
    graph.replay()
    assert torch.equal(y, x + 1)


def test_what_breaks_in_a_graph_is_never_chosen_there(inputs: tuple[Tensor, Tensor]) -> None:
    x, weight = inputs

    @lz.register_kernel(
        operation="norm.rms",
        kernel_id="test.liar",
        platform="cuda",
        supported_dtypes=["bfloat16"],
        priority=99,
        is_cuda_graph_safe=True,
    )
    def liar(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        # Its result depends on what the host sees at capture.
        scale = float(input.float().abs().max()) * 0.0 + 1.0
        return F.rms_norm(input, (input.shape[-1],), weight, eps) * scale

    try:
        report = lz.tune("rms_norm", dtype=torch.bfloat16, shapes=[(64, 1024)], device="cuda", graph=True, budget="20s")
        assert "test.liar" in [kernel for kernel, _ in report.tuned[0].out]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert lz.which("rms_norm", x, weight, EPS).kernel_id != "test.liar"
            lz.rms_norm(x, weight, EPS)
    finally:
        lz.unregister_kernel("test.liar")


def test_a_capture_is_not_broken_by_what_is_compiled_meanwhile(inputs: tuple[Tensor, Tensor]) -> None:
    """Another thread of ours takes memory, loads code and waits for its stream while this one captures."""
    x, weight = inputs
    tensor = {"dtype": "bfloat16", "shape": [48 << 10, 1024]}
    call = {"op": "norm.rms", "tensors": {"input": tensor, "weight": {"dtype": "bfloat16", "shape": [1024]}}}
    found: list[BaseException] = []

    def compiles() -> None:
        try:
            for kernel in ("triton.rms_norm", "torch.cuda.rms_norm"):
                kernel_runs.once(kernel, json.dumps(call), _native.device_number("cuda:0"))
        except BaseException as error:  # noqa: BLE001 - it is looked at below
            found.append(error)

    lz.rms_norm(x, weight, EPS)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph, thread = torch.cuda.CUDAGraph(), threading.Thread(target=compiles)
    with torch.cuda.graph(graph):
        thread.start()
        thread.join(60)
        result = lz.rms_norm(x, weight, EPS)
    assert not thread.is_alive() and not found, found
    x.copy_(torch.randn_like(x))
    graph.replay()
    expected = F.rms_norm(x.double(), (1024,), weight.double(), EPS)
    torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=1e-2)
