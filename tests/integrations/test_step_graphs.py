"""Steps of a model as CUDA graphs: the same results and caches as without, and never a replay of something else.

Here graphs are those of `recorded_graphs`; tests/gpu/test_gpu_step_graphs.py runs the same models on a device.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero.integrations.models import generation_settings, step_graphs
from layerzero.integrations.models.step_graphs import StepGraphs
from recorded_graphs import RecordedGraphs
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, StaticCache
from transformers_models_built import DECODERS, decoder, tokens

HOW: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


class Net(nn.Module):
    """Two products, and a sum that depends on an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, more: float = 0.0, look: bool = False) -> torch.Tensor:
        hidden = torch.relu(self.first(x)) + more
        if look and float(hidden.sum()) > 1e30:
            hidden = hidden * 0.0
        return self.second(hidden)  # type: ignore[no-any-return]


@pytest.fixture
def net() -> Iterator[tuple[Net, StepGraphs]]:
    """A module whose steps are replayed."""
    torch.manual_seed(0)
    model = Net().eval()
    graphs = step_graphs.start(model, RecordedGraphs)
    yield model, graphs
    step_graphs.stop(model, None)


@torch.no_grad()
def test_a_step_is_replayed_from_the_third_call_on(net: tuple[Net, StepGraphs]) -> None:
    model, graphs = net
    for step in range(6):
        x = torch.randn(3, 8)
        torch.testing.assert_close(model(x), Net.forward(model, x))
        assert (graphs.captured, graphs.replayed) == (int(step >= 2), max(step - 2, 0))
    first, second = model(torch.zeros(3, 8)), model(torch.ones(3, 8))
    assert not torch.equal(first, second), "results are copies"


@torch.no_grad()
def test_what_differs_is_another_graph(net: tuple[Net, StepGraphs]) -> None:
    model, graphs = net
    x = torch.randn(3, 8)
    for given in ((x,), (x, 1.0), (x, 2.0), (x[:2],), (x.double(),)):
        if given[0].dtype == torch.float64:
            model.double()
        for _ in range(4):
            torch.testing.assert_close(model(*given), Net.forward(model, *given))
    assert graphs.captured == 5
    with torch.autocast("cpu", torch.bfloat16):
        model.float()
        for _ in range(4):
            assert model(x).dtype == torch.bfloat16
    assert graphs.captured == 6


@torch.no_grad()
def test_weights_that_move_are_read_where_they_are(net: tuple[Net, StepGraphs]) -> None:
    model, graphs = net
    x = torch.randn(3, 8)
    for _ in range(4):
        model(x)
    model.first.weight.mul_(2.0)
    torch.testing.assert_close(model(x), Net.forward(model, x))
    assert graphs.captured == 1, "written to in place"
    for change in (
        lambda: setattr(model.first, "weight", nn.Parameter(torch.randn(16, 8))),
        lambda: setattr(model, "second", nn.Linear(16, 4)),
    ):
        change()
        for _ in range(4):
            torch.testing.assert_close(model(x), Net.forward(model, x))
    assert graphs.captured == 3, "captured anew, and compared anew"


def test_training_and_gradients_are_left_alone(net: tuple[Net, StepGraphs]) -> None:
    model, graphs = net
    x = torch.randn(3, 8)
    for _ in range(5):
        model(x).sum().backward()
    with torch.no_grad():
        model.train()
        for _ in range(5):
            model(x)
    assert graphs.captured == 0


@torch.no_grad()
def test_a_step_that_waits_for_the_device_stays_as_it_was(net: tuple[Net, StepGraphs]) -> None:
    model, graphs = net
    x = torch.randn(3, 8)
    for _ in range(5):
        torch.testing.assert_close(model(x, look=True), Net.forward(model, x))
    assert graphs.captured == graphs.replayed == 0
    (why,) = graphs.refused
    assert why.startswith("the step cannot be captured: RuntimeError: operation not permitted")
    assert graphs.refused[why] == 3 and why in repr(graphs)


@torch.no_grad()
def test_a_step_that_replays_wrongly_is_not_used(net: tuple[Net, StepGraphs]) -> None:
    model, graphs = net
    x = torch.randn(3, 8)
    scale = [1.0, 1.0, 1.0, 5.0, 1.0]
    # Python decides: the capture sees another factor than the step did.
    inner = graphs._forward
    graphs._forward = lambda self, x: inner(self, x) * scale.pop(0)
    for _ in range(3):
        torch.testing.assert_close(model(x), Net.forward(model, x))
    assert graphs.captured == 0
    assert next(iter(graphs.refused)).startswith("the replayed step differs by")


@torch.no_grad()
def test_a_hook_runs_at_every_step(net: tuple[Net, StepGraphs]) -> None:
    model, graphs = net
    x, seen = torch.randn(3, 8), []
    for _ in range(4):
        model(x)
    handle = model.second.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(4):
        model(x)
    assert len(seen) == 4 and any("hook" in why for why in graphs.refused)
    handle.remove()
    before = graphs.replayed
    model(x)
    assert graphs.replayed == before + 1


@torch.no_grad()
def test_a_copy_of_the_model_has_no_graphs(net: tuple[Net, StepGraphs]) -> None:
    model, graphs = net
    x = torch.randn(3, 8)
    for _ in range(4):
        model(x)
    other = copy.deepcopy(model)
    other.first.weight.zero_()
    torch.testing.assert_close(other(x), Net.forward(other, x))
    assert graphs.replayed == 1


@torch.no_grad()
def test_what_no_graph_is_made_of(net: tuple[Net, StepGraphs]) -> None:
    model, graphs = net
    model(torch.randn(1025, 8))
    graphs._forward = lambda *_, **__: torch.zeros(())
    model(torch.randn(3, 8), more=object())
    assert set(graphs.refused) == {
        "more than 1024 rows: the device takes longer than Python",
        "an argument is a object",
    }


class Odd(nn.Module):
    """What a graph must not be made of, or must not miss."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.inner, self.seen = what, nn.Linear(8, 8), [0]

    def forward(self, x: torch.Tensor, held: torch.Tensor | None = None) -> torch.Tensor:
        if self.what == "writes" and held is not None:
            held[0] = x[0]
            return held.sum(0)
        if self.what == "calls itself" and x.shape[0] > 1:
            return self(x[:1]) + self.inner(x[1:])
        if self.what == "infinite":
            # What a capture sees is another number than what the step saw.
            self.seen[0] += 1
            return self.inner(x) * (float("inf") if self.seen[0] == 4 else 1.0)
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.fixture
def odd() -> Iterator[Any]:
    """Makes such modules, with graphs."""
    made: list[Odd] = []

    def make(what: str) -> tuple[Odd, StepGraphs]:
        torch.manual_seed(0)
        made.append(Odd(what).eval())
        return made[-1], step_graphs.start(made[-1], RecordedGraphs)

    yield make
    for model in made:
        step_graphs.stop(model, None)


@torch.no_grad()
def test_a_step_that_writes_to_an_argument_stays_as_it_was(odd: Any) -> None:
    model, graphs = odd("writes")
    held = torch.zeros(2, 8)
    for at in range(6):
        x = torch.full((1, 8), float(at))
        torch.testing.assert_close(model(x, held), x[0])
        torch.testing.assert_close(held[0], x[0])
    assert graphs.captured == 0 and "the step writes to one of its arguments" in graphs.refused


@torch.no_grad()
def test_infinities_are_compared(odd: Any) -> None:
    model, graphs = odd("infinite")
    for _ in range(4):
        assert bool(model(torch.ones(1, 8)).isfinite().all())
    assert graphs.captured == 0 and "the replayed step gives other infinities or NaN" in graphs.refused


@torch.no_grad()
def test_a_model_may_call_itself_and_be_started_twice(odd: Any) -> None:
    model, graphs = odd("calls itself")
    assert step_graphs.start(model, RecordedGraphs) is graphs
    for _ in range(5):
        x = torch.randn(3, 8)
        torch.testing.assert_close(model(x), model.inner(x[:1]) + model.inner(x[1:]))
    assert graphs.replayed == 2


@torch.no_grad()
def test_switches_of_modules_are_seen(odd: Any) -> None:
    model, graphs = odd("plain")
    x = torch.randn(1, 8)

    def replays() -> bool:
        before = graphs.replayed
        for _ in range(4):
            model(x)
        return graphs.replayed > before

    assert replays()
    model.inner.train()
    captured = graphs.captured
    model(x)
    model.inner.eval()
    assert graphs.captured == captured and replays()
    model.inner.forward = lambda x: x * 2.0
    torch.testing.assert_close(model(x), x * 2.0)
    del model.inner.forward
    # As an adapter of PEFT switches.
    model.inner._disable_adapters = False
    assert replays()
    model.inner._disable_adapters = True
    captured = graphs.captured
    model(x)
    assert graphs.captured == captured
    seen: list[int] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    model(x)
    handle.remove()
    assert seen == [1, 1]


@torch.no_grad()
def test_casts_of_weights_are_part_of_the_graph(odd: Any) -> None:
    """autocast keeps its copies of the weights for the block around a call only."""
    model, graphs = odd("plain")
    for step in range(6):
        x = torch.randn(1, 8)
        with torch.autocast("cpu", torch.bfloat16):
            got = model(x)
        model.inner.weight.mul_(1.5)
        del x
        if step >= 3:
            assert graphs.replayed == step - 2
    x = torch.randn(1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = model(x), Odd.forward(model, x)
    torch.testing.assert_close(got, want)


@torch.no_grad()
def test_what_is_in_force_around_a_call_counts(odd: Any) -> None:
    model, graphs = odd("plain")
    x = torch.randn(1, 8)
    for _ in range(4):
        model(x)
    before = graphs.replayed
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(x)
    assert graphs.replayed == before
    with FlopCounterMode(display=False) as flops:
        model(x)
    assert flops.get_total_flops() > 0
    torch.testing.assert_close(torch.vmap(model)(x[None]), model(x)[None])


@torch.no_grad()
def test_a_model_is_freed_with_its_graphs() -> None:
    model = Odd("plain").eval()
    graphs = step_graphs.start(model, RecordedGraphs)
    for _ in range(4):
        model(torch.randn(1, 8))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and graphs.captured == 1 and not step_graphs.active()


@torch.no_grad()
def test_a_preparation_that_fails_does_not_fail_the_step(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero import graph_capture

    model, graphs = odd("plain")

    leave = graph_capture.capture.__exit__

    def fails(*given: Any) -> None:
        leave(*given)
        raise lz.CudaGraphUnsafeError("no kernel may be captured", code="CUDA_GRAPH_UNSAFE")

    monkeypatch.setattr(graph_capture.capture, "__exit__", fails)
    x = torch.randn(1, 8)
    for _ in range(4):
        torch.testing.assert_close(model(x), model.inner(x))
    assert graphs.captured == 0 and "CudaGraphUnsafeError" in repr(graphs)


# --- models of transformers -------------------------------------------------------------------------------------------


@pytest.fixture
def generating() -> Iterator[Any]:
    """Makes models that generate by graphs; afterwards they are as before."""
    undo = []

    def make(name: str) -> tuple[Any, StepGraphs]:
        model = decoder(name, "eager")
        restore = generation_settings.fixed_cache(model)
        if restore is None:
            pytest.skip("transformers has no cache of fixed size for this model")
        undo.append((model, restore))
        return model, step_graphs.start(model, RecordedGraphs)

    yield make
    for model, restore in undo:
        restore()
        step_graphs.stop(model, None)
        assert "generate" not in vars(model) and model.generation_config.cache_implementation is None


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_generated_tokens_are_the_same(name: str, generating: Any) -> None:
    reference, ids = decoder(name, "eager"), tokens(2, 9)
    padding = torch.ones_like(ids)
    padding[1, :4] = 0
    model, graphs = generating(name)
    for mask in (None, padding):
        want = reference.generate(ids, attention_mask=mask, **HOW)
        for _ in range(2):
            assert torch.equal(model.generate(ids, attention_mask=mask, **HOW), want)
    if name == "deepseek_v32":
        assert "a cache with layers of class StaticIndexedLayer" in repr(graphs)
    else:
        assert graphs.captured >= 2 and graphs.replayed >= 20, graphs


@torch.no_grad()
def test_a_cache_is_what_it_is_without_graphs(generating: Any) -> None:
    """Step by step, over two caches in turn."""
    model, graphs = generating("llama")
    reference, ids = decoder("llama", "sdpa"), tokens(2, 20)
    caches = [[StaticCache(config=model.config, max_cache_len=32) for _ in range(2)] for _ in range(2)]
    for mine, theirs in caches:
        model(ids[:, :4], past_key_values=mine)
        reference(ids[:, :4], past_key_values=theirs)
    for at in range(4, 20):
        for mine, theirs in caches:
            got = model(ids[:, at : at + 1], past_key_values=mine)
            want = reference(ids[:, at : at + 1], past_key_values=theirs)
            assert got.past_key_values is mine
            torch.testing.assert_close(got.logits, want.logits, atol=2e-5, rtol=1e-4)
    for mine, theirs in caches:
        for a, b in zip(mine.layers, theirs.layers, strict=True):
            torch.testing.assert_close(a.keys, b.keys, atol=2e-5, rtol=1e-4)
            assert int(a.get_seq_length()) == int(b.get_seq_length()) == 20
    assert graphs.captured == 2 and graphs.replayed == 28


@torch.no_grad()
def test_a_growing_cache_stays_without_graphs(generating: Any) -> None:
    model, graphs = generating("llama")
    reference, ids = decoder("llama", "sdpa"), tokens(1, 8)
    mine = model(ids[:, :3], use_cache=True).past_key_values
    theirs = reference(ids[:, :3], use_cache=True).past_key_values
    for at in range(3, 8):
        got = model(ids[:, at : at + 1], past_key_values=mine).logits
        torch.testing.assert_close(got, reference(ids[:, at : at + 1], past_key_values=theirs).logits)
    assert graphs.replayed == 0
    assert any("only those of a StaticCache stay where they are" in why for why in graphs.refused)


def test_a_graph_goes_with_its_cache(generating: Any) -> None:
    model, graphs = generating("llama")
    ids = tokens(1, 6)
    for _ in range(3):
        model.generate(ids, **HOW)
        gc.collect()
    assert graphs.captured >= 3 and not graphs._graphs


def test_other_ways_to_generate_keep_their_cache(generating: Any) -> None:
    model, graphs = generating("llama")
    reference, ids = decoder("llama", "eager"), tokens(1, 6)
    ways: list[dict[str, Any]] = [
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 2},
        {"use_cache": False},
        {"assistant_model": decoder("llama", "eager")},
    ]
    for way in ways:
        assert torch.equal(model.generate(ids, **HOW, **way), reference.generate(ids, **HOW, **way)), way
    assert torch.equal(
        model.generate(ids, **HOW, past_key_values=DynamicCache(config=model.config)), reference.generate(ids, **HOW)
    )
    assert graphs.captured == 0


@torch.no_grad()
def test_beams_are_not_captured_anew_for_every_token(generating: Any) -> None:
    model, graphs = generating("llama")
    reference, ids = decoder("llama", "eager"), tokens(1, 6)
    how = {**HOW, "max_new_tokens": 20, "num_beams": 3, "cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(ids, **how), reference.generate(ids, **how))
    assert graphs.captured <= 5 and "the cache moves between steps, as for beam search" in graphs.refused


@torch.no_grad()
def test_a_full_cache_does_not_overwrite_another_sequence(generating: Any) -> None:
    model, _ = generating("llama")
    ids = tokens(2, 8)
    cache = StaticCache(config=model.config, max_cache_len=6)
    model(ids[:, :1], past_key_values=cache)
    for at in range(1, 6):
        model(ids[:, at : at + 1], past_key_values=cache)
    first = cache.layers[0].keys[1, :, 0].clone()
    model(ids[:, 6:7], past_key_values=cache)
    assert torch.equal(cache.layers[0].keys[1, :, 0], first)


def test_on_a_cpu_the_report_says_that_there_are_none() -> None:
    model = decoder("llama", "sdpa")
    with lz.optimize(model, cuda_graphs=True) as optimized:
        assert optimized.graphs is None
        assert "CUDA graphs: the model is on cpu" in str(optimized.report)
        assert model.generation_config.cache_implementation is None
