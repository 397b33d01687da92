"""Gradients: of eager calls and of the operators, against autograd through float64 compositions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import layerzero as lz
import pytest
import torch
from gradients import assert_same, gradients, leaves, weighted_sum
from layerzero.integrations.torch_operators.torch_ops import call_traced
from torch import Tensor
from torch_cases import BY_ID, CASES, DIFFERENTIABLE, Case, as_tuple, assert_right, copied, doubled, expected


def traced(case: Case) -> Callable[..., Any]:
    """The call as a graph makes it."""
    return lambda *args, **kwargs: call_traced(case.function, args, kwargs)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.id)
def test_eager_gradients_agree_with_float64(case: Case) -> None:
    assert_same(gradients(case, case.call), gradients(case, case.reference, doubled))


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.id)
def test_operator_gradients_agree_with_float64(case: Case) -> None:
    assert_same(gradients(case, traced(case)), gradients(case, case.reference, doubled))


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.id)
def test_one_gradient_at_a_time(case: Case) -> None:
    everything = gradients(case, traced(case))
    for i in range(len(case.grads)):
        args, kwargs, wanted = leaves(case)
        for other in wanted[:i] + wanted[i + 1 :]:
            other.requires_grad_(False)
        grad = torch.autograd.grad(weighted_sum(as_tuple(traced(case)(*args, **kwargs))), wanted[i])
        assert_same(grad, everything[i : i + 1])


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.id)
def test_results_belong_to_the_graph_only_while_gradients_are_recorded(case: Case) -> None:
    for function in (case.call, traced(case)):
        args, kwargs, _ = leaves(case)
        assert all(result.requires_grad for result in as_tuple(function(*args, **kwargs)))
        with torch.no_grad():
            assert not any(result.requires_grad for result in as_tuple(function(*args, **kwargs)))
        with torch.inference_mode():
            assert all(result.is_inference() for result in as_tuple(function(*args, **kwargs)))


@pytest.mark.parametrize("case", [case for case in CASES if not case.updates], ids=lambda case: case.id)
def test_no_gradient_wanted_none_recorded(case: Case) -> None:
    args, kwargs = copied(case.make(5))
    for function in (case.call, traced(case)):
        assert not any(result.requires_grad for result in as_tuple(function(*args, **kwargs)))


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.id)
def test_a_second_derivative_is_refused_in_one_sentence(case: Case) -> None:
    args, kwargs, wanted = leaves(case)
    loss = weighted_sum(as_tuple(traced(case)(*args, **kwargs)))
    first = torch.autograd.grad(loss, wanted, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"layerzero.{case.function} has no second derivative"):
        torch.autograd.grad([grad.square().sum() for grad in first], wanted)


def test_a_first_derivative_with_create_graph_is_right() -> None:
    case = BY_ID["gelu"]
    args, _, wanted = leaves(case)
    grad = torch.autograd.grad(weighted_sum((traced(case)(*args),)), wanted, create_graph=True)
    assert_same(grad, gradients(case, case.reference, doubled))


def test_parameters_collect_gradients() -> None:
    weight = torch.nn.Parameter(torch.randn(24, 16))
    rows = torch.randn(3, 16)
    for call in (lz.linear, lambda *args: call_traced("linear", args, {})):
        weight.grad = None
        call(rows, weight).sum().backward()
        torch.testing.assert_close(weight.grad, rows.sum(0).expand(24, 16))


@pytest.mark.parametrize("name", ["paged_attention", "mla_attention", "dequantize"])
def test_without_a_kernel_that_has_a_backward_the_error_says_so(name: str) -> None:
    case = BY_ID[name]
    args, kwargs = copied(case.make(5))
    at = 1 if name == "dequantize" else 0
    args[at].requires_grad_()
    with pytest.raises(lz.NoKernelFoundError, match="AUTOGRAD_UNSUPPORTED"):
        case.call(*args, **kwargs)
    result = traced(case)(*args, **kwargs)
    with pytest.raises(lz.NoKernelFoundError, match="AUTOGRAD_UNSUPPORTED"):
        result.sum().backward()


@pytest.mark.parametrize("name", ["sample_topk", "sample_topp", "speculative_verify", "quantize"])
def test_what_is_not_differentiable_gives_no_gradient(name: str) -> None:
    case = BY_ID[name]
    args, kwargs = copied(case.make(5))
    for arg in args:
        if isinstance(arg, Tensor) and arg.is_floating_point():
            arg.requires_grad_()
    for function in (case.call, traced(case)):
        assert not any(result.requires_grad for result in as_tuple(function(*args, **kwargs)))


def test_what_is_kept_in_a_cache_is_data() -> None:
    # A cache that joined the graph would keep every step of a generation alive.
    case = BY_ID["kv_append"]
    for function in (traced(case), case.call):
        args, kwargs = copied(case.make(5))
        args[0].requires_grad_()
        args[1].requires_grad_()
        function(*args, **kwargs)
        caches = [args[at] for at in case.updates]
        assert not any(cache.requires_grad for cache in caches)
        assert_right(tuple(caches), expected(case))


def test_updates_in_place_work_in_inference_mode() -> None:
    case = BY_ID["kv_append"]
    with torch.inference_mode():
        args, _ = copied(case.make(5))
        traced(case)(*args)
    torch.testing.assert_close(args[2], case.reference(*case.make(5)[0])[0])


@pytest.mark.parametrize("seed", [None, 7])
def test_the_backward_drops_what_the_forward_dropped(seed: int | None) -> None:
    # The result is linear in value: whatever the weights, <grad(value), value> is <weights, result>. Weights that were
    # dropped otherwise in the backward would break that.
    query, key, value = BY_ID["attention"].make(9)[0]
    value.requires_grad_()
    for call in (lz.attention, lambda *args, **kwargs: call_traced("attention", args, kwargs)):
        result = call(query, key, value, dropout_p=0.5, seed=seed)
        loss = weighted_sum((result,))
        (grad,) = torch.autograd.grad(loss, value)
        torch.testing.assert_close((grad * value).sum().double(), loss, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(result, lz.attention(query, key, value))


def test_dropout_follows_torchs_generator() -> None:
    query, key, value = BY_ID["attention"].make(9)[0]
    query.requires_grad_()

    def drawn() -> Tensor:
        torch.manual_seed(3)
        result: Tensor = call_traced("attention", (query, key, value), {"dropout_p": 0.5})
        return result.detach()

    first = drawn()
    assert torch.equal(drawn(), first)
    assert not torch.equal(call_traced("attention", (query, key, value), {"dropout_p": 0.5}), first)


def test_gradients_of_transposed_views() -> None:
    made = [tensor.requires_grad_() for tensor in BY_ID["attention"].make(5)[0]]
    views = [tensor.transpose(1, 2) for tensor in made]
    grads = torch.autograd.grad(
        weighted_sum((call_traced("attention", tuple(views), {"layout": "BHSD"}).transpose(1, 2),)), made
    )
    assert_same(grads, gradients(BY_ID["attention"], BY_ID["attention"].reference, doubled))


def test_activation_checkpointing() -> None:
    case = BY_ID["fused_mlp"]
    from torch.utils.checkpoint import checkpoint

    got = gradients(case, lambda *args: checkpoint(traced(case), *args, use_reentrant=False))
    assert_same(got, gradients(case, case.reference, doubled))


def test_gradients_of_slopes() -> None:
    query, key, value = BY_ID["attention"].make(5)[0]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], requires_grad=True)
    result = call_traced("attention", (query, key, value), {"alibi_slopes": slopes})
    wanted = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64, requires_grad=True)
    reference = BY_ID["attention"].reference(*map(doubled, (query, key, value)), alibi_slopes=wanted)
    (grad,) = torch.autograd.grad(weighted_sum((result,)), slopes)
    assert_same((grad,), torch.autograd.grad(weighted_sum((reference,)), wanted))


@contextmanager
def registered(function: Callable[..., Any], operation: str, **capabilities: Any) -> Iterator[None]:
    """A kernel that is preferred to all others for a while."""
    options: dict[str, Any] = {"platform": "cpu", "supported_dtypes": ["float32"], "priority": 100, **capabilities}
    lz.register_kernel(operation=operation, kernel_id="test.kernel", **options)(function)
    try:
        yield
    finally:
        lz.unregister_kernel("test.kernel")


@pytest.mark.parametrize("seed", [None, 7])
def test_a_kernel_without_a_backward_does_not_drop_in_its_own_way(seed: int | None) -> None:
    query, key, value = BY_ID["attention"].make(9)[0]
    value.requires_grad_()
    calls = []

    def other(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, seed: int) -> Tensor:
        calls.append(seed)
        return torch.zeros_like(query)

    with registered(other, "attention", deterministic=True):
        call_traced("attention", (query.detach(), key, value.detach()), {"dropout_p": 0.5, "seed": 1})
        assert calls == [1]
        result = call_traced("attention", (query, key, value), {"dropout_p": 0.5, "seed": seed})
        loss = weighted_sum((result,))
        (grad,) = torch.autograd.grad(loss, value)
        assert calls == [1]
    torch.testing.assert_close((grad * value).sum().double(), loss, rtol=1e-4, atol=1e-4)


def test_without_dropout_the_forward_may_take_the_fastest_kernel() -> None:
    rows = torch.randn(3, 16, requires_grad=True)
    with registered(lambda input: torch.zeros_like(input), "gelu"):
        result = call_traced("gelu", (rows,), {})
        assert not result.any()
        (grad,) = torch.autograd.grad(result.sum(), rows)
    exact = rows.detach().double().requires_grad_()
    assert_same((grad,), torch.autograd.grad(BY_ID["gelu"].reference(exact).sum(), exact))


def test_a_kernel_without_a_gradient_for_an_argument_is_told_of() -> None:
    rows, weight = torch.randn(3, 16, requires_grad=True), torch.randn(24, 16, requires_grad=True)

    def forgetful(input: Tensor, weight: Tensor) -> Tensor:
        return input @ weight.detach().T

    with registered(forgetful, "linear", autograd=True):
        result = call_traced("linear", (rows, weight), {})
        with pytest.raises(
            lz.LayerZeroError, match="linear: the kernel chosen gives no gradient with respect to 'weight'"
        ):
            torch.autograd.grad(result.sum(), [rows, weight])
        result = call_traced("linear", (rows.detach(), weight), {})
        with pytest.raises(lz.LayerZeroError, match="with respect to 'weight'"):
            torch.autograd.grad(result.sum(), weight)


def test_a_kernel_that_gives_its_argument_back_shares_nothing() -> None:
    rows = torch.randn(3, 16)
    with registered(lambda input: input, "gelu"):
        result = torch.ops.layerzero.gelu(rows)
        torch.library.opcheck(torch.ops.layerzero.gelu, (rows,))
    assert torch.equal(result, rows)
    assert result.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()


def test_a_gradient_that_is_passed_on_shares_nothing() -> None:
    # The gradient of a residual is that of the sum itself.
    rows = [torch.randn(3, 16, requires_grad=True) for _ in range(2)]
    grads = [torch.ones(3, 16), torch.ones(3, 16)]
    first, second = torch.ops.layerzero.fused_add_rms_norm_backward(*grads, [True, True, False], *rows)
    given = {tensor.untyped_storage().data_ptr() for tensor in (*rows, *grads)}
    assert len(given | {first.untyped_storage().data_ptr(), second.untyped_storage().data_ptr()}) == len(given) + 2


def test_updates_in_place_are_seen_by_autograd() -> None:
    case = BY_ID["kv_append"]
    args, _ = copied(case.make(5))
    factor = torch.ones((), requires_grad=True)
    product = (factor * args[2]).sum()

    def unseen(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        # As a library's kernel writes: torch knows nothing of it.
        key_cache.data.zero_()

    with registered(unseen, "kv_append", layouts=["NHD"]):
        traced(case)(*args)
    assert not args[2].any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
