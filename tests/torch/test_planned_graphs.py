"""`lz.dry_run` and `lz.solve` of compiled models: they say what the compiled model then does, and nothing runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import planned_graphs
from torch import Tensor, nn


class Block(nn.Module):
    """A norm, attention written out, GELU, a residual. A buffer counts the calls."""

    def __init__(self, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[operator, has-type]
        batch, length, width = x.shape
        normed = self.qkv(self.norm(x))
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in normed.chunk(3, -1))
        mixed = ((q @ k.transpose(-1, -2)) / (width // self.heads) ** 0.5).softmax(-1) @ v
        return x + self.out(nn.functional.gelu(mixed.transpose(1, 2).reshape(batch, length, width)))


@pytest.fixture(autouse=True)
def _unpinned() -> Iterator[None]:
    with torch.no_grad():
        yield
    lz.release_pins()


def agrees(run: lz.DryRun, compiled: Any, *inputs: Tensor) -> lz.PlannedGraph:
    """The graph of a dry run, which is that of the compiled model."""
    assert run.graph is not None and run.no_graph == ""
    assert run.graph.steps == compiled.explain(*inputs)
    report = compiled.report(*inputs)
    for name in ("kernels", "steps", "nodes", "nodes_exported", "arena_bytes", "packed_bytes", "torch_calls"):
        assert getattr(run.graph.report, name) == getattr(report, name), name
    return run.graph


def test_a_dry_run_of_a_compiled_model_is_what_it_does() -> None:
    model, x = Block().eval(), torch.randn(2, 5, 48)
    compiled = lz.compile(model)
    run = lz.dry_run(compiled, x)
    graph = agrees(run, compiled, x)
    assert (model.calls, compiled.report().calls, len(run.calls)) == (0, 0, 0)
    assert all(step.kernel in step.candidates for step in graph.steps)
    torch.testing.assert_close(compiled(x), model(x), atol=2e-5, rtol=2e-5)
    agrees(lz.dry_run(compiled, x), compiled, x)
    assert compiled.report().calls == 1
    lines = str(run).splitlines()
    assert lines[1].split() == ["op", "output", "kernel", "else", "module"]
    assert any("arena" in line for line in lines)


@pytest.mark.parametrize("described", [False, True])
def test_a_dry_run_of_a_module_has_its_calls_and_its_graph(described: bool) -> None:
    model, x = Block().eval(), torch.randn(2, 5, 48)
    run = lz.dry_run(model, lz.TensorSpec((2, 5, 48)) if described else x)
    graph = agrees(run, lz.compile(model, x), x)
    assert model.calls == 0
    assert {"norm.layer", "mlp.linear"} <= {call.op for call in run.calls}
    assert "compiled by lz.compile" in str(run)
    data = json.loads(json.dumps(run.to_dict()))
    assert len(data["graph"]["steps"]) == len(graph.steps)


def test_other_sizes_and_the_first_inputs() -> None:
    model, x = Block().eval(), torch.randn(2, 5, 48)
    compiled = lz.compile(model, x)
    agrees(lz.dry_run(compiled), compiled)
    agrees(lz.dry_run(compiled, lz.TensorSpec((3, 9, 48))), compiled, torch.randn(3, 9, 48))
    with pytest.raises(lz.InvalidCallError, match="nothing is compiled"):
        lz.dry_run(lz.compile(model))


def test_what_stays_torchs_and_narrow_weights() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.eigvalsh(self.layer(x) + 1)  # type: ignore[no-any-return]

    model, x = Sorted().eval(), torch.randn(64, 64)
    compiled = lz.compile(model, weights="int8")
    graph = agrees(lz.dry_run(compiled, x), compiled, x)
    assert graph.report.torch_calls and graph.report.weights == "int8"
    # Measuring the error would run the model.
    assert lz.dry_run(lz.compile(model, weights="int8"), x).graph.report.largest_error is None  # type: ignore[union-attr]
    assert "stay torch's" in str(graph)


def test_a_model_from_a_file(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval(), torch.randn(3, 8)
    compiled = lz.compile(model, x)
    loaded = lz.load_plan(compiled.save(tmp_path / "model.plan"))
    assert agrees(lz.dry_run(loaded, x), loaded, x).steps == compiled.explain()
    with pytest.raises(lz.InvalidCallError, match="runs uncompiled"):
        lz.dry_run(loaded, torch.randn(3, 9))


def test_why_there_is_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 5, 48)
    assert lz.dry_run(Block(), x).no_graph == "it is in training mode"
    assert lz.dry_run(Block().eval().to("meta"), x).no_graph == "it is not on the CPU"
    assert lz.dry_run(lambda x: lz.rms_norm(x), x).no_graph == "it is not a torch.nn.Module"

    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(lz.rms_norm(x)).abs()  # type: ignore[no-any-return]

    run = lz.dry_run(Spectrum().eval(), x)
    assert run.graph is None and "complex64" in run.no_graph
    assert [call.op for call in run.calls] == ["norm.rms"]
    monkeypatch.setattr(planned_graphs, "MOST_WEIGHT_BYTES", 1000)
    model = Block().eval()
    assert "of which packing makes copies" in lz.dry_run(model, x).no_graph
    assert lz.dry_run(lz.compile(model), x).graph is not None


def test_inputs_that_need_gradients_run_uncompiled() -> None:
    model, x = Block().eval(), torch.randn(2, 5, 48).requires_grad_()
    with torch.enable_grad():
        with pytest.raises(lz.InvalidCallError, match="needs gradients"):
            lz.dry_run(lz.compile(model), x)
        assert "needs gradients" in lz.dry_run(model, x).no_graph


# Tables.


def registered() -> set[str]:
    """All kernels that are registered."""
    return {kernel.kernel_id for kernel in lz.list_kernels()}


def kernels(steps: Any) -> set[str]:
    """The kernels of steps that are calls of LayerZero's operations."""
    return {step.kernel for step in steps} & registered()


def test_a_table_of_a_compiled_model_has_the_kernels_of_its_nodes() -> None:
    model, x = Block().eval(), torch.randn(2, 5, 48)
    compiled = lz.compile(model, x)
    table = lz.solve(compiled, shape_buckets={"seq_len": [8, 16], "batch": [1, 4]}, model_id="block")
    assert (table.model_id, table.device, model.calls) == ("block", "cpu", 0)
    assert [plan["bucket"] for plan in table.plans] == [
        {"seq_len": length, "batch": batch} for length in (8, 16) for batch in (1, 4)
    ]
    for plan in table.plans:
        at = torch.randn(plan["bucket"]["batch"], plan["bucket"]["seq_len"], 48)
        assert {op["kernel_id"] for op in plan["ops"]} == kernels(compiled.explain(at))
        assert {"norm.layer", "attention.standard.prefill"} <= {op["op"] for op in plan["ops"]}
    assert {json.loads(one.call)["op"] for one in table.left_out} >= {"unary"}
    assert not table.load()


def test_a_loaded_table_decides_the_kernels_of_graphs(tmp_path: Path) -> None:
    model, x = Block().eval(), torch.randn(2, 5, 48)
    compiled = lz.compile(model, x)
    attention = next(step for step in compiled.explain() if step.op == "attention")
    other = next(one for one in attention.candidates[1:] if one in registered())
    path = lz.solve(compiled, x, shape_buckets={"batch": [2]}).save(tmp_path / "table.json")
    data = json.loads(path.read_text())
    [entry] = [op for op in data["plans"][0]["ops"] if op["op"] == "attention.standard.prefill"]
    entry["kernel_id"] = other
    path.write_text(json.dumps(data))
    assert not lz.load_table(path)
    # The sequence length of the inputs is a bucket too.
    for length, kernel in ((5, other), (3, other), (9, attention.kernel)):
        steps = lz.compile(model, torch.randn(2, length, 48)).explain()
        assert [step.kernel for step in steps if step.op == "attention"] == [kernel]


def test_nodes_of_one_operation_with_other_kernels_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with the most FLOPs decides."""
    steps = lz.compile(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4)).eval(), torch.randn(3, 8)).explain()
    large, small = sorted(steps, key=lambda step: -step.flops)
    others = [one for one in small.candidates if one in registered() and one != large.kernel]
    changed = [large, type(small)(**{**small.to_dict(), "kernel": others[0]})]
    graph = lz.PlannedGraph(lz.Rows(tuple(changed), "steps"), None)  # type: ignore[arg-type]
    monkeypatch.setattr(planned_graphs, "of_compiled", lambda *_: graph)
    table = lz.solve(lz.compile(nn.Identity()), torch.randn(3, 8), shape_buckets={"batch": [4]})
    assert [op["kernel_id"] for op in table.plans[0]["ops"]] == [large.kernel]
    [left] = table.left_out
    assert json.loads(left.call)["output"] == small.output and others[0] in left.why


def test_what_a_table_cannot_be_made_of() -> None:
    compiled = lz.compile(nn.Linear(8, 4).eval())
    with pytest.raises(lz.InvalidCallError, match="nothing says what"):
        lz.solve(compiled, shape_buckets={"batch": [2]})
    with pytest.raises(lz.ConfigurationError, match="graphs run on the CPU"):
        lz.solve(compiled, lz.TensorSpec((2, 8), device="cuda:0"), shape_buckets={"batch": [2]})
    with pytest.raises(lz.ConfigurationError, match="the buckets are"):
        lz.solve(compiled, torch.randn(2, 8), shape_buckets={"width": [2]})
    assert lz.solve(compiled, torch.randn(2, 8), shape_buckets={"batch": [2]}).shape_buckets == {"batch": [2]}
