"""What a call writes to: caches, `out=`, and inputs that a kernel must leave alone. A call that cannot be served says so
with a typed error, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
from faults.states import fresh
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

X = torch.linspace(-2.0, 2.0, 64).reshape(4, 16)
SLOTS = torch.tensor([1, 5])
RMS: dict[str, Any] = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Nothing of one test is left for the next, and the caller's mistakes lower nobody's health."""
    fresh()
    yield
    fresh()


def rows(seed: int = 0) -> Tensor:
    """Two new tokens."""
    return torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(seed))


def cache() -> Tensor:
    """Three pages of four slots."""
    return torch.zeros(3, 4, 2, 8)


def _parts(shared: Tensor) -> dict[str, Tensor]:
    return {"key": rows(1), "value": rows(2), "key_cache": shared, "value_cache": shared}


def _same() -> dict[str, Tensor]:
    return _parts(cache())


def _partly() -> dict[str, Tensor]:
    memory = torch.zeros(200)
    return {**_parts(cache()), "key_cache": memory[:192].view(3, 4, 2, 8), "value_cache": memory[8:].view(3, 4, 2, 8)}


def _expanded() -> dict[str, Tensor]:
    return {**_parts(cache()), "key_cache": torch.zeros(1, 4, 2, 8).expand(3, 4, 2, 8), "value_cache": cache()}


def _woven() -> dict[str, Tensor]:
    memory = torch.zeros(300)
    return {**_parts(cache()), "key_cache": cache(), "value_cache": memory.as_strided((3, 4, 2, 8), (40, 16, 8, 1))}


def _key_inside() -> dict[str, Tensor]:
    caches = cache()
    return {**_parts(caches), "key": caches[0, :2], "value_cache": cache()}


def _value_inside() -> dict[str, Tensor]:
    caches = cache()
    return {**_parts(caches), "value": caches[2, 2:], "key_cache": cache()}


def _leaf() -> dict[str, Tensor]:
    return {**_parts(cache()), "key_cache": cache().requires_grad_(), "value_cache": cache()}


def _derived() -> dict[str, Tensor]:
    return {**_parts(cache()), "key_cache": cache(), "value_cache": cache().requires_grad_() * 1}


WRONG: dict[str, tuple[Callable[[], dict[str, Tensor]], str]] = {
    "one cache twice": (_same, "SHARED_MEMORY"),
    "partly one": (_partly, "SHARED_MEMORY"),
    "expanded": (_expanded, "SHARED_MEMORY"),
    "as_strided": (_woven, "SHARED_MEMORY"),
    "key in its cache": (_key_inside, "SHARED_MEMORY"),
    "value in its cache": (_value_inside, "SHARED_MEMORY"),
    "leaf": (_leaf, "REQUIRES_GRAD"),
    "derived": (_derived, "REQUIRES_GRAD"),
}
DOORS: dict[str, Callable[..., Any]] = {
    "function": lz.kv_append,
    "operator": lambda key, value, key_cache, value_cache, slots: torch.ops.layerzero.kv_append(
        key, value, key_cache, value_cache, slots
    ),
    "by name": lambda *args: lz.run_kernel("torch.kv_append", *args),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_cache_that_cannot_be_written_to_is_refused_before_anything_is_written(wrong: str, door: str) -> None:
    make, code = WRONG[wrong]
    for _ in range(30):
        # A good call of the same sizes in between, so that the wrong one meets what was remembered.
        DOORS[door](rows(1), rows(2), cache(), cache(), SLOTS)
        given = make()
        before = {name: tensor.detach().clone() for name, tensor in given.items()}
        with pytest.raises(lz.InvalidCallError) as caught:
            DOORS[door](given["key"], given["value"], given["key_cache"], given["value_cache"], SLOTS)
        assert caught.value.code == code and caught.value.hint
        assert all(torch.equal(given[name], before[name]) for name in given), "nothing is written"
    health = lz.health()
    assert health.level == "full" and health.score == 100.0
    assert all(b["state"] == "closed" and b["failures"] == 0 for b in health.breakers)


def test_the_halves_of_one_cache_are_written_to() -> None:
    """Interleaved page by page, or slot by slot: they lie in one range and share nothing."""
    for memory, halves in (
        (torch.zeros(3, 2, 4, 2, 8), lambda m: m.unbind(1)),
        (torch.zeros(3, 4, 2, 2, 8), lambda m: m.unbind(2)),
        (torch.zeros(2, 3, 4, 2, 8), lambda m: m.unbind(0)),
        (torch.zeros(3, 4, 2, 16), lambda m: m.split(8, -1)),
    ):
        key_cache, value_cache = halves(memory)
        for _ in range(3):
            lz.kv_append(rows(1), rows(2), key_cache, value_cache, SLOTS)
        for part, new in ((key_cache, rows(1)), (value_cache, rows(2))):
            wanted = cache()
            wanted[0, 1], wanted[1, 1] = new
            assert torch.equal(part, wanted)


def test_a_cache_that_requires_gradients_is_written_to_where_none_are_recorded() -> None:
    caches = cache().requires_grad_(), cache().requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            lz.kv_append(rows(1), rows(2), *caches, SLOTS)
    assert torch.equal(caches[0][0, 1], rows(1)[0])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_two_views_of_one_memory_are_refused_exactly_when_they_share_an_element(data: st.DataObject) -> None:
    memory = torch.arange(400, dtype=torch.float32)
    sizes = (2, data.draw(st.integers(1, 3)), 1, data.draw(st.integers(1, 3)))
    inner = data.draw(st.integers(1, 3))
    middle = data.draw(st.integers(sizes[3] * inner, sizes[3] * inner + 3))
    strides = (data.draw(st.integers(sizes[1] * middle, sizes[1] * middle + 6)), middle, 1, inner)
    places = [data.draw(st.integers(0, 20)) for _ in range(2)]
    views = [memory.clone().as_strided(sizes, strides, place) for place in places]
    shares = bool(set(views[0].flatten().tolist()) & set(views[1].flatten().tolist()))
    together = torch.zeros(400)
    caches = [together.as_strided(sizes, strides, place) for place in places]
    new = torch.ones(1, 1, sizes[3]), torch.full((1, 1, sizes[3]), 2.0)
    slot = torch.tensor([0])
    if shares:
        with pytest.raises(lz.InvalidCallError, match="SHARED_MEMORY"):
            lz.kv_append(*new, *caches, slot)
        assert not together.any()
    else:
        lz.kv_append(*new, *caches, slot)
        assert (caches[0][0, 0] == 1).all() and (caches[1][0, 0] == 2).all()
        assert together.sum() == 3 * sizes[3]


# --- out --------------------------------------------------------------------------------------------------------------


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.empty(4, 16)


OUTS: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.empty(1, 16).expand(4, 16),
    "overlapping": lambda: torch.empty(200).as_strided((4, 16), (8, 1)),
    "leaf": lambda: torch.empty(4, 16, requires_grad=True),
    "inference": _inference,
    "shape": lambda: torch.empty(4, 15),
    "dtype": lambda: torch.empty(4, 16, dtype=torch.float64),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("out", OUTS)
def test_an_out_that_cannot_be_written_to_is_a_typed_error(out: str, traced: bool) -> None:
    from layerzero.integrations.torch_operators.torch_ops import call_traced

    if (out, traced) == ("overlapping", True):
        pytest.skip("torch copies into it without a word")
    with pytest.raises(lz.InvalidCallError) as caught:
        if traced:
            call_traced("gelu", (X,), {"out": OUTS[out]()})
        else:
            lz.gelu(X, out=OUTS[out]())
    assert caught.value.code == "WRONG_OUT" and caught.value.hint


def test_an_out_may_overlap_an_input() -> None:
    """The result is there before it is written."""
    wanted = torch.nn.functional.gelu(X.double())
    x = X.clone()
    assert lz.gelu(x, out=x) is x
    torch.testing.assert_close(x.double(), wanted, rtol=1e-5, atol=1e-6)
    memory = torch.zeros(72)
    memory[:64] = X.flatten()
    got = lz.gelu(memory[:64].view(4, 16), out=memory[8:].view(4, 16))
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)


# --- inputs -----------------------------------------------------------------------------------------------------------


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@pytest.mark.parametrize("warm", [0, 3])
def test_a_kernel_that_changed_its_input_and_failed_is_followed_by_nobody(warm: int) -> None:
    """Another kernel would answer for data the caller never passed."""
    calls: list[int] = []

    def spoiling(input: Tensor, eps: float) -> Tensor:
        calls.append(1)
        if len(calls) <= warm:
            return _normed(input, eps)
        input.mul_(3).add_(1)
        raise RuntimeError("out of breath")

    lz.register_kernel(kernel_id="spoiling.norm", priority=99, autograd=True, **RMS)(spoiling)
    try:
        for _ in range(warm):
            lz.rms_norm(X)
        # What is counted of a kernel outlives it.
        since, failures = len(calls), lz.health().kernels.get("spoiling.norm", {}).get("failures", 0)
        for _ in range(3):
            x = X.clone()
            with pytest.raises(lz.InputModifiedError, match="'input'.*out of breath") as caught:
                lz.rms_norm(x)
            assert caught.value.failures.keys() == {"spoiling.norm"} and "copy" in caught.value.hint
            assert isinstance(caught.value.__cause__, RuntimeError)
        assert len(calls) == since + 3
        assert lz.health().kernels["spoiling.norm"]["failures"] == failures + 3
    finally:
        lz.unregister_kernel("spoiling.norm")


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
def test_a_kernel_that_fails_and_leaves_its_input_alone_is_followed_by_another() -> None:
    def failing(input: Tensor, eps: float) -> Tensor:
        input.clone().mul_(3)
        raise RuntimeError("out of breath")

    lz.register_kernel(kernel_id="honest.norm", priority=99, **RMS)(failing)
    try:
        for _ in range(3):
            torch.testing.assert_close(lz.rms_norm(X), _normed(X, 1e-6))
    finally:
        lz.unregister_kernel("honest.norm")


# --- errors that torch would raise --------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [lz.gelu, lz.rms_norm, lambda x: lz.linear(x, torch.ones(8, 16))])
def test_derivatives_that_do_not_exist_are_typed_errors(function: Callable[..., Tensor]) -> None:
    for derive in (
        lambda: torch.func.jvp(function, (X,), (X,)),
        lambda: torch.func.jacfwd(function)(X),
        lambda: torch.func.hessian(lambda x: function(x).sum())(X),
        lambda: torch.func.grad(lambda x: torch.func.grad(lambda y: function(y).square().sum())(x).sum())(X),
    ):
        with pytest.raises(lz.UnsupportedDerivativeError, match="no (forward-mode|second) derivative") as caught:
            derive()
        assert isinstance(caught.value, NotImplementedError) and caught.value.hint


def _mixed() -> Iterator[tuple[str, Callable[[], Any]]]:
    mode = FakeTensorMode()
    fake, real, weight = mode.from_tensor(X), X, torch.ones(8, 16)

    def inside() -> Any:
        with mode:
            return lz.linear(real, weight)

    yield "fake and real", lambda: lz.linear(fake, weight)
    yield "real and fake", lambda: lz.linear(real, mode.from_tensor(weight))
    yield "real in a mode", inside
    yield "two modes", lambda: lz.linear(fake, FakeTensorMode().from_tensor(weight))


@pytest.mark.parametrize("name", [name for name, _ in _mixed()])
def test_fake_and_real_tensors_in_one_call_are_a_typed_error(name: str) -> None:
    with pytest.raises(lz.InvalidCallError) as caught:
        dict(_mixed())[name]()
    assert caught.value.code == "MIXED_FAKE_TENSORS" and "FakeTensorMode" in caught.value.hint


def test_fake_tensors_of_one_mode_are_served() -> None:
    mode = FakeTensorMode()
    assert lz.linear(mode.from_tensor(X), mode.from_tensor(torch.ones(8, 16))).shape == (4, 8)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert lz.linear(mode.from_tensor(X), torch.ones(8, 16)).shape == (4, 8)
