# mypy: allow-untyped-calls
"""`torch.vmap` and `torch.func` of the public functions: equal to loops, to float64, or refused in a sentence."""

import warnings
from typing import Any

import layerzero as lz
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch_cases import BY_ID, CASES, DIFFERENTIABLE, IDS, Case, as_tuple, assert_right, copied, doubled


def stacked(case: Case, sizes: int = 3) -> list[tuple[Any, ...]]:
    """Positional arguments of several calls of one size. Only those by position can be batched."""
    args, _ = case.make(5)
    calls = []
    for i in range(sizes):
        generator = torch.Generator().manual_seed(i)
        calls.append(
            tuple(
                torch.randn(arg.shape, generator=generator)
                if isinstance(arg, Tensor) and arg.is_floating_point()
                else arg
                for arg in args
            )
        )
    return calls


def batched(calls: list[tuple[Any, ...]], axis: int = 0) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
    """The calls as one, float tensors along a batch axis; and the axes."""
    args, axes = [], []
    for values in zip(*calls, strict=True):
        many = isinstance(values[0], Tensor) and values[0].is_floating_point()
        args.append(torch.stack(values, axis) if many else values[0])
        axes.append(axis if many else None)
    return tuple(args), tuple(axes)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_vmap_equals_a_loop(case: Case) -> None:
    calls, kwargs = stacked(case), case.make(5)[1]
    args, axes = batched(calls)
    looped = []
    for call in calls:
        own, _ = copied((call, {}))
        looped.append((*as_tuple(case.call(*own, **kwargs)), *(own[at] for at in case.updates)))
    out_dims = None if case.updates else 0
    mapped = as_tuple(torch.vmap(lambda *args: case.call(*args, **kwargs), axes, out_dims)(*args))
    got = (*mapped, *(args[at] for at in case.updates))
    assert_right(got, tuple(torch.stack(results).double() for results in zip(*looped, strict=True)))


@pytest.mark.parametrize("case", [case for case in CASES if not case.updates], ids=lambda case: case.id)
def test_vmap_of_the_first_argument_along_its_last_axis(case: Case) -> None:
    calls, kwargs = stacked(case), case.make(5)[1]
    at = next(i for i, arg in enumerate(calls[0]) if isinstance(arg, Tensor) and arg.is_floating_point())
    first = torch.stack([call[at] for call in calls], -1)
    axes = tuple(-1 if i == at else None for i in range(len(calls[0])))
    args = (*calls[0][:at], first, *calls[0][at + 1 :])
    mapped = as_tuple(torch.vmap(lambda *args: case.call(*args, **kwargs), in_dims=axes)(*args))
    looped = [as_tuple(case.call(*(*calls[0][:at], call[at], *calls[0][at + 1 :]), **kwargs)) for call in calls]
    assert_right(mapped, tuple(torch.stack(results).double() for results in zip(*looped, strict=True)))


def test_vmap_of_a_tensor_given_by_name() -> None:
    rows, weights = torch.randn(2, 16), torch.randn(3, 16)
    mapped = torch.vmap(lambda weight: lz.rms_norm(rows, weight=weight))(weights)
    assert_right((mapped,), (torch.stack([lz.rms_norm(rows, weight) for weight in weights]).double(),))


def test_nested_vmap() -> None:
    many = torch.randn(2, 3, 4, 16)
    weight = torch.randn(16)
    for call in (lambda x: lz.rms_norm(x, weight), lambda x: lz.layer_norm(x, None, weight)):
        assert_right((torch.vmap(torch.vmap(call))(many),), (call(many).double(),))


def test_rows_are_folded_into_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    weight = torch.randn(24, 16)
    with Watch():
        torch.vmap(lambda x: lz.linear(x, weight))(torch.randn(50, 2, 16))
    assert seen.count("layerzero.linear.default") == 1


def test_vmap_over_an_update_of_a_shared_cache_is_refused() -> None:
    key, value, key_cache, value_cache, slots = BY_ID["kv_append"].make(5)[0]
    many = torch.stack([key, key])
    with pytest.raises(lz.LayerZeroError, match="key_cache.*must be batched"):
        torch.vmap(lambda k: lz.kv_append(k, value, key_cache, value_cache, slots))(many)


def test_vmap_over_nothing() -> None:
    assert torch.vmap(lz.gelu)(torch.empty(0, 3, 16)).shape == (0, 3, 16)
    with pytest.raises(lz.LayerZeroError, match="there is none to tell"):
        torch.vmap(lambda slopes: lz.alibi_bias(slopes, 3, 4))(torch.empty(0, 2))


def test_vmap_draws_as_it_is_told_to() -> None:
    logits = torch.zeros(4, 64, 50)
    draw = lambda x: lz.sample_topk(x, 50)
    with pytest.raises(lz.LayerZeroError, match="randomness='error'"):
        torch.vmap(draw)(logits)
    same = torch.vmap(draw, randomness="same")(logits)
    assert (same == same[0]).all()
    different = torch.vmap(draw, randomness="different")(logits)
    assert not (different == different[0]).all()
    seeded = torch.vmap(lambda x: lz.sample_topk(x, 50, seed=3))(logits)
    assert_right((seeded,), (torch.stack([lz.sample_topk(x, 50, seed=3) for x in logits]),))


def loss_of(case: Case, function: Any, kwargs: dict[str, Any]) -> Any:
    """A scalar function of the positional arguments."""

    def loss(*args: Any) -> Tensor:
        return torch.stack([(result * result).sum() for result in as_tuple(function(*args, **kwargs))]).sum()

    return loss


BY_POSITION = [case for case in DIFFERENTIABLE if all(isinstance(at, int) for at in case.grads)]


def places(case: Case) -> tuple[int, ...]:
    """Where the tensors stand that gradients are checked for."""
    return tuple(at for at in case.grads if isinstance(at, int))


@pytest.mark.parametrize("case", BY_POSITION, ids=lambda case: case.id)
def test_func_grad_agrees_with_float64(case: Case) -> None:
    args, kwargs = case.make(5)
    got = torch.func.grad(loss_of(case, case.call, kwargs), argnums=places(case))(*args)
    exact = {name: doubled(value) for name, value in kwargs.items()}
    wanted = torch.func.grad(loss_of(case, case.reference, exact), argnums=places(case))(*map(doubled, args))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", BY_POSITION, ids=lambda case: case.id)
def test_gradients_per_sample(case: Case) -> None:
    calls, kwargs = stacked(case), case.make(5)[1]
    grad = torch.func.grad(loss_of(case, case.call, kwargs), argnums=places(case))
    args, axes = batched(calls)
    mapped = torch.vmap(grad, in_dims=axes)(*args)
    for i, call in enumerate(calls):
        for a, b in zip(mapped, grad(*call), strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-4, atol=1e-4)


def test_gradient_of_a_vmap() -> None:
    rows = torch.randn(3, 2, 16)
    got = torch.func.grad(lambda x: torch.vmap(lz.gelu)(x).sum())(rows)
    wanted = torch.func.grad(lambda x: torch.nn.functional.gelu(x).sum())(rows.double())
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_jacobian_in_reverse_mode() -> None:
    row = torch.randn(6)
    got = torch.func.jacrev(lz.rms_norm)(row)
    wanted = torch.func.jacrev(BY_ID["rms_norm"].reference)(row.double())
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_vjp_inside_ordinary_autograd() -> None:
    rows = torch.randn(3, 16, requires_grad=True)
    weight = torch.randn(24, 16, requires_grad=True)
    result, pull, *_ = torch.func.vjp(lambda x: lz.linear(x, weight), rows)
    (grad,) = pull(torch.ones_like(result))
    torch.testing.assert_close(grad, weight.sum(0).expand(3, 16))
    result.sum().backward()
    torch.testing.assert_close(weight.grad, rows.sum(0).expand(24, 16))


FORWARD_MODE = "layerzero.gelu has no forward-mode derivative"


def test_jvp_is_refused_in_one_sentence() -> None:
    rows = torch.randn(3, 16)
    with pytest.raises(NotImplementedError, match=FORWARD_MODE):
        torch.func.jvp(lz.gelu, (rows,), (rows,))
    with pytest.raises(NotImplementedError, match=FORWARD_MODE):
        torch.func.jacfwd(lz.gelu)(rows)


def test_dual_numbers_are_refused_by_the_operator() -> None:
    rows = torch.randn(3, 16)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=FORWARD_MODE):
        torch.ops.layerzero.gelu(forward_ad.make_dual(rows, rows))


def test_a_second_derivative_is_refused_in_one_sentence() -> None:
    rows = torch.randn(3, 16)
    grad = torch.func.grad(lambda x: lz.gelu(x).sum())
    with pytest.raises(NotImplementedError, match="layerzero.gelu has no second derivative"):
        torch.func.grad(lambda x: grad(x).square().sum())(rows)
    with pytest.raises(NotImplementedError, match="layerzero.gelu has no"):
        torch.func.hessian(lambda x: lz.gelu(x).sum())(rows)


def test_functionalize() -> None:
    case = BY_ID["kv_append"]
    args, _ = copied(case.make(5))

    def append(*args: Tensor) -> Tensor:
        lz.kv_append(*args)
        return args[2] * 1.0

    # A tensor that torch wrapped has no memory of its own: a native kernel is passed over, which is no failure of it.
    with warnings.catch_warnings():
        warnings.simplefilter("error", lz.LayerZeroWarning)
        got = torch.func.functionalize(append)(*args)
    torch.testing.assert_close(got, case.reference(*case.make(5)[0])[0])


def test_functional_call_of_a_module() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(24, 16))

        def forward(self, rows: Tensor) -> Tensor:
            return lz.linear(rows, self.weight)

    layer, rows = Layer(), torch.randn(3, 16)
    weights = {"weight": torch.randn(24, 16)}
    grads = torch.func.grad(lambda w: torch.func.functional_call(layer, w, rows).sum())(weights)
    torch.testing.assert_close(grads["weight"], rows.sum(0).expand(24, 16))
