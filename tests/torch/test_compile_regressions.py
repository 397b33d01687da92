"""What random modules have shown of `lz.compile`, each by the smallest model that shows it."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import _native
from layerzero.errors import LayerZeroWarning
from layerzero.export import export
from layerzero.export.exporting import of_program
from layerzero.export.handlers import HANDLERS
from torch import Tensor, nn
from torch.export.graph_signature import OutputKind


def same(model: Any, *inputs: Tensor, close: float = 2e-5) -> Any:
    """Compiles for the first input, and compares for all."""
    compiled = lz.compile(model, inputs[0])
    with torch.no_grad():
        for x in inputs:
            torch.testing.assert_close(compiled(x), model(x), atol=close, rtol=close)
    return compiled


class Twice(nn.Module):
    """A layer that is called twice, so that its transposed weight has two readers where equal nodes are not joined."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, out)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a sequence with itself."""
        return self.layer(x) @ self.layer(x).mT


@pytest.mark.parametrize("out", [8, 4])
@pytest.mark.parametrize("off", [["cse", "absorb_transpose", "fold"], ["absorb_transpose", "fold", "linear"]])
def test_weights_that_are_views_are_packed_as_they_are_read(out: int, off: list[str]) -> None:
    """A square weight was packed untransposed, which gave wrong numbers; another one failed at its first call."""
    model, x = Twice(out).eval(), torch.randn(2, 5, 8)
    exported = export(model, (x,))
    graph = _native.Graph.from_document(exported.document, exported.constants)
    session = _native.Session(graph, threads=1, off=off)
    with torch.no_grad():
        torch.testing.assert_close(session.run([x])[0], model(x), atol=2e-5, rtol=2e-5)
    assert session.failures([x]) == []


def test_residuals_of_float64() -> None:
    """The product that adds it has no float64, and in place there is no other."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(x)
            return y + self.layer(y * 2)

    compiled = same(Residual().eval(), torch.randn(2, 5, 6, dtype=torch.float64), close=1e-12)
    variant = compiled._variants[0]
    assert variant.session.failures(variant.example) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_batch_norm_of_other_types(dtype: torch.dtype) -> None:
    """Its eps is no number of a half, and made one side float32."""
    norm = nn.BatchNorm1d(3, dtype=dtype).eval()
    nn.init.uniform_(norm.running_var, 0.5, 1.5)
    same(norm, torch.randn(2, 3, 4).to(dtype), close={torch.float64: 1e-12}.get(dtype, 1e-2))


def test_nodes_that_nothing_reads() -> None:
    """They went with the first change of a pass, which then came to them."""
    weights = [torch.randn(4, 4) for _ in range(3)]

    def model(x: Tensor) -> Tensor:
        found = x @ weights[0]
        torch.tanh(x @ weights[1])
        return found @ weights[2]

    same(model, torch.randn(3, 4))


@pytest.mark.parametrize("start", [-100, -6, -3])
def test_parts_that_begin_before_the_first_element(start: int) -> None:
    """Of an axis whose size is a symbol."""
    same(lambda x: x[:, start:] * 2, *(torch.randn(2, n, 3) for n in (5, 9, 7, 4)))
    same(lambda x: x[:, start:-1] * 2, *(torch.randn(2, n, 3) for n in (5, 9, 7, 4)))


def test_a_number_that_only_the_data_knows_is_refused() -> None:
    """It was an AttributeError."""
    with pytest.raises(lz.LayerZeroError) as raised:
        lz.compile(lambda x: x * x[0].item(), torch.randn(3))
    assert raised.value.code == "NOT_EXPORTABLE"


HALF = torch.float16


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.var(-1),
        lambda x: x.std(-1, correction=0, keepdim=True),
        lambda x: torch.var_mean(x, -1),
        lambda x: torch.log_softmax(x / 60, -1),
        lambda x: torch.log_softmax(x / 60, -1, dtype=torch.float32),
        lambda x: torch.linalg.vector_norm(x, dim=-1),
        lambda x: torch.linalg.vector_norm(x, ord=1, dim=-1),
    ],
)
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_what_is_between_does_not_overflow(function: Any, dtype: torch.dtype) -> None:
    """The square of 300 is no float16; sums were rounded several times."""
    torch.manual_seed(0)
    x = (300 + torch.randn(4, 64) * 200).to(dtype)
    # Half a unit of the last place of a number around 1, and of its own.
    near = {"atol": 2e-3, "rtol": 2e-3} if dtype == HALF else {"atol": 1.6e-2, "rtol": 8e-3}
    torch.testing.assert_close(lz.compile(function, x)(x), function(x), **near)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_numbers_that_halves_are_compared_with_are_rounded(dtype: torch.dtype) -> None:
    """0.1 is no half, and was compared as it is."""
    x = torch.tensor([0.1, 0.0999, 0.1001, -0.1, 3.0]).to(dtype)

    def function(x: Tensor) -> Any:
        return x == 0.1, x != 0.1, x < 0.1, x <= 0.1, x > 0.1, x >= 0.1, 0.1 >= x, x.clamp(max=0.1) == 0.1

    for found, expected in zip(lz.compile(function, x)(x), function(x), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "function",
    [
        *(lambda y: y + 0.3, lambda y: y - 0.3, lambda y: 0.3 - y),
        *(
            lambda y: y * 0.3,
            lambda y: y / 0.3,
            lambda y: y // 0.3,
            lambda y: y % 0.3,
            lambda y: torch.remainder(0.3, y),
        ),
        *(lambda y: torch.div(y, 0.3, rounding_mode="floor"), lambda y: 0.3 / y),
        *(lambda y: y.clamp(-0.3, 0.3), lambda y: torch.where(y > 0.3, y, 0.3), lambda y: y.masked_fill(y < 0.3, 0.3)),
        lambda y: torch.nn.functional.leaky_relu(y, 0.3),
    ],
)
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_halves_and_numbers_are_rounded_where_torch_rounds_them(function: Any, dtype: torch.dtype) -> None:
    """To the last bit: products and quotients take a number as it is, all others round it first."""
    x = (torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    found, expected = lz.compile(function, x)(x), function(x)
    differing = found != expected
    assert not differing.any(), (found[differing][:4], expected[differing][:4], x[differing][:4])


@pytest.mark.parametrize(
    "function",
    [
        lambda y: torch.add(y, y.flip(0), alpha=0.3),
        lambda y: torch.sub(y, y.flip(0), alpha=0.3),
        lambda y: torch.rsub(y, y.flip(0), alpha=0.3),
        lambda y: torch.add(y, 3, alpha=0.3),
        lambda y: torch.sub(y, 3.3, alpha=3),
    ],
)
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_sums_of_halves_with_a_factor_are_rounded_once(function: Any, dtype: torch.dtype) -> None:
    """torch fuses the product and the sum in some places of a vector, so a few bits differ."""
    x = (torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    assert (lz.compile(function, x)(x) != function(x)).sum() <= 20


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_powers_of_halves_and_numbers(dtype: torch.dtype) -> None:
    """1.1 is no half: torch rounds it before."""
    x = torch.linspace(-8, 8, 400).to(dtype)
    for function in (lambda y: 1.1**y, lambda y: y.abs() ** 0.3):
        torch.testing.assert_close(
            lz.compile(function, x)(x), function(x), atol=0, rtol=2 * torch.finfo(dtype).eps / 1.9
        )


@pytest.mark.parametrize("bad", [(0, 3), (0, -4), (2, 0), (-3, 0), (1, 2**40), (-1, 2**40)])
def test_every_index_is_of_its_own_axis(bad: tuple[int, int]) -> None:
    """x[0, 3] was x[1, 0]."""
    x, function = torch.arange(6.0).reshape(2, 3), lambda x, i, j: x[i, j]
    i, j = torch.tensor([[0], [-1]]), torch.tensor([2, 0, -3])
    compiled = lz.compile(function, x, i, j)
    assert torch.equal(compiled(x, i, j), function(x, i, j))
    i, j = i.clone(), j.clone()
    i[1, 0], j[1] = bad
    with pytest.raises((lz.InvalidCallError, IndexError)):
        compiled(x, i, j)
    compiled = lz.compile(lambda x, i, j: x[:, i, :, j], torch.randn(2, 3, 4, 5), i * 0, j * 0)
    x, i, j = torch.randn(2, 3, 4, 5), torch.tensor([[2], [-3]]), torch.tensor([4, -5, 0])
    assert torch.equal(compiled(x, i, j), x[:, i, :, j])


def test_softmax_of_a_row_that_is_all_masked() -> None:
    """torch's own safe softmax gives 0, and NaN stays NaN."""
    x = torch.tensor([[1.0, 2.0], [float("-inf")] * 2, [float("nan"), float("-inf")], [float("-inf"), 0.0]])
    function = lambda x: torch.ops.aten._safe_softmax(x, -1)
    torch.testing.assert_close(lz.compile(function, x)(x), function(x), equal_nan=True)


def test_any_and_all_of_bytes_are_bytes() -> None:
    x = torch.tensor([[0, 2], [0, 0], [7, 255]], dtype=torch.uint8)

    def function(x: Tensor) -> Any:
        return x.any(), x.any(-1), x.all(), x.all(0, keepdim=True), x.bool().any(-1)

    for found, expected in zip(lz.compile(function, x)(x), function(x), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x.roll(x.shape[0] // 2, 0), "roll"),
        (lambda x: x.var(0, correction=x.shape[0] - 1), "var"),
        (lambda x: (x @ x.T).tril(x.shape[0] - 3), "tril"),
        (lambda x: torch.full_like(x, x.shape[0]), "full_like"),
    ],
)
def test_an_attribute_that_is_a_symbol_leaves_the_operation_to_torch(function: Any, op: str) -> None:
    """It was said to be an error of torch.export."""
    rows = torch.export.Dim("rows", min=2, max=64)
    compiled = lz.compile(function, torch.randn(8, 3), dynamic_shapes=({0: rows},))
    for n in (8, 5, 30):
        x = torch.randn(n, 3)
        torch.testing.assert_close(compiled(x), function(x))
    assert compiled.report().model_calls == {}
    assert [name.split(".")[1] for name in compiled.report().torch_calls] == [op]


def test_a_handler_that_fails_is_not_torchs_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operation stays torch's, with a warning that says whose mistake it is."""

    def broken(builder: Any, call: Any, value: Any) -> Any:
        builder.unary("sin", value)
        raise ZeroDivisionError("a mistake")

    monkeypatch.setitem(HANDLERS, "aten.sin.default", broken)
    x = torch.randn(4)
    with pytest.warns(
        LayerZeroWarning, match="LayerZero's handler failed, please report it: ZeroDivisionError: a mistake"
    ):
        compiled = lz.compile(lambda x: x.sin() * 2, x)
    torch.testing.assert_close(compiled(x), x.sin() * 2)
    assert compiled.report().torch_calls == {"aten.sin.default": 1}


def test_results_that_a_graph_does_not_have_are_refused() -> None:
    """They were taken for results of the caller."""
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    program.graph_signature.output_specs[0].kind = OutputKind.LOSS_OUTPUT
    with pytest.raises(lz.ExportError, match="the model gives LOSS_OUTPUT") as raised:
        of_program(program, "model")
    assert raised.value.code == "NOT_EXPORTABLE"


def test_the_native_call_leaves_what_it_cannot_read() -> None:
    """It raised errors, before anybody could have the model run."""
    compiled = lz.compile(lambda x: x * 2, torch.randn(3))
    compiled(torch.randn(3))
    quick = compiled._variants[0].quick
    assert torch.is_tensor(quick((torch.ones(3),)))
    for other in (torch.ones(3, dtype=torch.complex64), torch.ones(3, device="meta"), torch.ones(3).to_sparse()):
        assert quick((other,)) is None
    with torch.autocast("cpu"):
        assert quick((torch.ones(3),)) is None
    with torch.autograd.forward_ad.dual_level():
        assert quick((torch.ones(3),)) is None
