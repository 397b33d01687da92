"""What a compiled model keeps: its model's state, weights that change, files, precision."""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path

import layerzero as lz
import pytest
import torch
from compiling import layer, silent
from layerzero import checks
from layerzero.errors import LayerZeroWarning
from torch import Tensor, nn

# What is told changes nothing.


class Counting(nn.Module):
    """Changes a buffer and its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        self.seen.add_(1)
        x.mul_(2)
        return self.layer(x) + self.seen


@pytest.mark.parametrize("weights", [None, "bfloat16"])
def test_answers_run_nothing(weights: str | None) -> None:
    model, x = Counting().eval(), torch.ones(2, 3)
    compiled = lz.compile(model, x, weights=weights)
    compiled.report(x)
    compiled.explain(torch.ones(5, 3))
    compiled.profile(x, rounds=3)
    compiled.report(torch.ones(9, 3))
    assert torch.equal(x, torch.ones(2, 3))
    assert torch.equal(model.seen, torch.zeros(3))
    assert compiled.report().calls == 0
    assert compiled.report().largest_error is None if weights is None else compiled.report().largest_error < 0.02


def test_what_is_changed_and_not_contiguous_is_the_models() -> None:
    """Arguments, and tensors of the model."""
    model, reference = Counting().eval(), Counting().eval()
    reference.load_state_dict(model.state_dict())
    compiled, x = lz.compile(model, torch.ones(2, 3)), torch.ones(3, 2)
    y = x.clone()
    with torch.no_grad():
        with pytest.warns(LayerZeroWarning, match="a tensor that the model changes is not contiguous"):
            found = compiled(x.t())
        torch.testing.assert_close(found, reference(y.t()))
        assert torch.equal(x, y)
        torch.testing.assert_close(compiled(torch.ones(2, 3)), reference(torch.ones(2, 3)))
    model = Counting().eval()
    model.seen = torch.zeros(3, 2)[:, 0]
    compiled = lz.compile(model, torch.ones(2, 3))
    with torch.no_grad(), pytest.warns(LayerZeroWarning, match="not contiguous"):
        compiled(torch.ones(2, 3))
    assert model.seen.tolist() == [1, 1, 1]
    compiled.report()
    compiled.profile(rounds=1)
    assert model.seen.tolist() == [1, 1, 1]


def test_updates_in_place_are_counted() -> None:
    model, x = Counting().eval(), torch.ones(2, 3)
    compiled = lz.compile(model, x)
    before = x._version, model.seen._version
    with torch.no_grad():
        compiled(x)
    assert (x._version, model.seen._version) > before
    assert x._version > before[0]
    assert model.seen._version > before[1]


def test_parameters_that_the_model_changes() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.at.add_(1)
            return x * self.at

    model = Changing().eval()
    compiled, x = lz.compile(model, torch.ones(3)), torch.ones(3)
    for n in (2, 3, 4):
        assert silent(lambda: compiled(x)).tolist() == [n] * 3
    assert model.at.tolist() == [4] * 3


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.0, 2.0], [1.0, math.nan], math.inf),
        ([math.inf, 1.0], [-math.inf, 1.0], math.inf),
        ([math.nan, 1.0], [math.inf, 1.0], math.inf),
        ([math.nan, math.inf, 1.0], [math.nan, math.inf, 2.0], 0.5),
        ([math.nan], [math.nan], 0.0),
    ],
)
def test_the_largest_error_is_also_that_of_no_numbers(found: list[float], expected: list[float], error: float) -> None:
    assert checks.largest_error([torch.tensor(found)], [torch.tensor(expected)]) == error


# Weights, and the model behind.


def test_changed_weights_are_noticed() -> None:
    model, x = layer()
    compiled = lz.compile(model, x)
    with torch.no_grad():
        compiled(x)
        for change in (
            lambda: model.weight.mul_(2),
            lambda: model.load_state_dict(nn.Linear(6, 4).state_dict()),
            lambda: setattr(model.weight, "data", torch.randn(4, 6)),
            lambda: setattr(model, "weight", nn.Parameter(torch.randn(4, 6))),
        ):
            change()
            time.sleep(0.01)
            torch.testing.assert_close(compiled(x), model(x))
    narrow = lz.compile(model, x, weights="int8")
    first = narrow.report().largest_error
    with torch.no_grad():
        model.weight[0, 0] = 100
    narrow.refresh()
    narrow(x)
    assert narrow.report().largest_error != first


def test_models_that_change_their_own_buffers_are_not_compiled_again() -> None:
    compiled = lz.compile(Counting().eval(), torch.ones(2, 3))
    for _ in range(5):
        time.sleep(0.002)
        silent(lambda: compiled(torch.ones(2, 3)))
    assert compiled.report().exports == 1


def test_attributes_are_the_models() -> None:
    model, x = layer()
    compiled = lz.compile(model, x)
    assert compiled.in_features == 6
    assert [*compiled.state_dict()] == ["weight", "bias"]
    assert next(compiled.parameters()) is model.weight
    assert compiled.to("cpu") is compiled
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = compiled.nothing_such
    assert "Linear" in repr(compiled)


def test_a_copy_has_a_model_of_its_own(tmp_path: Path) -> None:
    model, x = layer()
    compiled = lz.compile(model, x)
    copied = copy.deepcopy(compiled)
    with torch.no_grad():
        model.weight.zero_()
        torch.testing.assert_close(copied(x), copied.model(x))
        assert copied(x).abs().sum() > 0
    counting = lz.load_plan(lz.compile(Counting().eval(), torch.ones(2, 3)).save(tmp_path / "counting.plan"))
    other = copy.deepcopy(counting)
    assert torch.equal(counting(torch.ones(2, 3)), other(torch.ones(2, 3)))
    assert "Counting" in repr(other)


def test_a_file_is_readable_as_others_are_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    model, x = layer()
    compiled = lz.compile(model, x)
    (tmp_path / "plain").touch()
    path = compiled.save(tmp_path / "one.plan")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    with torch.no_grad():
        for rows in (5, 9):
            compiled(torch.randn(rows, 6))
        # The second export serves all of these sizes.
        loaded = lz.load_plan(silent(lambda: compiled.save(path)))
        for rows in (2, 3, 5, 9, 40):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(loaded(x), model(x))
        compiled(torch.randn(2, 5, 6))
    with pytest.warns(LayerZeroWarning, match=r"one of its 3 exports, which does not serve float32\[2, 5, 6\]"):
        compiled.save(path)


def test_elsewhere_than_on_the_cpu_what_has_no_effect_is_said() -> None:
    model, x = nn.Linear(6, 4, device="meta").eval(), torch.randn(3, 6, device="meta")
    with pytest.raises(lz.InvalidCallError, match="weights is for graphs on the CPU"):
        lz.compile(model, x, weights="int8")
    with pytest.raises(lz.InvalidCallError, match="strict is for graphs"):
        lz.compile(model, x, strict=True)
    with pytest.warns(LayerZeroWarning, match="tune, off, precision: for graphs only"):
        compiled = lz.compile(model, x, tune=True, off=["cse"], precision="high")
    assert compiled(x).shape == (3, 4)
    report = compiled.report()
    assert (report.exports, report.calls) == (0, 1)
    with pytest.raises(lz.InvalidCallError, match="there is no graph"):
        compiled.explain()
    for precision, said in (("high", "precision"), (None, "tune")):
        copied = copy.deepcopy(lz.compile(model, tune=precision is None, precision=precision))
        with pytest.warns(LayerZeroWarning, match=f"^{said}: for graphs"):
            copied(x)


def test_packed_weights_that_changed_are_not_shared_with_the_next_export() -> None:
    model = nn.Linear(64, 64).eval()
    compiled = lz.compile(model, torch.randn(3, 64))
    with torch.no_grad():
        compiled(torch.randn(3, 64))
        model.weight.mul_(3)
        # Without a moment to look.
        compiled._watched.next_look = math.inf  # type: ignore[union-attr]
        x = torch.randn(17, 64)
        torch.testing.assert_close(compiled(x), model(x))


# Precision.


@pytest.mark.parametrize("precision", ["float32", "highest", "high", "medium"])
def test_the_precision_of_products(precision: str) -> None:
    model, x = nn.Linear(64, 64).eval(), torch.randn(32, 64)
    compiled = lz.compile(model, x, precision=precision)
    with torch.no_grad():
        error = checks.largest_error([compiled(x)], [model(x)])
    assert error < (1e-5 if precision in ("float32", "highest") else 1e-3)
    assert compiled.report().precision == ("high" if precision == "medium" else precision)


def test_precision_follows_torch(tmp_path: Path) -> None:
    model, x = layer()
    before = torch.get_float32_matmul_precision()
    try:
        for setting, expected in (("highest", "highest"), ("high", "high"), ("medium", "high")):
            torch.set_float32_matmul_precision(setting)
            compiled = lz.compile(model, x)
            assert compiled.report().precision == expected
            assert lz.load_plan(compiled.save(tmp_path / "one.plan")).report().precision == expected
    finally:
        torch.set_float32_matmul_precision(before)
    with pytest.raises(lz.InvalidCallError, match="precision is 'low'") as raised:
        lz.compile(model, x, precision="low")
    assert raised.value.code == "BAD_PARAM"
