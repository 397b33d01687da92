"""Plans that cannot be followed, or cannot learn: the model runs all the same. And copies of plans."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
from faults.states import fresh
from layerzero import _native, control
from torch import Tensor, nn

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


class Norm(nn.Module):
    """One call of LayerZero's, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """A norm."""
        return lz.rms_norm(x) * self.scale


@pytest.fixture(autouse=True)
def two_kernels() -> Iterator[None]:
    """Two kernels whose results tell them apart, the first preferred."""
    given = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}

    @lz.register_kernel(kernel_id="one.norm", priority=60, **given)
    def one(input: Tensor, eps: float) -> Tensor:
        return input + 1.0

    @lz.register_kernel(kernel_id="two.norm", priority=55, **given)
    def two(input: Tensor, eps: float) -> Tensor:
        return input + 2.0

    fresh()
    yield
    assert control.frames() == (), "everybody has left"
    fresh()
    for kernel in ("one.norm", "two.norm"):
        lz.unregister_kernel(kernel)


def plan_of_two(*inputs: Any) -> lz.Plan:
    """A plan that decided for the second kernel, which is not what is selected without it."""
    with lz.prefer("two"):
        return lz.decide(Norm().requires_grad_(False), *(inputs or (X,)))


def by(result: Tensor, x: Tensor = X) -> str:
    """Who served, by what it gave."""
    return {1.0: "one", 2.0: "two"}[round((result - x).mean().item(), 4)]


# --- any number of them ---------------------------------------------------------------------------------------------------


def test_a_plan_is_followed_inside_of_any_number_of_blocks() -> None:
    found = plan_of_two()
    for size in range(1500):
        with control.Context(memory_headroom_mb=size):
            assert size % 100 or by(found(X)) == "two"
    assert by(found(X)) == "two"


def test_what_plans_around_left_is_bounded() -> None:
    inner = plan_of_two()
    for _ in range(80):
        assert by(lz.decide(lambda x: inner(x), X)(X)) == "two"
    assert len(inner._now[1]) <= 64


# --- learning that fails --------------------------------------------------------------------------------------------------


def test_a_result_is_not_lost_when_learning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unable:
        def learned(self, onto: _native.Plan) -> None:
            raise lz.ConfigurationError("nothing can be decided now", code="ANY", hint="wait")

    learning = lz.decide(Norm())
    with monkeypatch.context() as broken:
        frame = learning._frame(())._replace(plan=Unable())
        broken.setattr(lz.Plan, "_frame", lambda *_: frame)
        with pytest.warns(lz.LayerZeroWarning, match=r"plan of Norm could not .* nothing can be decided now"):
            assert by(learning(X)) == "one"
        with pytest.warns(lz.LayerZeroWarning, match="nothing can be decided now"), learning.inside():
            pass
    assert learning.decisions == []
    assert by(learning(X)) == "one"


# --- copies ---------------------------------------------------------------------------------------------------------------


def test_a_deep_copy_is_a_plan_of_the_copied_model() -> None:
    found = plan_of_two()
    copied = copy.deepcopy(found)
    assert copied.model is not found.model and isinstance(copied.model, Norm)
    assert copied.decisions == found.decisions and str(copied) == str(found)
    copied.model.scale.fill_(0.5)
    assert by(found(X)) == "two" and torch.equal(copied(X), (X + 2.0) * 0.5)
    # As a part of a model, together with a model that is also elsewhere in it, and of a model that knows its plan.
    whole = nn.Module()
    whole.part, whole.plan = found.model, found
    twice = copy.deepcopy(whole)
    assert twice.plan.model is twice.part and by(twice.plan(X)) == "two"
    object.__setattr__(found.model, "plan", found)
    again = copy.deepcopy(found)
    assert again.model.plan is again and by(again(X)) == "two"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_learns_for_itself(copied: Any) -> None:
    first = lz.decide(Norm())
    first(X)
    second = copied(first)
    assert second.decisions == first.decisions and (second.model is first.model) == (copied is copy.copy)
    wide, wider = torch.zeros(4, 64), torch.zeros(4, 128)
    with lz.prefer("two"):
        assert by(second(wide), wide) == "two"
    assert by(first(wide), wide) == "one" and by(second(wide), wide) == "two"
    for learning in (first, second):
        learning(wider)
    assert (len(first.decisions), len(second.decisions)) == (3, 3)
    assert [decision.kernel_id for decision in first.decisions].count("one.norm") == 3
