"""Gradients in half precision are as good as their dtype: sums over many rows are made in float32.

Every kernel that serves a call with gradients is compared with torch's autograd in float64.
"""

from collections.abc import Callable, Sequence
from typing import Any

import layerzero as lz
import pytest
import torch
from conftest import TOLERANCE, taking
from layerzero.integrations.torch_operators.torch_ops import call_traced
from torch import Tensor
from torch.nn import functional

HALF = [torch.bfloat16, torch.float16]
ROWS = 4096
# Fused attention rounds weights and their gradients to the dtype of its inputs before it multiplies by them. What cancels
# out in the sums after that leaves an error, so that it counts against the largest gradient.
FUSED_ATTENTION = 3.0

Gradients = tuple[Tensor, ...]


def drawn(dtype: torch.dtype, *shape: int, mean: float = 1.0) -> Tensor:
    """Random numbers whose sums are large: around a mean."""
    return (0.5 * torch.randn(*shape) + mean).to(dtype)


def attention64(query: Tensor, key: Tensor, value: Tensor, layout: str, causal: bool = False) -> Tensor:
    """Attention by its definition, heads shared by repetition."""
    if layout == "BSHD":
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    output = scores.softmax(-1) @ value
    return output.transpose(1, 2) if layout == "BSHD" else output


def rms64(input: Tensor, weight: Tensor) -> Tensor:
    return input / (input.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def fused_add64(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return rms64(input + residual, weight), input + residual


def mlp64(input: Tensor, up: Tensor, down: Tensor, gate: Tensor) -> Tensor:
    return functional.linear(functional.silu(functional.linear(input, gate)) * functional.linear(input, up), down)


def rope64(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = input.chunk(2, -1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def alibi64(slopes: Tensor, seq_q: int, seq_k: int) -> Tensor:
    distance = torch.arange(seq_k - seq_q, seq_k)[:, None] - torch.arange(seq_k)
    return -slopes[:, None, None] * distance.abs()


def layer64(input: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return functional.layer_norm(input, shape, weight, bias)


Make = Callable[[torch.dtype], tuple[Sequence[Any], dict[str, Any]]]
CASES: dict[str, tuple[str, Make, Callable[..., Any], float]] = {
    "embedding": (
        "embedding",
        lambda d: ((torch.randint(0, 3, (64, ROWS // 64)), drawn(d, 5, 16)), {}),
        lambda indices, weight: weight[indices],
        1.0,
    ),
    "embedding of int32 indices": (
        "embedding",
        lambda d: ((torch.randint(0, 3, (ROWS,), dtype=torch.int32), drawn(d, 5, 16)), {}),
        lambda indices, weight: weight[indices],
        1.0,
    ),
    "rms_norm": ("rms_norm", lambda d: ((drawn(d, ROWS, 32), drawn(d, 32)), {}), rms64, 1.0),
    "rms_norm with a float32 weight": (
        "rms_norm",
        lambda d: ((drawn(d, ROWS, 32), drawn(torch.float32, 32)), {}),
        rms64,
        1.0,
    ),
    "layer_norm": (
        "layer_norm",
        lambda d: ((drawn(d, ROWS, 32), (32,), drawn(d, 32), drawn(d, 32)), {}),
        layer64,
        1.0,
    ),
    "layer_norm far from zero": (
        "layer_norm",
        lambda d: ((drawn(d, ROWS, 32, mean=50.0), (32,), drawn(d, 32), drawn(d, 32)), {}),
        layer64,
        1.0,
    ),
    "layer_norm without a weight": ("layer_norm", lambda d: ((drawn(d, ROWS, 32, mean=50.0), (32,)), {}), layer64, 1.0),
    "layer_norm with a float32 weight": (
        "layer_norm",
        lambda d: ((drawn(d, ROWS, 32), (32,), drawn(torch.float32, 32), drawn(torch.float32, 32)), {}),
        layer64,
        1.0,
    ),
    "fused_add_rms_norm": (
        "fused_add_rms_norm",
        lambda d: ((drawn(d, ROWS, 32), drawn(d, ROWS, 32), drawn(d, 32)), {}),
        fused_add64,
        1.0,
    ),
    "linear": (
        "linear",
        lambda d: ((drawn(d, ROWS, 32, mean=0.1), drawn(d, 16, 32), drawn(d, 16)), {}),
        functional.linear,
        1.0,
    ),
    "linear of a transposed input": (
        "linear",
        lambda d: ((drawn(d, 64, ROWS // 64, 32, mean=0.1).transpose(0, 1), drawn(d, 16, 32), drawn(d, 16)), {}),
        functional.linear,
        1.0,
    ),
    "fused_mlp": (
        "fused_mlp",
        lambda d: (
            (drawn(d, ROWS, 16, mean=0.1), *(drawn(d, *s, mean=0.0) for s in ((32, 16), (16, 32), (32, 16)))),
            {},
        ),
        mlp64,
        1.0,
    ),
    "silu_mul": (
        "silu_mul",
        lambda d: ((drawn(d, ROWS, 8), drawn(d, ROWS, 8)), {}),
        lambda gate, up: functional.silu(gate) * up,
        1.0,
    ),
    "gelu": ("gelu", lambda d: ((drawn(d, ROWS, 8),), {}), functional.gelu, 1.0),
    "softmax": ("softmax", lambda d: ((drawn(d, ROWS, 8),), {}), lambda x: functional.softmax(x, -1), 1.0),
    "rope": (
        "rope",
        lambda d: ((drawn(d, 1, ROWS, 2, 16), drawn(d, ROWS, 8), drawn(d, ROWS, 8)), {"layout": "BSHD"}),
        lambda input, cos, sin, layout: rope64(input, cos, sin),
        1.0,
    ),
    "alibi_bias": ("alibi_bias", lambda d: ((drawn(d, 4), 24, 24), {}), alibi64, 1.0),
    "causal attention": (
        "attention",
        lambda d: ([drawn(d, 1, 2, 512, 16) for _ in range(3)], {"layout": "BHSD", "causal": True}),
        attention64,
        FUSED_ATTENTION,
    ),
    "grouped attention": (
        "attention",
        lambda d: (
            (drawn(d, 1, ROWS, 4, 16), drawn(d, 1, 16, 2, 16), drawn(d, 1, 16, 2, 16)),
            {"layout": "BSHD", "causal": False},
        ),
        attention64,
        FUSED_ATTENTION,
    ),
    "cross_attention": (
        "cross_attention",
        lambda d: ((drawn(d, 1, ROWS, 2, 16), drawn(d, 1, 16, 2, 16), drawn(d, 1, 16, 2, 16)), {"layout": "BSHD"}),
        attention64,
        FUSED_ATTENTION,
    ),
}


def leaves(values: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """The same values; floating-point tensors want gradients, in another dtype if one is given."""
    return [
        value.detach().to(dtype or value.dtype).requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in values
    ]


def gradients(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], into: list[Tensor]
) -> Gradients:
    """Gradients for all arguments that want one. `into` holds the gradients of the results; they are drawn if it is empty."""
    results = function(*args, **kwargs)
    results = results if isinstance(results, tuple) else (results,)
    into.extend(drawn(result.dtype, *result.shape) for result in results[len(into) :])
    wanted = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    return torch.autograd.grad(results, wanted, [grad.to(r.dtype) for grad, r in zip(into, results, strict=True)])


def largest_error(got: Gradients, wanted: Gradients, of_largest: bool = False) -> float:
    """The largest error of any gradient, in units of the tolerance of its dtype: against each number, or against the
    largest one of its tensor."""

    def error(a: Tensor, b: Tensor) -> float:
        size = b.abs().max() if of_largest else b.abs()
        return float(((a.double() - b).abs() / (1.0 + size)).max()) / TOLERANCE[a.dtype]

    return max(error(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_kernel_gives_gradients_as_good_as_the_dtype(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    function, make, exact, factor = CASES[case]
    values, kwargs = make(dtype)
    into: list[Tensor] = []
    gradients(getattr(lz, function), leaves(values), kwargs, into)
    wanted = gradients(exact, leaves(values, torch.float64), kwargs, into)
    kernels = taking(function, *leaves(values), **kwargs)
    assert kernels
    runs: dict[str, Callable[..., Any]] = {
        "the chosen kernel": getattr(lz, function),
        "the operator": lambda *args, **kwargs: call_traced(function, args, kwargs),
    }
    runs |= {kernel: lambda *a, kernel=kernel, **k: lz.run_kernel(kernel, *a, **k) for kernel in kernels}
    for by, run in runs.items():
        error = largest_error(gradients(run, leaves(values), kwargs, into), wanted, factor == FUSED_ATTENTION)
        assert error <= factor, f"{case} by {by}: {error:.1f} times the tolerance"


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sums_of_ones_are_their_number(dtype: torch.dtype) -> None:
    table = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
    lz.embedding(torch.ones(ROWS, dtype=torch.int64), table).sum(dtype=torch.float32).backward()
    assert table.grad is not None
    assert table.grad.tolist() == [[0.0] * 4, [float(ROWS)] * 4, [0.0] * 4]
    rows = torch.randn(ROWS, 32).to(dtype)
    weight, bias = (torch.ones(32, dtype=dtype, requires_grad=True) for _ in range(2))
    lz.layer_norm(rows, 32, weight, bias).sum(dtype=torch.float32).backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [float(ROWS)] * 32


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_attention_sums_over_many_queries(dtype: torch.dtype, mask: bool) -> None:
    torch.manual_seed(2)
    queries = 65536
    values = [drawn(dtype, 1, 1, queries, 8), drawn(dtype, 1, 1, 16, 8), drawn(dtype, 1, 1, 16, 8)]
    kwargs: dict[str, Any] = {"layout": "BHSD"}
    if mask:
        kwargs["attn_mask"] = torch.ones(1, 1, queries, 16, dtype=torch.bool)
    into: list[Tensor] = []
    got = gradients(lz.cross_attention, leaves(values), kwargs, into)
    wanted = gradients(attention64, leaves(values, torch.float64), {"layout": "BHSD"}, into)
    assert largest_error(got, wanted) <= 1.0


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_kernel_that_serves_gradients_is_one_that_sums_in_float32(dtype: torch.dtype) -> None:
    rows, weight = torch.randn(8, 16).to(dtype), torch.ones(16, dtype=dtype)
    assert lz.which("layer_norm", rows[:1], 16, weight).kernel_id.startswith("lz_cpu.layer_norm")
    assert lz.which("layer_norm", rows, 16, weight.clone().requires_grad_()).kernel_id == "torch.layer_norm.mixed"
    indices = torch.zeros(5, dtype=torch.int64)
    assert lz.which("embedding", indices, rows).kernel_id == "lz_cpu.embedding"
    assert lz.which("embedding", indices, rows.clone().requires_grad_()).kernel_id == "torch.embedding.wide_gradient"


def test_embedding_in_half_precision_has_second_derivatives() -> None:
    table = torch.randn(3, 4).to(torch.bfloat16).requires_grad_()
    indices = torch.tensor([[2, 0], [2, 2]])
    (first,) = torch.autograd.grad(lz.embedding(indices, table).square().sum(), table, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), table)
    assert second.tolist() == [[2.0] * 4, [0.0] * 4, [6.0] * 4]


def test_embedding_in_half_precision_under_functorch() -> None:
    table = torch.randn(3, 4).to(torch.bfloat16)
    indices = torch.tensor([[2, 0], [2, 2]])
    grad = torch.func.grad(lambda weight: lz.embedding(indices, weight).sum())(table)
    assert grad.tolist() == [[1.0] * 4, [0.0] * 4, [3.0] * 4]


def test_an_index_outside_the_table_is_the_callers_mistake_with_gradients_too() -> None:
    table = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(lz.InvalidCallError, match="indices.*3, expected an index from 0 to below 3"):
        lz.embedding(torch.tensor([0, 3]), table)
