"""`lz.compile`: a compiled model gives what the model gives, for any sizes, and says what became of it."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self, activation: Any = F.gelu) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(48, 96), nn.Linear(96, 48), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Attention(nn.Module):
    """Attention written out, with a causal mask made of the sizes."""

    def __init__(self, width: int = 48, heads: int = 4, fused: bool = False) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = (q @ k.transpose(-1, -2)) / (width // self.heads) ** 0.5
            mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def agrees(compiled: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args, **kwargs), model(*args, **kwargs), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("activation", [F.gelu, F.relu, F.silu, torch.tanh], ids=lambda one: one.__name__)
def test_it_gives_what_the_model_gives(activation: Any) -> None:
    model, x = Mlp(activation).eval(), torch.randn(5, 48)
    compiled = lz.compile(model, x)
    agrees(compiled, model, x)
    report = compiled.report()
    assert report.calls == 1
    assert report.model_calls == {}
    assert report.torch_calls == {}
    assert report.slow_steps == {}


@pytest.mark.parametrize("fused", [False, True])
def test_attention_written_out_becomes_attention(fused: bool) -> None:
    model, x = Attention(fused=fused).eval(), torch.randn(2, 9, 48)
    compiled = lz.compile(model, x)
    agrees(compiled, model, x)
    assert "attention" in {step.op for step in compiled.explain()}
    assert "softmax" not in {step.op for step in compiled.explain()}


def test_other_sizes_are_exported_once_more_and_then_served() -> None:
    model = Attention().eval()
    compiled = lz.compile(model, torch.randn(2, 9, 48))
    for batch, length in ((2, 9), (2, 12), (2, 30), (3, 7), (1, 1), (2, 9)):
        agrees(compiled, model, torch.randn(batch, length, 48))
    report = compiled.report()
    assert report.model_calls == {}
    assert report.exports <= 4
    assert report.calls == 6


def test_given_ranges_are_kept() -> None:
    model, size = Mlp().eval(), torch.export.Dim("rows", min=2, max=16)
    compiled = lz.compile(model, torch.randn(4, 48), dynamic_shapes=({0: size},))
    agrees(compiled, model, torch.randn(16, 48))
    assert compiled.report().exports == 1
    with pytest.warns(UserWarning, match="ran uncompiled"):
        agrees(compiled, model, torch.randn(17, 48))
    assert sum(compiled.report().model_calls.values()) == 1


def test_without_inputs_it_is_compiled_at_the_first_call() -> None:
    model, x = Mlp().eval(), torch.randn(5, 48)
    compiled = lz.compile(model)
    with pytest.raises(lz.InvalidCallError, match="nothing is compiled"):
        compiled.report()
    agrees(compiled, model, x)
    assert compiled.report().calls == 1


def test_functions_arguments_by_name_and_nested_results() -> None:
    def step(x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        return {"y": (x * scale, x + scale), "n": 3}

    x, scale = torch.randn(4, 6), torch.randn(6)
    compiled = lz.compile(step, x, kwargs={"scale": scale})
    found = compiled(x, scale=scale)
    assert found["n"] == 3
    torch.testing.assert_close(found["y"], step(x, scale=scale)["y"])


def test_inputs_of_any_strides() -> None:
    model = Mlp().eval()
    compiled = lz.compile(model, torch.randn(5, 48))
    agrees(compiled, model, torch.randn(48, 5).t())
    agrees(compiled, model, torch.randn(5, 96)[:, ::2])


def test_calls_that_need_gradients_are_the_models() -> None:
    model = Mlp().eval()
    compiled = lz.compile(model, torch.randn(5, 48))
    x = torch.randn(5, 48, requires_grad=True)
    compiled(x).sum().backward()
    assert x.grad is not None
    assert compiled.report().model_calls == {"gradients": 1}
    with torch.no_grad():
        assert not compiled(x).requires_grad


def test_what_has_no_operation_stays_torchs() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            values, _ = torch.kthvalue(x * 2, 2, dim=-1)
            return values + 1

    model, x = Odd().eval(), torch.randn(4, 7)
    compiled = lz.compile(model, x)
    agrees(compiled, model, x)
    assert sum(compiled.report().torch_calls.values()) == 1
    with pytest.raises(lz.InvalidCallError, match="kthvalue") as raised:
        lz.compile(model, x, strict=True)
    assert raised.value.code == "NOT_EXPORTABLE"


def test_what_cannot_be_exported_is_an_error_that_names_the_line() -> None:
    class Peeking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if float(x.sum()) > 0 else x  # the line

    with pytest.raises(lz.LayerZeroError, match="# the line") as raised:
        lz.compile(Peeking().eval(), torch.randn(3))
    assert raised.value.code == "NOT_EXPORTABLE"


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(lz.InvalidCallError, match="training") as raised:
        lz.compile(Mlp().train(), torch.randn(5, 48))
    assert raised.value.code == "TRAINING_MODE"


def test_an_unknown_pass_is_an_error() -> None:
    with pytest.raises(lz.InvalidCallError, match="softmx"):
        lz.compile(Mlp().eval(), torch.randn(5, 48), off=["softmx"])


@pytest.mark.parametrize(
    "off", [[], ["linear"], ["attention", "causal_mask"], ["fold"], ["bias", "residual"], ["permutes"]]
)
def test_every_optimisation_can_be_switched_off(off: list[str]) -> None:
    model, x = Attention().eval(), torch.randn(2, 9, 48)
    agrees(lz.compile(model, x, off=off), model, x)


def test_tuning_chooses_and_gives_the_same() -> None:
    model, x = Attention().eval(), torch.randn(2, 9, 48)
    agrees(lz.compile(model, x, tune=True), model, x)


def test_a_buffer_that_the_model_changes() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x)
            return self.seen * 2

    model, reference = Counting().eval(), Counting().eval()
    compiled = lz.compile(model, torch.ones(3))
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3)
            torch.testing.assert_close(compiled(x), reference(x))
    torch.testing.assert_close(model.seen, reference.seen)


def test_the_policy_of_the_process_decides() -> None:
    model, x = Attention(fused=True).eval(), torch.randn(2, 9, 48)
    chosen = {step.op: step.kernel for step in lz.compile(model, x).explain()}
    lz.configure(rules=[{"name": "not this norm", "deny": chosen["layer_norm"]}])
    try:
        compiled = lz.compile(model, x)
        agrees(compiled, model, x)
        kernels = {step.kernel for step in compiled.explain()}
    finally:
        lz.configure(rules=None)
    assert chosen["layer_norm"] not in kernels
    assert chosen["attention"] in kernels


def test_several_threads_at_once() -> None:
    model = Attention().eval()
    compiled = lz.compile(model, torch.randn(2, 9, 48))
    inputs = [torch.randn(2, 9, 48) for _ in range(4)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    wrong: list[int] = []

    def work(at: int) -> None:
        for _ in range(50):
            if not torch.allclose(compiled(inputs[at]), expected[at], atol=2e-5):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wrong == []


def test_changed_weights_are_seen_after_refresh() -> None:
    model, x = Mlp().eval(), torch.randn(5, 48)
    compiled = lz.compile(model, x)
    with torch.no_grad():
        model.up.weight.mul_(2)
    compiled.refresh()
    agrees(compiled, model, x)


def test_answers_are_data(tmp_path: Path) -> None:
    model, x = Attention().eval(), torch.randn(2, 9, 48)
    compiled = lz.compile(model, x)
    json.dumps(compiled.report(x).to_dict())
    steps, timed = compiled.explain(), compiled.profile(rounds=3)
    assert [step.kernel for step in steps] == [step.kernel for step in timed]
    assert abs(sum(step.share for step in timed) - 1) < 1e-6
    assert "attention" in compiled.graph()
    assert compiled.graph("dot").startswith("digraph")
    events = json.loads(compiled.save_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == len(steps)


def test_a_plan_is_written_and_read(tmp_path: Path) -> None:
    model, size = Attention().eval(), torch.export.Dim("length", min=2, max=64)
    x = torch.randn(2, 9, 48)
    compiled = lz.compile(model, x, dynamic_shapes=({1: size},))
    loaded = lz.load_plan(compiled.save(tmp_path / "model.plan"))
    for length in (9, 2, 40):
        x = torch.randn(2, length, 48)
        agrees(loaded, model, x)
    with pytest.raises(lz.InvalidCallError, match="cannot serve"):
        loaded(torch.randn(2, 65, 48))
    with pytest.raises(lz.InvalidCallError, match="float64.* the graph takes float32"):
        loaded(torch.randn(2, 9, 48).double())


def test_a_damaged_plan_is_never_run(tmp_path: Path) -> None:
    path = lz.compile(Mlp().eval(), torch.randn(5, 48)).save(tmp_path / "model.plan")
    whole = path.read_bytes()
    for length in (0, 10, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(lz.ConfigurationError):
            lz.load_plan(path)


def test_nan_weights_give_what_the_model_gives() -> None:
    model, x = Mlp().eval(), torch.randn(5, 48)
    with torch.no_grad():
        model.up.weight[0, 0] = float("nan")
        found, expected = lz.compile(model, x)(x), model(x)
    assert torch.equal(found.isnan(), expected.isnan())


def test_no_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, x = Mlp().eval(), torch.randn(5, 48)
        agrees(lz.compile(model, x), model, x)
