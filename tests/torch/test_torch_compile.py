"""`torch.compile` of the public functions: no graph break, no recompilation for another size, the same results."""

from collections.abc import Callable, Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
import torch._inductor.config
import torch_references as reference
from gradients import assert_same, gradients
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache
from torch.utils.checkpoint import checkpoint
from torch_cases import BY_ID, CASES, EVERY_FUNCTION, IDS, Case, assert_right, copied, doubled, expected, run


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def inductor() -> Iterator[None]:
    """Compiles afresh, and quickly: finding out what the processor's vectors can do takes the C++ compiler a minute."""
    quick = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    with torch._inductor.config.patch(quick), fresh_cache():
        yield


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", dynamic: bool | None = None) -> Any:
    """A function compiled as one graph."""
    return torch.compile(
        lambda *args, **kwargs: function(*args, **kwargs), backend=backend, fullgraph=True, dynamic=dynamic
    )


@pytest.mark.parametrize("case", EVERY_FUNCTION, ids=lambda case: case.function)
def test_compiled_calls_give_the_same(case: Case) -> None:
    assert_right(run(case, compiled(case.call, "eager", dynamic=False)), expected(case))


#: One case of each function; the others are compiled by `make test-full`: a second each.
SIZES_VARY = [case if case in EVERY_FUNCTION else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", SIZES_VARY, ids=IDS)
def test_another_size_needs_no_recompilation(case: Case) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(case.call, counter, dynamic=True)
    assert_right(run(case, function), expected(case))
    # A number that is an argument of the graph is made a constant in a second attempt.
    graphs = counter.frame_count
    for n in (7, 9):
        assert_right(run(case, function, n), expected(case, n))
    assert counter.frame_count == graphs


@pytest.mark.parametrize("case", [c for c in EVERY_FUNCTION if c.grads], ids=lambda case: case.function)
def test_compiled_gradients_are_the_eager_ones(case: Case) -> None:
    assert_same(gradients(case, compiled(case.call, dynamic=True)), gradients(case, case.reference, doubled))


class Block(torch.nn.Module):
    """A decoder layer of LayerZero's functions, with everything that meets a compiler in practice."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        made = {
            "norm": (32,),
            "qkv": (96, 32),
            "out": (32, 32),
            "up": (64, 32),
            "gate": (64, 32),
            "down": (32, 64),
        }
        self.weights = torch.nn.ParameterDict(
            {name: torch.randn(shape, generator=generator) / 6 for name, shape in made.items()}
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention and a feed-forward block, each with its residual."""
        w = self.weights
        batch, length, _ = x.shape
        normed = lz.rms_norm(x, w["norm"])
        query, key, value = lz.linear(normed, w["qkv"]).view(batch, length, 3, 4, 8).unbind(2)
        query, key = lz.rope(query, cos, sin), lz.rope(key, cos, sin)
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        attended = lz.attention(*heads_first, layout="BHSD")
        attended = attended.transpose(1, 2).reshape(batch, length, 32)
        normed, x = lz.fused_add_rms_norm(lz.linear(attended, w["out"]), x, w["norm"])
        result: Tensor = x + lz.fused_mlp(normed, w["up"], w["down"], w["gate"])
        return result


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of the block."""
    generator = torch.Generator().manual_seed(length)
    angles = torch.randn(length, 4, generator=generator)
    return torch.randn(2, length, 32, generator=generator), angles.cos(), angles.sin()


def test_gradients_of_a_whole_layer() -> None:
    block, counter = Block(), CompileCounterWithBackend("aot_eager")
    fast = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    for length in (6, 11):
        x, cos, sin = inputs(length)
        grads = []
        for model in (block, fast):
            result = model(x, cos, sin)
            grads.append((result.detach(), *torch.autograd.grad(result.square().sum(), list(block.parameters()))))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.usefixtures("inductor")
def test_inductor_serves_a_whole_layer() -> None:
    block, counter = Block(), CompileCounterWithBackend("inductor")
    fast = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (6, 11):
            torch.testing.assert_close(fast(*inputs(length)), block(*inputs(length)), rtol=1e-3, atol=1e-3)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("inductor")
def test_inductor_updates_caches_in_place() -> None:
    case = BY_ID["kv_append"]

    def append(*args: Tensor) -> Tensor:
        lz.kv_append(*args)
        return args[2].sum()

    function = torch.compile(append, backend="inductor", fullgraph=True)
    args, _ = copied(case.make(5))
    total = function(*args)
    wanted = case.reference(*case.make(5)[0])
    assert_right(tuple(args[at] for at in case.updates), wanted)
    torch.testing.assert_close(total, wanted[0].sum())


@pytest.mark.usefixtures("inductor")
def test_inductor_hands_over_transposed_views_as_they_are() -> None:
    # As many positions as heads, so that no shape tells what was rearranged.
    made = [torch.randn(2, 4, 4, 8) for _ in range(3)]

    def call(*tensors: Tensor) -> Tensor:
        query, key, value = (tensor.mul(1.0).transpose(1, 2) for tensor in tensors)
        return lz.attention(query, key, value, layout="BHSD").transpose(1, 2)

    wanted = reference.attention(*map(doubled, made))
    assert_right((torch.compile(call, backend="inductor", fullgraph=True)(*made),), (wanted,))


def test_results_can_be_written_to_a_tensor() -> None:
    rows, out = torch.randn(3, 16), torch.empty(3, 16)
    given = compiled(lz.rms_norm)(rows, out=out)
    assert given is out
    assert_right((out,), (reference.rms_norm(rows.double()),))


def test_an_out_that_does_not_fit_is_refused() -> None:
    rows = torch.randn(3, 16)
    for out in (torch.empty(3, 8), torch.empty(3, 16, dtype=torch.float64)):
        with pytest.raises(Exception, match="'out' does not have the shape and dtype"):
            compiled(lz.rms_norm, "eager")(rows, out=out)


def test_wrong_shapes_are_told_while_tracing() -> None:
    with pytest.raises(Exception, match="linear: 'weight' has shape"):
        compiled(lz.linear, "eager")(torch.randn(2, 4), torch.randn(3, 5))


def test_a_quantized_result_is_a_named_tuple_in_the_graph() -> None:
    rows = torch.randn(4, 32)

    def both(x: Tensor) -> Tensor:
        quantized = lz.quantize(x, "int8", granularity="per_channel")
        result: Tensor = lz.dequantize(quantized.values, quantized.scales, granularity="per_channel")
        return result

    got = compiled(both)(rows)
    assert (got - rows).abs().max() < rows.abs().max() / 127


def test_windows_and_sizes_may_be_symbols() -> None:
    made = BY_ID["attention"].make(9)[0]
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(lambda q, k, v, left: lz.attention(q, k, v, window=left), counter, dynamic=True)
    for left in (2, 3, 5):
        assert_right((function(*made, left),), (reference.attention(*map(doubled, made), window=left),))
    assert counter.frame_count == 1
    slopes = torch.tensor([0.5, 0.25])
    function = compiled(lambda s, x: lz.alibi_bias(s, x.shape[0], x.shape[1]), counter, dynamic=True)
    for shape in ((3, 5), (4, 6)):
        assert_right((function(slopes, torch.empty(shape)),), (reference.alibi_bias(slopes.double(), *shape),))
    assert counter.frame_count == 2


def test_compiled_draws_follow_the_seed() -> None:
    logits = torch.zeros(64, 50)
    function = compiled(lambda x: lz.sample_topk(x, 50))
    torch.manual_seed(0)
    first = function(logits)
    assert not torch.equal(function(logits), first)
    torch.manual_seed(0)
    assert torch.equal(function(logits), first)
    torch.manual_seed(0)
    assert torch.equal(lz.sample_topk(logits, 50), first)


def test_two_draws_in_a_graph_are_two_draws() -> None:
    logits = torch.zeros(64, 50)
    function = compiled(lambda x: (lz.sample_topk(x, 50), lz.sample_topk(x, 50)))
    first, second = function(logits)
    assert not torch.equal(first, second)


def test_compiled_dropout_is_the_same_in_the_backward() -> None:
    query, key, value = BY_ID["attention"].make(9)[0]
    value.requires_grad_()
    function = compiled(lambda *args: lz.attention(*args, dropout_p=0.5))
    results = []
    for _ in range(2):
        result = function(query, key, value)
        (grad,) = torch.autograd.grad(result.sum(), value)
        torch.testing.assert_close((grad * value).sum(), result.sum(), rtol=1e-4, atol=1e-4)
        results.append(result)
    assert not torch.equal(*results)


def test_activation_checkpointing_in_a_graph() -> None:
    case = BY_ID["attention"]
    got = gradients(case, compiled(lambda *args: checkpoint(case.call, *args, use_reentrant=False)))
    assert_same(got, gradients(case, case.reference, doubled))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
def test_a_generator_breaks_the_graph_and_still_draws() -> None:
    logits = torch.zeros(64, 50)
    function = torch.compile(lambda x, g: lz.sample_topk(x, 50, generator=g), backend="eager")
    first = function(logits, torch.Generator().manual_seed(1))
    assert torch.equal(first, lz.sample_topk(logits, 50, generator=torch.Generator().manual_seed(1)))


def test_inference_mode_and_no_grad() -> None:
    rows = torch.randn(3, 16, requires_grad=True)
    function = compiled(lz.rms_norm)
    wanted = (reference.rms_norm(rows.detach().double()),)
    with torch.no_grad():
        result = function(rows)
    assert not result.requires_grad
    assert_right((result,), wanted)
    with torch.inference_mode():
        assert_right((function(rows.detach().clone()),), wanted)


def test_autocast_around_and_inside_of_compiled_code() -> None:
    rows, weight = torch.randn(3, 16), torch.randn(24, 16)
    wanted = (reference.linear(rows.double(), weight.double()),)

    def inside(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return lz.linear(x, w), lz.rms_norm(x)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = compiled(lz.linear)(rows, weight)
    product, normed = compiled(inside)(rows, weight)
    for result in (around, product):
        assert result.dtype == torch.bfloat16
        assert_right((result,), wanted, 5e-2)
    assert normed.dtype == torch.float32


def test_compiled_code_survives_a_reset() -> None:
    rows = torch.randn(3, 16)
    for _ in range(2):
        assert_right((compiled(lz.gelu)(rows),), (reference.gelu(rows.double()),))
        torch._dynamo.reset()
