"""The edge cases of the operations' contracts: every kernel of this machine gives what the schema says, in every dtype.

Expected values are float64 computations by numpy, or written down. Where the contract names an exception, the test says
exactly what kernels may give instead. `test_half_gradients` has those about gradients.
"""

import math
from collections.abc import Iterator
from typing import Any

import layerzero as lz
import numpy as np
import pytest
import torch
from conftest import FUNCTIONS, TOLERANCE, everyone, taking
from layerzero import _native
from torch import Tensor

# Every edge case of every function: what has no test here or in `test_half_gradients` has no place in a schema.
NORM_EDGES = {"small_eps", "large_numbers", "half_gradients"}
EDGES = {
    # What becomes of scores that are all NaN is tested in test_contract.py.
    "attention": {"nan_scores", "infinite_score", "tiny_scale", "half_gradients"},
    "cross_attention": {"nan_scores", "infinite_score", "tiny_scale", "half_gradients"},
    "embedding": {"half_gradients"},
    "rms_norm": NORM_EDGES,
    "layer_norm": NORM_EDGES,
    "fused_add_rms_norm": NORM_EDGES,
    "linear": {"half_bias"},
    "linear_packed": {"half_activation"},
    "linear_quantized": {"half_activation"},
    "silu_mul": {"infinite"},
    "gelu": {"infinite"},
    "softmax": {"nothing_finite", "underflow"},
    "sample_topk": {"uniform_range"},
    "sample_topp": {"uniform_range"},
    "speculative_verify": {"uniform_range"},
    "quantize": {"infinite"},
}

INF, NAN = math.inf, math.nan
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
HALF = [torch.float16, torch.bfloat16]


def results(name: str, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """The first result of the public function and of every kernel that takes the call, in float64."""
    for kernel, result in everyone(name, **kwargs):
        first = result[0] if isinstance(result, tuple) else result
        yield kernel, first.detach().double()


def close(got: Tensor, want: Any, dtype: torch.dtype) -> bool:
    """Whether a result is within the tolerance of its dtype; NaN and infinities are where they should be."""
    tolerance = TOLERANCE[dtype]
    want = torch.as_tensor(np.asarray(want))
    return torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_edge_case_of_a_schema_has_a_test(name: str) -> None:
    stated = _native.schema(FUNCTIONS[name].operation)["edges"]
    assert set(stated) == EDGES.get(name, set())
    documented = " ".join((getattr(lz, name).__doc__ or "").split())
    for when, gives, _ in stated.values():
        assert f"Case: {when}. Result: {gives}" in documented


# --- linear -----------------------------------------------------------------------------------------------------------


def non_contiguous(shape: tuple[int, ...], value: float, dtype: torch.dtype, how: str) -> Tensor:
    """A tensor of one value whose rows do not form a matrix without a copy."""
    if how == "columns":
        return torch.full((*shape[:-1], 2 * shape[-1]), value, dtype=dtype)[..., ::2]
    if how == "rows":
        return torch.full((2 * shape[0], *shape[1:]), value, dtype=dtype)[::2]
    return torch.full((shape[1], shape[0], *shape[2:]), value, dtype=dtype).transpose(0, 1)


@pytest.mark.parametrize("how", ["contiguous", "columns", "rows", "transposed"])
@pytest.mark.parametrize("leading", [(), (3,), (3, 2), (2, 3, 2)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_linear_adds_the_bias_before_it_rounds(dtype: torch.dtype, leading: tuple[int, ...], how: str) -> None:
    if how in ("rows", "transposed") and len(leading) < 2:
        pytest.skip("has no such strides")
    shape = (*leading, 100)
    rows = torch.full(shape, 100.0, dtype=dtype) if how == "contiguous" else non_contiguous(shape, 100.0, dtype, how)
    # 100 products of 1000 are beyond float16; with the bias they are not.
    weight = torch.full((3, 100), 10.0, dtype=dtype)
    bias = torch.tensor([-48320.0, -60000.0, -99000.0 if dtype == torch.bfloat16 else -65000.0], dtype=dtype)
    want = (np.float64(100 * 100.0 * 10.0) + bias.double().numpy()) * np.ones((*leading, 3))
    for kernel, got in results("linear", input=rows, weight=weight, bias=bias):
        rounded = torch.as_tensor(want).to(dtype).double()
        assert torch.equal(got, rounded), (
            f"{kernel}: {got.flatten()[:3].tolist()}, not {rounded.flatten()[:3].tolist()}"
        )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
def test_packed_linear_activates_before_it_rounds(dtype: torch.dtype, activation: str) -> None:
    # 1 + small rounds to 1 in half precision, so that only an exact sum leaves something beside the bias of -1.
    small = 2.0**-13
    rows = torch.tensor([[1.0, small]] * 3, dtype=dtype)
    weight, bias = torch.zeros(1, 16, 32, 2, dtype=dtype), torch.full((4,), -1.0, dtype=dtype)
    weight[0, 0, :4] = 1.0
    # Near zero gelu(x) and silu(x) are x / 2.
    want = small * (1.0 if activation in ("none", "relu") else 0.5)
    call = {"out_features": 4, "interleave": 2, "activation": activation}
    for kernel, got in results("linear_packed", input=rows, weight=weight, bias=bias, **call):
        assert torch.allclose(got, torch.full_like(got, want), rtol=1e-2, atol=0.0), kernel


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
def test_quantized_linear_activates_before_it_rounds(dtype: torch.dtype, activation: str) -> None:
    # 64 · 127 + 65 = 8193 units of small are 1 + small, which rounds to 1 in half precision.
    small = 2.0**-13
    rows, bias = torch.tensor([[64.0, 1.0]] * 3, dtype=dtype), torch.full((4,), -1.0, dtype=dtype)
    weight, scales = torch.zeros(1, 2, 32, 1, dtype=torch.int8), torch.full((1, 1, 32), small)
    weight[0, 0], weight[0, 1] = 127, 65
    want = small * (1.0 if activation in ("none", "relu") else 0.5)
    call = {"scales": scales, "out_features": 4, "activation": activation}
    for kernel, got in results("linear_quantized", input=rows, weight=weight, bias=bias, **call):
        assert torch.allclose(got, torch.full_like(got, want), rtol=1e-2, atol=0.0), kernel


# --- norms ------------------------------------------------------------------------------------------------------------


def rms64(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def layer64(x: np.ndarray, eps: float) -> np.ndarray:
    return rms64(x - x.mean(-1, keepdims=True), eps)


NORMS = {"rms_norm": rms64, "layer_norm": layer64, "fused_add_rms_norm": lambda x, eps: rms64(2.0 * x, eps)}


def norm_arguments(name: str, x: Tensor, eps: float, weight: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {"input": x, "eps": eps}
    if name == "layer_norm":
        arguments["normalized_shape"] = x.shape[-1]
    if name == "fused_add_rms_norm":
        arguments["residual"] = x
    if weight:
        arguments["weight"] = torch.full((x.shape[-1],), 0.5, dtype=x.dtype)
    return arguments


def values_of(size: float, dtype: torch.dtype, rows: int) -> Tensor:
    return (torch.linspace(-1.0, 2.0, 24, dtype=torch.float64).repeat(rows, 1) * size).to(dtype)


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [1e-36, 1e-30, 1e-22, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_with_eps_zero_hold_for_every_size(
    dtype: torch.dtype, name: str, size: float, rows: int, weight: bool
) -> None:
    x = values_of(size, dtype, rows)
    want = NORMS[name](x.double().numpy(), 0.0) * (0.5 if weight else 1.0)
    for kernel, got in results(name, **norm_arguments(name, x, 0.0, weight)):
        assert close(got, want, dtype), f"{kernel}: {got[0, :3].tolist()}, not {want[0, :3].tolist()}"


@pytest.mark.parametrize("size", [1e-36, 1e-30, 1.0, 1e18])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_with_an_eps_hold_until_squares_leave_float32(dtype: torch.dtype, name: str, size: float) -> None:
    x = values_of(size, dtype, 3)
    for eps in (1e-30, 1e-12, 1e-5):
        want = NORMS[name](x.double().numpy(), eps)
        for kernel, got in results(name, **norm_arguments(name, x, eps, False)):
            assert close(got, want, dtype), f"{kernel}, eps {eps}: {got[0, :3].tolist()}, not {want[0, :3].tolist()}"


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_beyond_that_a_row_is_right_or_zero_or_not_a_number(dtype: torch.dtype, name: str) -> None:
    x = torch.cat((values_of(1.0, dtype, 1), values_of(1e20, dtype, 1)))
    want = NORMS[name](x.double().numpy(), 1e-6)
    for kernel, got in results(name, **norm_arguments(name, x, 1e-6, False)):
        assert close(got[0], want[0], dtype), kernel
        limit = bool((got[1].abs().nan_to_num(0.0, 0.0, 0.0) <= 1e-12).all())
        assert close(got[1], want[1], dtype) or limit, f"{kernel}: {got[1, :3].tolist()}"
        assert close(got[1], want[1], dtype) or "ref" not in kernel


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_norms_with_eps_zero(name: str) -> None:
    for kernel in [
        None,
        *taking(name, **norm_arguments(name, values_of(1e-30, torch.float32, 3).requires_grad_(), 0.0, True)),
    ]:
        x = values_of(1e-30, torch.float32, 3).requires_grad_()
        arguments = norm_arguments(name, x, 0.0, True)
        result = getattr(lz, name)(**arguments) if kernel is None else lz.run_kernel(kernel, **arguments)
        result = result[0] if isinstance(result, tuple) else result
        (grad,) = torch.autograd.grad(result[:, 0].sum(), x)
        exact = x.detach().double().requires_grad_()
        centred = exact - exact.mean(-1, keepdim=True) if name == "layer_norm" else exact
        normal = 0.5 * centred / centred.square().mean(-1, keepdim=True).sqrt()
        (want,) = torch.autograd.grad(normal[:, 0].sum(), exact)
        torch.testing.assert_close(grad.double() * 1e-30, want * 1e-30, rtol=1e-4, atol=1e-5, msg=str(kernel))


# --- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gelu_of_large_numbers(dtype: torch.dtype, approximate: str) -> None:
    x = torch.tensor([[60000.0, -60000.0, 100.0, -100.0, 0.0]], dtype=dtype)
    want = np.maximum(x.double().numpy(), 0.0)
    for kernel, got in results("gelu", input=x, approximate=approximate):
        assert close(got, want, dtype), f"{kernel}: {got.tolist()}"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_of_infinities_is_that_of_torch(dtype: torch.dtype) -> None:
    rows = [[-INF, -INF, -INF], [INF, 0.0, -INF], [INF, INF, 1.0], [-INF, 0.0, -INF]]
    x = torch.tensor(rows, dtype=dtype)
    want = [[NAN] * 3] * 3 + [[0.0, 1.0, 0.0]]
    for kernel, got in results("softmax", input=x):
        assert close(got, want, dtype), f"{kernel}: {got.tolist()}"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_below_the_smallest_normal_number_may_be_zero(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([[0.0, math.log(tiny) + 1.0, math.log(tiny) - 2.0, -10000.0]], dtype=dtype)
    want = x.double().softmax(-1)[0]
    for kernel, got in results("softmax", input=x):
        assert got[0, 0] == 1.0, kernel
        off = (got[0, 1:] - want[1:]).abs()
        assert bool((off <= 1.01 * tiny).all()), f"{kernel}: {got.tolist()}"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activations_of_infinities_are_their_limit_or_not_a_number(dtype: torch.dtype) -> None:
    x = torch.tensor([[INF, -INF, 1.0, -1.0]], dtype=dtype)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("gelu", {"input": x, "approximate": "none"}),
        ("gelu", {"input": x, "approximate": "tanh"}),
        ("silu_mul", {"gate": x, "up": torch.ones_like(x)}),
    ]
    for name, call in calls:
        for kernel, got in results(name, **call):
            plus, minus = got[0, 0].item(), got[0, 1].item()
            assert bool(got[0, 2:].isfinite().all()), kernel
            if "ref" in kernel:
                assert (plus, minus) == (INF, 0.0), kernel
            else:
                assert (plus == INF or math.isnan(plus)) and (minus == 0.0 or math.isnan(minus)), f"{kernel}: {got}"


# --- attention --------------------------------------------------------------------------------------------------------


def attention64(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> np.ndarray:
    """Attention by its definition, heads first."""
    q, k, v = (tensor.double().numpy() for tensor in (query, key, value))
    with np.errstate(invalid="ignore", over="ignore"):
        scores = scale * (q @ k.swapaxes(-1, -2))
        if causal:
            scores = np.where(np.tril(np.ones(scores.shape[-2:], dtype=bool)), scores, -INF)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        output: np.ndarray = weights / weights.sum(-1, keepdims=True) @ v
        return output


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1e-300, -1e-300, 1e-50, -1e-50, 1e-40, 1e-38, 2.0**-126, -(2.0**-126), 1e-30])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_with_a_scale_below_float32(dtype: torch.dtype, scale: float, causal: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 24, 16, generator=generator).to(dtype) for _ in range(3))
    want = attention64(q, k, v, scale, causal)
    for layout in ("BHSD", "BSHD"):
        tensors = {"query": q, "key": k, "value": v}
        if layout == "BSHD":
            tensors = {name: tensor.transpose(1, 2) for name, tensor in tensors.items()}
        for kernel, got in results("attention", **tensors, scale=scale, causal=causal, layout=layout):
            got = got.transpose(1, 2) if layout == "BSHD" else got
            assert close(got, want, dtype), f"{kernel} in {layout}: {got[0, 0, 0, :3].tolist()}"


@pytest.mark.parametrize("where", ["query", "key"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_infinite_score_gives_nan_or_in_half_precision_zeros(dtype: torch.dtype, causal: bool, where: str) -> None:
    tensors = {name: torch.ones(1, 1, 32, 16, dtype=dtype) for name in ("query", "key", "value")}
    tensors[where][0, 0, 5, 0] = INF
    want = attention64(*tensors.values(), 0.25, causal)
    broken = np.isnan(want).any(-1)[0, 0]
    assert broken.any()
    for kernel, got in results("attention", **tensors, causal=causal, layout="BHSD"):
        for row in range(32):
            found = got[0, 0, row]
            if not broken[row]:
                # What a query may not attend to may reach it where it is not finite, as the semantics say.
                reached = where == "key" and causal and bool(found.isnan().all())
                assert reached or close(found, np.ones(16), dtype), f"{kernel}, row {row}: {found[:3].tolist()}"
                continue
            # torch's flash kernel for the CPU gives zeros in half precision: the limit the contract names.
            zeros = dtype in HALF and bool((found == 0.0).all()) and ("sdpa.flash" in kernel or kernel == "chosen")
            assert bool(found.isnan().all()) or zeros, f"{kernel}, row {row}: {found[:3].tolist()}"


# --- quantization -----------------------------------------------------------------------------------------------------

INFINITE = [
    # numbers, scale, zero point of int8, values
    ([-INF, 1.0, 2.0, 3.0], 0, [0, 0, 0, 0]),
    ([INF, 1.0, -2.0, 3.0], -128, [0, -128, -128, -128]),
    ([INF, -INF, 1.0, -2.0], 0, [0, 0, 0, 0]),
    ([-INF, -INF, -INF, -INF], 0, [0, 0, 0, 0]),
    ([-INF, NAN, 1.0, NAN], 0, [0, 0, 0, 0]),
]


@pytest.mark.parametrize(("numbers", "zero_point", "values"), INFINITE)
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel", "blockwise"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_quantize_of_infinities(
    dtype: torch.dtype, granularity: str, numbers: list[float], zero_point: int, values: list[int]
) -> None:
    x = torch.tensor([numbers * 2, numbers * 2], dtype=dtype)
    kwargs: dict[str, Any] = {"granularity": granularity, "zero_point": True}
    if granularity == "blockwise":
        kwargs["group_size"] = 4
    seen = 0
    for kernel, (got, scales, zero_points) in everyone("quantize", input=x, dtype="int8", **kwargs):
        seen += 1
        assert got.tolist() == [values * 2] * 2, kernel
        assert bool(scales.isinf().all()) and bool((scales > 0.0).all()), kernel
        assert set(zero_points.flatten().tolist()) == {zero_point}, f"{kernel}: {zero_points.flatten().tolist()}"
    assert seen >= 3


# --- sampling ---------------------------------------------------------------------------------------------------------


def sampling_call(name: str, number: float, dtype: torch.dtype) -> dict[str, Any]:
    """A call in which the second of three sequences gets a number."""
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).to(torch.float32)
    if name == "speculative_verify":
        probs = torch.softmax(logits, -1)
        uniform = torch.full((3, 2), 0.5, dtype=dtype)
        uniform[1, 1] = number
        targets = probs[:, None].repeat(1, 2, 1)
        ids = torch.zeros(3, 1, dtype=torch.int64)
        return {"draft_ids": ids, "draft_probs": probs[:, None], "target_probs": targets, "uniform": uniform}
    uniform = torch.full((3,), 0.5, dtype=dtype)
    uniform[1] = number
    return {"logits": logits, "uniform": uniform, **({"k": 5} if name == "sample_topk" else {"p": 0.9})}


SAMPLING = ["sample_topk", "sample_topp", "speculative_verify"]


@pytest.mark.parametrize("number", [1.0, 1.5, -1e-9, -1.0, NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SAMPLING)
def test_a_uniform_number_outside_its_range_is_refused(name: str, dtype: torch.dtype, number: float) -> None:
    call = sampling_call(name, number, dtype)
    place = r"uniform\[1, 1\]" if name == "speculative_verify" else r"uniform\[1\]"
    for kernel in [None, *taking(name, **call)]:
        with pytest.raises(lz.InvalidCallError, match=f"{place} is .*expected a number from 0 to below 1") as caught:
            getattr(lz, name)(**call) if kernel is None else lz.run_kernel(kernel, **call)
        assert caught.value.code == "BAD_DATA", kernel


@pytest.mark.parametrize("name", SAMPLING)
def test_the_ends_of_the_range_are_accepted(name: str) -> None:
    for dtype, largest in ((torch.float32, 1.0 - 2.0**-24), (torch.float64, 1.0 - 2.0**-53)):
        for number in (0.0, -0.0, largest):
            drawn = [ids.tolist() for _, ids in results(name, **sampling_call(name, number, dtype))]
            assert all(ids == drawn[0] for ids in drawn), drawn
