"""Proofs in CUDA graphs and recordings, with kernels for the CPU and a device that is made up: its graphs run again what was
captured. What a driver does is in tests/gpu/test_gpu_graphs.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from layerzero import _native, graph_capture, graphs
from torch import Tensor

FORBIDDEN = "CUDA error: operation not permitted when stream is capturing"
MIB = 1 << 20


class Device:
    """What captures and replays: replaying runs what was captured again, into the tensors of the capture."""

    def __init__(self, kept: int = 0, kept_by_replay: int = 0, refuses: str | None = None) -> None:
        self.used, self.warmups, self.replays = 64 * MIB, 0, 0
        self._kept, self._kept_by_replay, self._refuses = kept, kept_by_replay, refuses

    def warm(self, run: Callable[[], Any], times: int) -> None:
        self.warmups += times
        for _ in range(times):
            run()

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        if self._refuses is not None:
            raise RuntimeError(self._refuses)
        outputs = run()
        self.used += self._kept + outputs.untyped_storage().nbytes()

        def replay() -> None:
            self.replays += 1
            self.used += self._kept_by_replay
            outputs.copy_(run())

        return replay, outputs

    def allocated(self) -> int:
        return self.used

    def wait(self) -> None:
        return


class Norm:
    """A kernel of ``norm.rms`` that says it is safe in graphs, and what it is called with."""

    def __init__(
        self, kernel_id: str, priority: int = 90, *, declared: bool = True, drifts: float = 0.0, scale: float = 1.0
    ) -> None:
        self.kernel_id, self.calls, self._drifts, self._scale = kernel_id, 0, drifts, scale
        lz.register_kernel(
            operation="norm.rms",
            kernel_id=kernel_id,
            platform="cpu",
            supported_dtypes=["float32"],
            priority=priority,
            is_cuda_graph_safe=declared,
        )(self._kernel())

    def _kernel(self) -> Any:
        def kernel(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
            self.calls += 1
            return self._scale * F.rms_norm(input, (input.shape[-1],), weight, eps) + self._drifts * self.calls

        return kernel


@pytest.fixture
def make() -> Iterator[Callable[..., Norm]]:
    """Registers kernels, and removes them in the end."""
    made: list[Norm] = []

    def register(*args: Any, **kwargs: Any) -> Norm:
        made.append(Norm(*args, **kwargs))
        return made[-1]

    yield register
    lz.release_captures()
    for norm in made:
        lz.unregister_kernel(norm.kernel_id)
    lz.reset()


def norm(rows: int) -> str:
    """A call, written down."""
    tensors = {"x": {"dtype": "float32", "shape": [rows, 64]}, "weight": {"dtype": "float32", "shape": [64]}}
    return json.dumps({"op": "norm.rms", "tensors": tensors})


def chosen(rows: int) -> str:
    """The kernel that a capture of the call records."""
    return _native.graph_hold(norm(rows), 0)


def test_strict_mode_refuses_and_a_proof_lets_its_cell_through(make: Callable[..., Norm]) -> None:
    make("test.norm")
    assert chosen(100) == "test.norm", "a kernel's word is enough where nobody asks for proof"
    lz.release_captures()
    lz.configure(graph_strict_mode=True)
    with pytest.raises(lz.CudaGraphUnsafeError) as refused:
        chosen(100)
    assert "lz.warmup" in str(refused.value.hint) and "lz.warmup" in str(refused.value)
    (reason,) = refused.value.failures["test.norm"]
    assert (reason.code, reason.fields["why"]) == ("CUDA_GRAPH_UNSAFE", {"kind": "unproven"})
    assert graphs.prove("test.norm", norm(100), 0, Device()) is None
    # Buckets of rows are powers of two: the cell is that from 65 to 128.
    assert {chosen(rows) for rows in (65, 100, 128)} == {"test.norm"}
    for rows in (64, 129, 4096):
        with pytest.raises(lz.CudaGraphUnsafeError):
            chosen(rows)
    assert lz.rms_norm(torch.ones(4096, 64)).isfinite().all(), "outside of captures nothing is missing"


def test_what_is_not_declared_safe_is_unsafe(make: Callable[..., Norm]) -> None:
    make("test.unknown", declared=False)
    with pytest.raises(lz.CudaGraphUnsafeError) as refused:
        chosen(100)
    (reason,) = refused.value.failures["test.unknown"]
    assert reason.fields["why"] == {"kind": "undeclared"}
    assert _native.graph_wanted(norm(100), 0) is None, "nobody proves what nobody vouches for"


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (Device(kept=2 * MIB), {"kind": "allocates", "bytes": 2 * MIB, "limit": MIB}),
        (Device(kept_by_replay=2 * MIB), {"kind": "allocates", "bytes": 2 * MIB, "limit": MIB}),
        (Device(refuses=FORBIDDEN), {"kind": "synchronizes", "error": f"RuntimeError: {FORBIDDEN}"}),
        (Device(refuses="no such plan\nmore"), {"kind": "failed", "error": "RuntimeError: no such plan"}),
    ],
)
def test_a_capture_that_goes_wrong_says_how(
    make: Callable[..., Norm], device: Device, expected: dict[str, Any]
) -> None:
    make("test.norm")
    assert graphs.prove("test.norm", norm(100), 0, device) == expected
    # Known to fail, it is out in any mode, for its cell and no other.
    with pytest.raises(lz.CudaGraphUnsafeError) as refused:
        chosen(100)
    (reason,) = refused.value.failures["test.norm"]
    assert reason.fields["why"] == expected
    assert chosen(200) == "test.norm"


def test_a_replay_that_gives_something_else_fails(make: Callable[..., Norm]) -> None:
    make("test.norm", drifts=0.01)
    doubt = graphs.prove("test.norm", norm(100), 0, Device())
    assert doubt is not None and doubt["kind"] == "differs" and "eager result" in doubt["error"]


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_what_a_replay_leaves_alone_is_no_result(make: Callable[..., Norm], scale: float) -> None:
    """A graph in which nothing was recorded: its outputs are those of the capture, right where they depend on no input."""
    make("test.norm", scale=scale)
    device = Device()
    capture = device.capture
    device.capture = lambda run: (lambda: None, capture(run)[1])  # type: ignore[method-assign]
    doubt = graphs.prove("test.norm", norm(100), 0, device)
    assert doubt is not None and doubt["kind"] == "differs"


def test_the_limits_are_settings(make: Callable[..., Norm]) -> None:
    kernel = make("test.norm")
    lz.configure(graph={"memory_delta_warning_mb": 2.5, "warmup_iterations": 7})
    device = Device(kept=2 * MIB)
    assert graphs.prove("test.norm", norm(100), 0, device) is None
    # Seven times before the capture, in it, once outside of it, and in the replay.
    assert (device.warmups, device.replays, kernel.calls) == (7, 1, 10)
    lz.configure(graph={"memory_delta_warning_mb": 0.25})
    doubt = graphs.prove("test.norm", norm(100), 0, Device(kept=MIB // 2))
    assert doubt == {"kind": "allocates", "bytes": MIB // 2, "limit": MIB // 4}


def test_the_next_best_is_proven_where_the_best_fails(
    make: Callable[..., Norm], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("test.best", 95, drifts=1.0)
    make("test.second", 90)
    monkeypatch.setattr(graphs, "CudaGraphs", lambda _: Device())
    lz.configure(graph_strict_mode=True)
    seen = [(kernel, doubt and doubt["kind"]) for kernel, doubt in graphs.prove_wanted(norm(100), 0)]
    assert seen == [("test.best", "differs"), ("test.second", None)]
    assert chosen(100) == "test.second"
    assert list(graphs.prove_wanted(norm(120), 0)) == [], "the cell is proven already"


def test_a_warm_up_proves_in_strict_mode(make: Callable[..., Norm], monkeypatch: pytest.MonkeyPatch) -> None:
    make("test.norm")
    monkeypatch.setattr(graphs, "CudaGraphs", lambda _: Device())
    monkeypatch.setattr(graphs, "captures", lambda _: True)
    call = json.loads(norm(100))
    assert lz.warmup(calls=[call], device="cpu").proven == [], "nobody asked for it"
    lz.configure(graph_strict_mode=True)
    report = lz.warmup(calls=[call], device="cpu")
    assert report.ok and [one.kernel for one in report.proven] == ["test.norm"]
    assert chosen(128) == "test.norm"
    assert lz.warmup(calls=[call], device="cpu").proven == [], "it is proven already"


def test_a_recording_notes_every_kind_of_call_once() -> None:
    x, gate = torch.randn(8, 64), torch.randn(8, 64)
    lz.rms_norm(x)
    with lz.capture() as recorded:
        first = lz.rms_norm(x)
        lz.rms_norm(x)
        lz.silu_mul(gate, x)
    lz.gelu(x)
    assert [one.call["op"] for one in recorded.calls] == ["norm.rms", "activation.silu_mul"]
    assert {one.device for one in recorded.calls} == {"cpu"} and {one.kernel for one in recorded.calls} == {None}
    assert torch.allclose(first, F.rms_norm(x, (64,), None, 1e-6), atol=1e-5), "the block's own results are as always"


def test_a_recording_makes_ready_and_holds_what_it_chose(
    make: Callable[..., Norm], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, device = make("test.norm"), Device()
    monkeypatch.setattr(graphs, "captures", lambda _: True)
    monkeypatch.setattr(graph_capture, "side", lambda *_: device)
    monkeypatch.setattr(graphs, "CudaGraphs", lambda _: Device())
    lz.configure(graph_strict_mode=True, graph={"warmup_iterations": 5})
    with lz.capture() as recorded:
        lz.rms_norm(torch.ones(100, 64))
    assert [(one.kernel, one.error) for one in recorded.calls] == [("test.norm", None)]
    assert device.warmups == 5 and kernel.calls >= 1 + 5 + 5
    call = json.dumps(recorded.calls[0].call)
    make("test.better", 99)
    assert graphs.prove("test.better", call, 0, Device()) is None
    assert _native.graph_hold(call, 0) == "test.norm", "held for the capture, whatever comes along"
    assert lz.which("rms_norm", torch.ones(100, 64)).kernel_id == "test.better", "outside nothing is held"
    lz.release_captures()
    assert _native.graph_hold(call, 0) == "test.better"


def test_a_block_that_fails_holds_nothing(make: Callable[..., Norm], monkeypatch: pytest.MonkeyPatch) -> None:
    make("test.norm")
    monkeypatch.setattr(graphs, "captures", lambda _: True)
    block = lz.capture()
    with pytest.raises(ZeroDivisionError), block as recorded:
        lz.rms_norm(torch.ones(100, 64))
        raise ZeroDivisionError
    assert recorded.calls == []
    with lz.capture():
        pass
    assert lz.which("rms_norm", torch.ones(100, 64)).kernel_id == "test.norm", "its overlay is left"


def test_a_recording_refuses_what_no_capture_may_record(
    make: Callable[..., Norm], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("test.norm", drifts=1.0)
    monkeypatch.setattr(graphs, "captures", lambda _: True)
    monkeypatch.setattr(graphs, "CudaGraphs", lambda _: Device())
    lz.configure(graph_strict_mode=True)
    with pytest.raises(lz.CudaGraphUnsafeError), lz.capture():
        lz.rms_norm(torch.ones(100, 64))
