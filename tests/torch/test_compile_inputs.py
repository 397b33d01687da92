"""What a compiled model is called with: what fits is served, all else is the model's own answer or a clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layerzero as lz
import pytest
import torch
from torch import Tensor, nn


class Two(nn.Module):
    """Two arguments, of which one has a default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """A layer, scaled."""
        found = self.layer(x)
        return found if scale is None else found * scale


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    """A model from a file, which has no model to fall back to."""
    size = torch.export.Dim("rows", min=2, max=8)
    compiled = lz.compile(Two().eval(), torch.randn(3, 6), torch.ones(4), dynamic_shapes=({0: size}, None))
    return lz.load_plan(compiled.save(tmp_path / "two.plan"))


GOOD = torch.randn(3, 6)


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((GOOD.double(), torch.ones(4)), {}, "float64"),
        ((GOOD.half(), torch.ones(4)), {}, "float16"),
        ((GOOD.long(), torch.ones(4)), {}, "int64"),
        ((GOOD, torch.ones(5)), {}, "5"),
        ((GOOD[:, :5], torch.ones(4)), {}, "5"),
        ((GOOD[0], torch.ones(4)), {}, r"float32\[6\], the graph takes float32\[s\d+, 6\]"),
        ((torch.randn(9, 6), torch.ones(4)), {}, "2 to 8"),
        ((torch.randn(1, 6), torch.ones(4)), {}, "2 to 8"),
        ((torch.randn(0, 6), torch.ones(4)), {}, "2 to 8"),
        ((GOOD,), {}, "other arguments"),
        ((), {}, "other arguments"),
        ((GOOD, torch.ones(4), torch.ones(4)), {}, "other arguments"),
        ((GOOD,), {"other": torch.ones(4)}, "other arguments"),
        ((GOOD, torch.ones(4)), {"more": 1}, "other arguments"),
        ((None, torch.ones(4)), {}, "NoneType|arguments"),
        ((3, torch.ones(4)), {}, "is a int, the graph takes a tensor"),
        (("x", torch.ones(4)), {}, "is a str, the graph takes a tensor"),
        (([GOOD], torch.ones(4)), {}, "other arguments|is a list, the graph takes a tensor"),
        ((GOOD.to("meta"), torch.ones(4)), {}, "the graph is for the CPU"),
        ((GOOD.to_sparse(), torch.ones(4)), {}, "sparse"),
    ],
)
def test_a_plan_says_what_does_not_fit(loaded: Any, args: tuple[Any, ...], kwargs: dict[str, Any], said: str) -> None:
    assert loaded(GOOD, torch.ones(4)).shape == (3, 4)
    with torch.no_grad(), pytest.raises(lz.LayerZeroError, match=said) as raised:
        loaded(*args, **kwargs)
    assert raised.value.hint
    # Nothing of the failed call is left.
    assert loaded(GOOD, torch.ones(4)).shape == (3, 4)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((torch.randn(3, 5),), RuntimeError),
        ((torch.randn(3, 6).long(),), RuntimeError),
        ((), TypeError),
        ((GOOD, torch.ones(4), 1), TypeError),
        (("x",), TypeError),
    ],
)
def test_a_call_the_model_refuses_is_refused_as_by_the_model(args: tuple[Any, ...], error: type[Exception]) -> None:
    """The error is the model's own."""
    model = Two().eval()
    compiled = lz.compile(model, GOOD)
    with torch.no_grad():
        with pytest.raises(error) as own:
            model(*args)
        with pytest.raises(error) as raised:
            compiled(*args)
        assert str(raised.value) == str(own.value)
        torch.testing.assert_close(compiled(GOOD), model(GOOD))


def test_other_dtypes_and_other_arguments_are_the_models_answer() -> None:
    """A model that takes both, compiled for one of them."""

    class Any_(nn.Module):
        def forward(self, x: Tensor, y: Any = None) -> Tensor:
            return x * 2 if y is None else x * y

    model = Any_().eval()
    compiled = lz.compile(model, GOOD)
    for args in ((GOOD,), (GOOD.double(),), (GOOD.long(),), (GOOD, 3), (GOOD, GOOD), (GOOD[0],), (GOOD[:0],), (GOOD,)):
        torch.testing.assert_close(compiled(*args), model(*args))


def test_wrong_indices_are_an_error_and_not_a_read_beyond_the_table() -> None:
    model = nn.Embedding(7, 4).eval()
    compiled = lz.compile(model, torch.tensor([[1, 2]]))
    for bad in (7, 100, -1, 2**40, -(2**62)):
        with torch.no_grad(), pytest.raises((lz.InvalidCallError, IndexError)):
            compiled(torch.tensor([[1, bad]]))
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.tensor([[1, 6]])), model(torch.tensor([[1, 6]])))


def test_weights_that_are_no_numbers_give_what_the_model_gives() -> None:
    """In every weight of a block in turn. (At infinities activations have their limits, where torch has NaN.)"""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu").eval()
    x = torch.randn(2, 5, 8)
    for name, weight in model.named_parameters():
        with torch.no_grad():
            before = weight.clone()
            # The first number of the first row.
            weight.view(-1)[0] = float("nan")
            expected, found = model(x), lz.compile(model, x)(x)
            weight.copy_(before)
        assert torch.allclose(found, expected, atol=2e-5, rtol=2e-5, equal_nan=True), name


def branches(x: Tensor) -> Tensor:
    """Depends on numbers."""
    if x.sum() > 0:  # branch
        return x
    return -x


def counts(x: Tensor) -> Tensor:
    """A loop as long as a number says."""
    for _ in range(int(x[0])):  # loop
        x = x + 1
    return x


def as_list(x: Tensor) -> Tensor:
    """Reads numbers."""
    return x * x.tolist()[0]  # read


def sizes_of_data(x: Tensor) -> Tensor:
    """A size that only the data knows."""
    return x[x > 0] + 1  # mask


def by_numpy(x: Tensor) -> Tensor:
    """Leaves torch."""
    return torch.from_numpy(x.numpy() * 2)  # numpy


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (branches, "# branch"),
        (counts, "# loop"),
        (as_list, "def as_list"),
        (sizes_of_data, "def sizes_of_data"),
        (by_numpy, "# numpy"),
    ],
)
def test_what_cannot_be_exported_names_its_line(function: Any, line: str) -> None:
    with pytest.raises(lz.LayerZeroError, match=line) as raised:
        lz.compile(function, torch.tensor([1.0, 2.0, -3.0]))
    assert raised.value.code == "NOT_EXPORTABLE"
    assert Path(__file__).name in str(raised.value)
    assert raised.value.hint


def test_no_model_and_no_torch_module() -> None:
    for bad in (3, "gpt2", None, [nn.Linear(2, 2)]):
        with pytest.raises(lz.InvalidCallError) as raised:
            lz.compile(bad, torch.randn(2))
        assert raised.value.code == "NOT_A_MODEL"
