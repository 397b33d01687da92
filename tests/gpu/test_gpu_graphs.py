"""CUDA graphs: capture is seen, only what is safe there is chosen, and strict mode wants proof."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
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
            # Remembered outside, and not gone by inside.
            lz.rms_norm(x, weight, EPS)
            assert lz.which("rms_norm", x, weight, EPS)["kernel_id"] == "test.unsafe"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = [lz.which("rms_norm", x, weight, EPS)["kernel_id"] for _ in range(2)]
            results = [lz.rms_norm(x, weight, EPS) for _ in range(3)]
        assert "test.unsafe" not in inside
        graph.replay()
        for result in results:
            assert torch.allclose(result.float(), F.rms_norm(x.float(), (1024,), None, EPS), atol=0.05)
        assert lz.which("rms_norm", x, weight, EPS)["kernel_id"] == "test.unsafe"
    finally:
        lz.unregister_kernel("test.unsafe")


def test_strict_mode_wants_proof(inputs: tuple[Tensor, Tensor]) -> None:
    x, weight = inputs
    lz.configure(graph_strict_mode=True)
    with pytest.raises(lz.CudaGraphUnsafeError):
        captured(x, weight)
    assert lz.rms_norm(x, weight, EPS).isfinite().all(), "outside nothing is missing"
    tuned = lz.tune("rms_norm", dtype=torch.bfloat16, shapes=[(64, 1024)], device="cuda", graph=True, budget="20s")
    assert tuned.tuned[0]["chosen"] is not None
    result = captured(x, weight)
    assert torch.allclose(result.float(), F.rms_norm(x.float(), (1024,), None, EPS), atol=0.05)


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
        assert "test.liar" in [kernel for kernel, _ in report.tuned[0]["out"]]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert lz.which("rms_norm", x, weight, EPS)["kernel_id"] != "test.liar"
            lz.rms_norm(x, weight, EPS)
    finally:
        lz.unregister_kernel("test.liar")
