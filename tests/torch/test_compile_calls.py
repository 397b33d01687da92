"""How a compiled model is called: arguments that are no tensors, names, sizes."""

from __future__ import annotations

import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from compiling import layer, silent
from hypothesis import given, settings
from hypothesis import strategies as st
from layerzero.errors import LayerZeroWarning
from layerzero.served_model import MOST_EXPORTS
from torch import Tensor, nn

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
