"""Compiled models as they run on a GPU, here on the CPU: the same steps, and graphs that are recorded and replayed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import layerzero as lz
import pytest
import torch
import transformers
from layerzero import _native, device_graphs
from layerzero.device_graphs import joined_weights, session
from layerzero.device_graphs.session import DeviceSession
from layerzero.export import Exported, export
from recorded_graphs import RecordedGraphs
from torch import Tensor, nn
from transformers_models_built import DECODERS, Logits

transformers.logging.set_verbosity_error()


def on_device(module: nn.Module, *args: Any, graphs: bool = True, off: tuple[str, ...] = ()) -> tuple[Exported, Any]:
    """A module exported as from a device, and its session."""
    exported = export(module.eval(), args, held=True)
    graph = _native.Graph.from_document(exported.document, exported.constants)
    held = len(exported.buffers) + len(exported.held)
    recorded = RecordedGraphs() if graphs else None
    found = DeviceSession(graph, torch.device("cpu"), off=off, held=held, host=exported.host_calls, graphs=recorded)
    found.prepare(exported.flatten(args))
    return exported, found


def runs(module: nn.Module, *several: tuple[Any, ...], off: tuple[str, ...] = ()) -> Any:
    """Runs a module for some arguments, which only differ in their numbers: eagerly, captured, replayed. All are right."""
    exported, found = on_device(module, *several[0], off=off)
    for args in several:
        expected = copy.deepcopy(module)(*copy.deepcopy(args))
        results = exported.unflatten(found.run(exported.flatten(args)))
        torch.testing.assert_close(results, expected, rtol=2e-5, atol=2e-5)
    (sizes,) = found._known.values()
    assert sizes.refused is None
    assert (sizes.captured is not None) == (len(several) > 1)
    return found


def built(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(DECODERS[name]()).eval().requires_grad_(False)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "gemma2", "mistral"])
def test_models_are_right_in_every_run(name: str) -> None:
    ids = [(torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(seed)),) for seed in range(4)]
    runs(Logits(built(name)), *ids)


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled models run as on a device."""
    monkeypatch.setattr(device_graphs, "serves", lambda device: True)
    monkeypatch.setattr(session, "graphs_of", lambda device: RecordedGraphs())


@pytest.mark.usefixtures("as_device")
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "mistral"])
def test_it_generates_what_the_model_does(name: str) -> None:
    model = built(name)
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    padded, how = ids.clone(), {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    padded[0, :4] = 0
    compiled = lz.compile(model)
    for prompts in (ids, padded):
        mask = (prompts != 0).long()
        expected = model.generate(prompts, attention_mask=mask, max_new_tokens=10, **how)
        found = compiled.generate(prompts, 10, attention_mask=mask, eos_token_id=[])
        assert found.tolist() == expected.tolist()
    kernels = {step.op: step.kernel for step in compiled.decoder().explain()}
    assert "paged" in kernels["cached_attention"], "the written part of the cache is read as pages"
    assert "kv_append" in kernels["index_copy+index_copy"], "keys and values are written by one kernel"


class Gate(nn.Module):
    """Three layers that read one value, two of them alike."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.other = nn.Linear(8, 16, bias), nn.Linear(8, 16, bias), nn.Linear(8, 4, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        return nn.functional.silu(self.gate(x)) * self.up(x), self.other(x)


@pytest.mark.parametrize("bias", [False, True])
def test_layers_that_read_one_value_are_one_product(bias: bool) -> None:
    module = Gate(bias)
    before = [one.detach().clone() for one in module.parameters()]
    inputs = [(torch.randn(3, 8),) for _ in range(3)]
    found = runs(module, *inputs)
    (program,) = (sizes.program for sizes in found._known.values())
    assert sum(step.work.kernel == "linear" for step in program.steps) == 1
    for one, other in zip(module.parameters(), before, strict=True):
        assert torch.equal(one, other)
    weights = [module.gate.weight, module.up.weight, module.other.weight]
    assert joined_weights.beside(weights)
    # A write to a parameter is one to the block.
    with torch.no_grad():
        module.up.weight.mul_(3)
        expected = module(*inputs[0])
        torch.testing.assert_close(tuple(found.run([*inputs[0], *_held(module, found)])), expected)


class Twice(Gate):
    """One of the layers is called for another value too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gated, other = super().forward(x)
        return gated + self.gate(x + 1), other


def _held(module: nn.Module, found: Any) -> list[Tensor]:
    named = dict(module.named_parameters())
    return [named[name] for name in found._graph.inputs[found._first_held :]]


def test_joining_is_left_out_where_it_is_asked_for_or_memory_is_shared() -> None:
    module = Gate()
    runs(module, (torch.randn(3, 8),), off=("merge_linear",))
    assert not joined_weights.beside([module.gate.weight, module.up.weight])
    tied = Twice()
    runs(tied, (torch.randn(3, 8),), (torch.randn(3, 8),))
    assert joined_weights.beside([tied.up.weight, tied.other.weight])
    assert tied.gate.weight.untyped_storage().nbytes() == tied.gate.weight.nbytes
    parts = Gate()
    whole = torch.randn(32, 8)
    parts.gate.weight, parts.up.weight = nn.Parameter(whole[16:]), nn.Parameter(whole[:16])
    runs(parts, (torch.randn(3, 8),))
    assert parts.gate.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


class Written(nn.Module):
    """Writes two caches at places that are an argument."""

    def forward(self, keys: Tensor, values: Tensor, places: Tensor, x: Tensor) -> Tensor:
        keys.index_copy_(2, places, x)
        values.index_copy_(2, places, x + 1)
        return keys.sum() + values[:, :, :2].sum()


@pytest.mark.parametrize("batch", [1, 3])
def test_places_of_a_cache_may_differ_in_every_run(batch: int) -> None:
    """The slots follow from an input, whose memory is the same in every replay."""
    keys, values = (torch.zeros(batch, 16, 2, 4).transpose(1, 2) for _ in range(2))
    exported, found = on_device(Written(), keys, values, torch.tensor([1, 2]), torch.randn(batch, 2, 2, 4))
    ours, theirs = [keys, values], [keys.clone(), values.clone()]
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        places = torch.randperm(16, generator=generator)[:2]
        x = torch.randn(batch, 2, 2, 4, generator=generator)
        (result,) = found.run(exported.flatten((*ours, places, x)))
        torch.testing.assert_close(result, Written()(*theirs, places, x))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
    calls = [step.work.kernel for sizes in found._known.values() for step in sizes.program.steps]
    assert calls.count("kv_append") == 1


class Exchange(nn.Module):
    """Two buffers that take each other's contents, and a view of one of them as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.a: Tensor
        self.b: Tensor
        self.register_buffer("a", torch.zeros(4))
        self.register_buffer("b", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        before = self.a.clone()
        self.a.copy_(self.b + x)
        self.b.copy_(before)
        return before[1:] * 1


def test_buffers_may_be_exchanged() -> None:
    module, reference = Exchange(), Exchange()
    exported, found = on_device(module, torch.ones(4))
    for turn in range(5):
        x = torch.full((4,), float(turn))
        (result,) = found.run(exported.flatten((x,)))
        torch.testing.assert_close(result, reference(x))
        torch.testing.assert_close(list(module.buffers()), list(reference.buffers()))


class Noticing(RecordedGraphs):
    """A device on which a call notices that it is captured."""

    capturing = False

    def capture(self, run: Callable[[], Any]) -> Any:
        Noticing.capturing = True
        try:
            return super().capture(run)
        finally:
            Noticing.capturing = False


@torch.library.custom_op("layerzero_tests::waits", mutates_args=())
def waits(x: Tensor) -> Tensor:
    """Reads a number of the device, which no graph can hold."""
    if Noticing.capturing:
        raise RuntimeError("operation not permitted when stream is capturing")
    return x * float(x.flatten()[0].item())


@waits.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Waiting(nn.Module):
    """Layers around a call that waits for the device."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.first, self.last, self.share = nn.Linear(4, 4), nn.Linear(4, 4), share

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = waits(torch.relu(self.first(x)))
        z: Tensor = waits(self.last(y) * self.share + x)
        return z - y


def test_what_no_graph_can_hold_runs_between_graphs() -> None:
    exported, found = on_device(module := Waiting(), torch.randn(2, 4))
    found._graphs = Noticing()
    for _ in range(4):
        args = (torch.randn(2, 4),)
        (result,) = found.run(exported.flatten(args))
        torch.testing.assert_close(result, module(*args), rtol=1e-5, atol=1e-5)
    (sizes,) = found._known.values()
    assert [part.captured for part in sizes.captured.parts] == [True, False, True, False, True]
    said = found.not_captured(exported.flatten(args))
    assert len(said) == 2
    assert all("layerzero_tests.waits" in one and "capturing" in one for one in said)


class Refusing(RecordedGraphs):
    """A device on which nothing can be captured."""

    def capture(self, run: Callable[[], Any]) -> Any:
        raise RuntimeError("no memory")


def test_without_a_graph_it_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    exported, found = on_device(module := Gate(), torch.randn(3, 8))
    found._graphs = Refusing()
    for _ in range(3):
        x = torch.randn(3, 8)
        torch.testing.assert_close(tuple(found.run(exported.flatten((x,)))), module(x))
    assert found.not_captured(exported.flatten((x,))) == ["everything: RuntimeError: no memory"]


def test_programs_are_kept_for_the_sizes_used_last() -> None:
    module = nn.Linear(4, 3)
    rows = torch.export.Dim("rows", min=1, max=1000)
    exported = export(module.eval(), (torch.randn(2, 4),), dynamic_shapes={"input": {0: rows}}, held=True)
    graph = _native.Graph.from_document(exported.document, exported.constants)
    found = DeviceSession(graph, torch.device("cpu"), held=len(exported.held), graphs=RecordedGraphs())
    for count in [*range(1, session.MOST_PROGRAMS + 4), 1]:
        x = torch.randn(count, 4)
        torch.testing.assert_close(found.run(exported.flatten((x,)))[0], module(x))
    assert found.plans == session.MOST_PROGRAMS


def test_the_most_memory_between_inputs_and_results() -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = torch.exp(x)  # 4 kB
            b = torch.sin(a).reshape(-1)[:500]  # 4 kB, and views of it
            c = torch.cos(b)  # 2 kB
            return c.sum()  # 4 B

    exported, found = on_device(Chain(), torch.randn(10, 100))
    # `a` and sin(a); sin(a) and `c`; `c` and the sum.
    assert found.arena(exported.flatten((torch.randn(10, 100),))) == 8000


def test_a_loaded_weight_is_followed(as_device: None) -> None:
    module = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2)).eval()
    other = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2)).eval()
    x = torch.randn(2, 300)
    with torch.no_grad():
        compiled = lz.compile(module, x)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), module(x))
        module.load_state_dict(other.state_dict())
        compiled.refresh()
        torch.testing.assert_close(compiled(x), other(x))


@pytest.mark.usefixtures("as_device")
def test_what_it_tells_of_itself(tmp_path: Any) -> None:
    model = Logits(built("llama")).eval()
    ids = torch.randint(3, 90, (1, 7))
    with torch.no_grad():
        compiled = lz.compile(model, ids)
        for _ in range(3):
            compiled(ids)
    report = compiled.report()
    assert report.nodes < report.nodes_exported
    assert report.calls == 3
    assert report.arena_bytes > 0
    timed = compiled.profile(rounds=2)
    assert [step.op for step in timed] == [step.op for step in compiled.explain()]
    assert sum(step.us for step in timed) > 0
    assert "rms_norm" in compiled.graph()
    assert compiled.graph("dot").startswith("digraph")


# What a review found wrong.


class Turned(nn.Module):
    """A head of a decoder that embeds positions in one tensor before it makes the other."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def turned(y: Tensor) -> Tensor:
            y = y.view(*y.shape[:2], 2, 8).transpose(1, 2)
            other = torch.cat((-y[..., 4:], y[..., :4]), -1)
            return y * cos + other * sin

        return turned(self.q(x)) @ turned(self.k(x)).mT


def test_two_rotary_embeddings_may_not_be_made_one_after_the_other() -> None:
    angle = torch.randn(5, 4).repeat(1, 2)
    runs(Turned(), *[(torch.randn(2, 5, 16), angle.cos(), angle.sin()) for _ in range(3)])


class Own(nn.Module):
    """Gives its buffer as it was, changes it, and gives what it is now."""

    def __init__(self) -> None:
        super().__init__()
        self.a: Tensor
        self.register_buffer("a", torch.arange(9.0).reshape(3, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.a.clone()
        windows = self.a.unfold(0, 2, 1).clone()
        self.a.copy_(self.a.t().clone() + x)
        return before, windows


def test_results_keep_what_a_buffer_held() -> None:
    module, reference = Own(), Own()
    exported, found = on_device(module, torch.ones(3, 3))
    for turn in range(4):
        x = torch.full((3, 3), float(turn))
        found_now = [one.clone() for one in found.run(exported.flatten((x,)))]
        torch.testing.assert_close(found_now, list(reference(x)))
        torch.testing.assert_close(module.a, reference.a)


@pytest.mark.parametrize("shape", [(3, 5), (7, 5), (5, 5)])
def test_windows_from_the_first_key_on(shape: tuple[int, int]) -> None:
    queries, keys = shape

    class Windowed(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            i, j = torch.arange(queries)[:, None], torch.arange(keys)
            mask = (j <= i) & (j > i - 2)
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    exported, found = on_device(Windowed(), *_heads(queries, keys, 0))
    for seed in range(3):
        args = _heads(queries, keys, seed)
        # A query without any key gives zeros, in torch NaN.
        expected = Windowed()(*args).nan_to_num(0.0)
        torch.testing.assert_close(found.run(exported.flatten(args))[0], expected, rtol=1e-5, atol=1e-5)


def _heads(queries: int, keys: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, count, 8, generator=generator) for count in (queries, keys, keys))
    return q, k, v


def test_numbers_that_count_from_the_back_and_tables_of_integers() -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor, at: Tensor, table: Tensor) -> tuple[Tensor, ...]:
            return x[at], x[:, at], x.index_fill(0, at, 3.0), nn.functional.embedding(at % 3, table)

    table = torch.arange(12).reshape(4, 3)
    runs(Picks(), *[(torch.randn(4, 4), torch.tensor(at), table) for at in ([-1, 0], [1, -4], [2, 3])])


@pytest.mark.parametrize("shape", [(5, 1), (2, 1, 5, 1), (5, 7)])
def test_masks_of_one_column(shape: tuple[int, ...]) -> None:
    class Masked(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    made = [tuple(torch.randn(2, 3, count, 8) for count in (5, 7, 7)) for _ in range(3)]
    runs(Masked(), *[(*heads, torch.randn(shape)) for heads in made])


@pytest.mark.usefixtures("as_device")
def test_caches_of_two_widths() -> None:
    model = built("deepseek_v3")
    ids = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert lz.compile(model).generate(ids, 5, eos_token_id=[]).tolist() == expected.tolist()


def test_inference_mode_leaves_weights_as_they_are() -> None:
    module, x = Gate(), torch.randn(3, 8)
    exported, found = on_device(module, x)
    with torch.inference_mode():
        for _ in range(3):
            found.run(exported.flatten((x,)))
    with torch.no_grad():
        torch.testing.assert_close(tuple(found.run(exported.flatten((x,)))), module(x))
    assert not any(one.is_inference() for one in module.parameters())
    module.train()(x)[0].sum().backward()


def test_a_weight_that_was_moved_is_read_where_it_is() -> None:
    module, x = Gate(), torch.randn(3, 8)
    _, found = on_device(module, x)
    for turn in range(4):
        if turn == 2:
            module.up.weight.data = torch.zeros(16, 8)
        torch.testing.assert_close(tuple(found.run([x, *_held(module, found)])), module(x))


def test_weights_that_somebody_else_holds_are_not_moved() -> None:
    module = Gate()
    state = module.state_dict()
    runs(module, (torch.randn(3, 8),))
    state["up.weight"].zero_()
    assert not module.up.weight.any()


def test_what_is_known_before_is_nobodys_to_change() -> None:
    class Table(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            table = torch.arange(8.0)
            return table[:3], table[:3] + x

    exported, found = on_device(Table(), torch.zeros(3))
    for _ in range(4):
        first, second = found.run(exported.flatten((torch.zeros(3),)))
        torch.testing.assert_close((first, second), Table()(torch.zeros(3)))
        first += 100


@pytest.mark.usefixtures("as_device")
def test_a_step_that_fails_leaves_the_call_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero.device_graphs.nodes import Work
    from layerzero.device_graphs.runners import RUNNERS

    def refused(*_: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(RUNNERS, "unary", lambda node: Work(refused, "broken"))
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), torch.randn(2, 4)
    with torch.no_grad():
        compiled = lz.compile(module, x)
        with pytest.warns(lz.LayerZeroWarning, match="no such kernel"):
            torch.testing.assert_close(compiled(x), module(x))
        torch.testing.assert_close(compiled(x), module(x))
    assert compiled.report.__self__._left == {"a step that failed": 2}


def test_caches_that_take_turns_have_a_graph_each() -> None:
    caches = [[torch.zeros(1, 16, 2, 4).transpose(1, 2) for _ in range(2)] for _ in range(3)]
    places, x = torch.tensor([1, 2]), torch.randn(1, 2, 2, 4)
    exported, found = on_device(Written(), *caches[0], places, x)
    for _ in range(4):
        for keys, values in caches:
            (result,) = found.run(exported.flatten((keys, values, places, x)))
            torch.testing.assert_close(result, Written()(keys.clone(), values.clone(), places, x))
    (sizes,) = found._known.values()
    assert len(sizes.captures) == 3
    # Nothing but the caller holds a cache.
    assert all(part is None for one in sizes.captures for part in one._slots[:2])
