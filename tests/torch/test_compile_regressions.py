"""What random modules have shown of `lz.compile`, each by the smallest model that shows it."""

from __future__ import annotations

from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import _native
from layerzero.export import export
from torch import Tensor, nn


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
