"""How a compiled model is called: arguments that are no tensors, names, and what surrounds a call."""

from __future__ import annotations

import copy
import inspect
import math
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layerzero import checks
from layerzero.errors import LayerZeroWarning
from layerzero.served_model import MOST_EXPORTS
from torch import Tensor, nn


def layer(rows: int = 6) -> tuple[nn.Linear, Tensor]:
    return nn.Linear(rows, 4).eval(), torch.randn(3, rows)


def silent(call: Any) -> Any:
    """The result of a call that gives no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()


# Arguments that are no tensors.


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda x, t: x * t, [3, 5, 3, -2]),
        (lambda x, t: x * t, [0.0, -0.0, 1.5, math.inf]),
        (lambda x, t: x + 1 if t else x - 1, [True, False, 1, 0]),
        (lambda x, t: x + 1 if isinstance(t, bool) else x, [True, 1, True]),
        (lambda x, t: x.sin() if t == "sin" else x.cos(), ["sin", "cos", "sin"]),
        (lambda x, t: x if t is None else x * t, [None, 2, torch.randn(3), None]),
        (lambda x, t: x if t is None else x * t, [torch.randn(3), None, 2.0, torch.randn(3)]),
        (lambda x, t: x[t[0]] + t[1]["by"], [(0, {"by": 2}), (1, {"by": 2}), (1, {"by": 3})]),
    ],
)
def test_every_value_has_its_own_graph(function: Any, values: list[Any]) -> None:
    x = torch.randn(4, 3)
    compiled = lz.compile(function, x, values[0])
    for value in values:
        found, expected = compiled(x, value), function(x, value)
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert torch.equal(found.signbit(), expected.signbit())
    assert compiled.report().model_calls == {}
    # Sizes and values differ at once.
    x = torch.randn(7, 3)
    for value in values:
        torch.testing.assert_close(compiled(x, value), function(x, value), equal_nan=True)


def test_nan_is_one_value() -> None:
    compiled, x = lz.compile(lambda x, t: x * t, torch.randn(3), math.nan), torch.randn(3)
    for _ in range(3):
        assert compiled(x, float("nan")).isnan().all()
    assert compiled.report().exports == 1


def test_too_many_values_are_the_models_with_a_warning() -> None:
    compiled, x = lz.compile(lambda x, t: x * t, torch.randn(3), 0), torch.randn(3)
    for value in range(8):
        assert torch.equal(silent(lambda v=value: compiled(x, v)), x * value)
    with pytest.warns(LayerZeroWarning, match="ran uncompiled: argument 1 is 8, the graph is for 0"):
        assert torch.equal(compiled(x, 8), x * 8)
    for value in range(9, 12):
        assert torch.equal(silent(lambda v=value: compiled(x, v)), x * value)
    report = compiled.report()
    assert report.exports == MOST_EXPORTS
    assert report.model_calls == {"arguments outside of what was exported": 4}


def test_a_plan_has_the_values_it_was_written_for(tmp_path: Path) -> None:
    def function(x: Tensor, by: float, kind: str, flag: bool, none: None) -> Tensor:
        return x * by

    x, given = torch.randn(3), (-0.0, "é ' \"", True, None)
    loaded = lz.load_plan(lz.compile(function, x, *given).save(tmp_path / "one.plan"))
    assert torch.equal(loaded(x, *given).signbit(), function(x, *given).signbit())
    assert torch.equal(loaded(x, by=-0.0, none=None, flag=True, kind=given[1]), loaded(x, *given))
    for at, other in enumerate((0.0, "e", False, 1)):
        wrong: list[Any] = list(given)
        wrong[at] = other
        with pytest.raises(lz.InvalidCallError, match=f"cannot serve the call: argument {at + 1} is {other!r}"):
            loaded(x, *wrong)
    with pytest.raises(lz.InvalidCallError, match="argument 1 is a tensor, the graph is for -0.0"):
        loaded(x, x, *given[1:])


def test_arguments_that_no_graph_takes_are_the_models_with_a_warning() -> None:
    compiled, x = lz.compile(lambda x, d=None: x if d is None else x.to(d), torch.randn(3)), torch.randn(3)
    with pytest.warns(LayerZeroWarning, match="an argument is a dtype"):
        assert compiled(x, torch.float64).dtype == torch.float64
    assert silent(lambda: compiled(x, torch.float16)).dtype == torch.float16
    assert compiled.report().model_calls == {"other arguments": 2}


# Names.


class Named(nn.Module):
    """Arguments of every kind."""

    def forward(self, x: Tensor, y: Tensor | None = None, *, by: Tensor | None = None, **more: Tensor) -> Tensor:
        """A sum, each weighted otherwise."""
        found = x if y is None else x - 2 * y
        found = found if by is None else found * by
        for at, name in enumerate(sorted(more)):
            found = found + (at + 3) * more[name]
        return found


def test_one_graph_for_all_ways_to_name_arguments() -> None:
    model, (x, y, by, p, q) = Named().eval(), torch.randn(5, 3)
    compiled = lz.compile(model, x, y, kwargs={"by": by, "p": p, "q": q})
    forms: list[tuple[Any, dict[str, Tensor]]] = [
        ((x, y), {"by": by, "p": p, "q": q}),
        ((x, y), {"q": q, "p": p, "by": by}),
        ((x,), {"q": q, "y": y, "by": by, "p": p}),
        ((), {"p": p, "by": by, "y": y, "q": q, "x": x}),
    ]
    for args, kwargs in forms:
        assert torch.equal(silent(lambda a=args, k=kwargs: compiled(*a, **k)), model(*args, **kwargs))
    assert compiled.report().exports == 1
    # Others are exported like other sizes.
    for args, kwargs in [((x,), {}), ((x,), {"by": by}), ((x,), {"p": p}), ((x, y), {}), ((x,), {"y": y})]:
        assert torch.equal(silent(lambda a=args, k=kwargs: compiled(*a, **k)), model(*args, **kwargs))
    report = compiled.report()
    assert report.exports == 5
    assert report.model_calls == {}
    with pytest.raises(TypeError, match="multiple values"):
        compiled(x, x=x)


ARGUMENTS = {
    "x": [torch.randn(3), torch.randn(2, 3)],
    "y": [None, 2, True, 0.5, torch.randn(3)],
    "z": ["add", "mul", torch.randn(3)],
    "k": [0.0, -0.0, None, torch.randn(3)],
    "p": [1, torch.randn(1)],
    "q": [False, torch.randn(3)],
}


def many(x: Tensor, y: Any = 1, z: Any = "add", *, k: Any = None, **more: Any) -> Any:
    """Each argument is a tensor, a number, a text or nothing."""
    found = x if y is None else x * y
    found = found * 3 if z == "mul" else found + (1 if isinstance(z, str) else z)
    found = found if k is None else found * k
    return {"found": found, "more": [found + more[name] for name in sorted(more)], "z": None if k is None else 7}


MANY = lz.compile(many)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_arguments_in_any_form(data: st.DataObject) -> None:
    """By position or by name, in any order, left out or given: what comes is what the function gives."""
    given_ = {name: data.draw(st.sampled_from(values), name) for name, values in ARGUMENTS.items()}
    for name in data.draw(st.sets(st.sampled_from(list("yzkpq")))):
        del given_[name]
    positions: list[Any] = []
    for name in "xyz"[: data.draw(st.integers(0, 3))]:
        if name not in given_:
            break
        positions.append(given_.pop(name))
    names = {name: given_[name] for name in data.draw(st.permutations(list(given_)))}
    compiled = data.draw(st.sampled_from([MANY, lz.compile(many)]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LayerZeroWarning)
        for _ in range(2):
            found, expected = compiled(*positions, **names), many(*positions, **names)
            torch.testing.assert_close(found["found"], expected["found"], equal_nan=True)
            assert torch.equal(found["found"].signbit(), expected["found"].signbit())
            torch.testing.assert_close(found["more"], expected["more"])
            assert found["z"] == expected["z"]


def test_a_keyword_first_and_then_a_position() -> None:
    model, x = layer()
    compiled = lz.compile(model, kwargs={"input": x})
    assert torch.equal(compiled(input=x), compiled(x))
    assert compiled.report().exports == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda *given: given[0] * 2,
        lambda **given: given["x"] * 2,
        lambda x, *rest, **more: x * 2,
    ],
)
def test_sizes_of_functions_become_symbols(function: Any) -> None:
    """Also of those whose parameters have no names."""
    compiled = lz.compile(function)
    for rows in (3, 5, 9, 17, 33):
        x = torch.randn(rows, 2)
        only = inspect.getfullargspec(function).varkw == "given"
        assert torch.equal(compiled(x=x) if only else compiled(x), x * 2)
    assert compiled.report().exports == 2


def test_modules_of_any_arguments_have_symbols() -> None:
    class Any_(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return args[0] @ kwargs["w"]["of"] + args[1][0]

    model, w = Any_().eval(), torch.randn(4, 3)
    compiled = lz.compile(model)
    for rows in (2, 5, 8, 11):
        x, b = torch.randn(rows, 4), torch.randn(3)
        torch.testing.assert_close(compiled(x, [b], w={"of": w}), model(x, [b], w={"of": w}))
    assert compiled.report().exports == 2


# What surrounds a call.


def test_autocast_traces_and_derivatives_are_the_models() -> None:
    model, x = layer()
    model.requires_grad_(False)
    compiled = lz.compile(model, x)
    with torch.no_grad():
        compiled(x)
        with pytest.warns(LayerZeroWarning, match="ran uncompiled: autocast"), torch.autocast("cpu"):
            assert compiled(x).dtype == torch.bfloat16
        traced = torch.jit.trace(lambda x: compiled(x), (x,))
        assert torch.equal(traced(2 * x), model(2 * x))
        _, slope = torch.func.jvp(compiled, (x,), (torch.ones_like(x),))
        torch.testing.assert_close(slope, torch.func.jvp(model, (x,), (torch.ones_like(x),))[1])
        torch.testing.assert_close(torch.func.vmap(compiled)(x), model(x))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            found = torch.autograd.forward_ad.unpack_dual(compiled(dual)).tangent
        torch.testing.assert_close(found, slope)
    torch.testing.assert_close(torch.func.grad(lambda x: compiled(x).sum())(x), model.weight.sum(0).expand(3, 6))
    left = compiled.report().model_calls
    assert {"autocast", "torch.jit.trace", "a transform of torch.func", "forward-mode derivatives"} <= left.keys()


def test_what_is_compiled_under_autocast_is_for_calls_without() -> None:
    model, x = layer()
    with torch.autocast("cpu"), torch.no_grad():
        compiled = lz.compile(model, x)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_flops_are_counted_as_of_the_model() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, x = layer()
    compiled = lz.compile(model, x)
    with torch.no_grad():
        compiled(x)
        with FlopCounterMode(display=False) as counter:
            compiled(x)
    assert counter.get_total_flops() == 2 * 3 * 6 * 4


def test_training_mode_is_the_models_until_it_is_over() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.9))
    compiled, x = lz.compile(model), torch.randn(3, 6)
    with torch.no_grad():
        with pytest.warns(LayerZeroWarning, match="training mode"):
            compiled(x)
        model.eval()
        torch.testing.assert_close(compiled(x), model(x))
        compiled(x)
        model.train()
        assert (compiled(x) == 0).any()
        assert compiled.eval() is compiled
        assert not model.training
        torch.testing.assert_close(compiled(x), model(x))
    report = compiled.report()
    assert report.model_calls == {"training mode": 2}
    assert report.calls == 3


def test_tensors_that_a_graph_cannot_read_are_the_models() -> None:
    compiled, x = lz.compile(lambda x: x * 2, torch.randn(3)), torch.randn(3)
    compiled(x)
    for other in (x.to(torch.complex64), x.to("meta"), torch.eye(3).to_sparse()):
        assert compiled(other).dtype == other.dtype
    assert compiled.report().model_calls == {"other arguments": 3}


def test_the_model_runs_once_where_a_graph_cannot() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ran = 0

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 3:
                self.ran += not isinstance(x, torch._subclasses.FakeTensor)
                return x * (2 if x.sum() > 0 else 3)
            return x * 2

    model = Stateful().eval()
    compiled = lz.compile(model, torch.ones(3))
    with pytest.warns(LayerZeroWarning, match=r"ran uncompiled: .*torch.export cannot trace"):
        assert compiled(torch.ones(5)).tolist() == [2] * 5
    assert model.ran == 1
    compiled(torch.ones(5))
    assert model.ran == 2


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


# Other states of the process.


def test_a_child_process_goes_on() -> None:
    model, x = layer()
    compiled = lz.compile(model, x)
    with torch.no_grad():
        expected = compiled(x)
        with compiled._lock:
            child = os.fork()
            if child == 0:
                right = False
                try:
                    right = torch.equal(compiled(x), expected) and compiled(torch.randn(3, 6)).shape == (3, 4)
                finally:
                    os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_several_threads_with_other_values_and_refreshes() -> None:
    model, x = layer()
    compiled = lz.compile(model, x)
    expected, wrong = model(x).detach(), []

    def work(at: int) -> None:
        try:
            with torch.no_grad():
                for n in range(30):
                    if at == 0 and n % 10 == 9:
                        compiled.refresh()
                    torch.testing.assert_close(compiled(x), expected)
        except BaseException as error:  # noqa: BLE001 - told by the thread that started this one
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wrong == []


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
