"""`lz.compile` at the edges: tensors without elements, any address, operations without a kernel of their own, limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import _native
from layerzero.export import export
from torch import Tensor, nn
from torch.nn import functional as F


class Made(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        """Calls it."""
        return self.function(*inputs)


def session(model: nn.Module, *inputs: Tensor) -> Any:
    """A session that agrees with the model."""
    exported = export(model, inputs)
    made = _native.Session(_native.Graph.from_document(exported.document, exported.constants), threads=2)
    with torch.no_grad():
        wanted = model(*inputs)
        torch.testing.assert_close(made.run(list(inputs))[0], wanted, atol=2e-5, rtol=2e-5)
    assert made.failures(list(inputs)) == []
    return made


def kernels(made: Any, *inputs: Tensor) -> list[str]:
    """The kernel of each step."""
    return [step["kernel"] for step in made.steps(list(inputs))]


def test_empty_tensors() -> None:
    """An empty tensor takes no memory, and was taken for what the result is written over."""
    session(Made(lambda a, b: torch.cat([a.relu(), b]).cumsum(0)), torch.empty(0, 4), torch.randn(3, 4))
    session(Made(lambda a, b: (a.relu() @ b.relu()).cumsum(0)), torch.empty(3, 0), torch.empty(0, 4))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: F.group_norm(x, 4), [(2, 16, 9, 9)]),
        (lambda x: F.softmax(x, 1), [(2, 5, 7, 3)]),
        (lambda x: F.layer_norm(x, (7, 3)), [(2, 5, 7, 3)]),
        (lambda x: F.layer_norm(x, (768,)), [(800, 768)]),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), [(2, 3, 5, 16), (2, 3, 9, 16)]),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), [(2, 3, 9, 16), (2, 3, 5, 16)]),
    ],
)
def test_no_common_call_is_left_to_its_reference(function: Callable[..., Tensor], shapes: list[tuple[int, ...]]) -> None:
    """They had no kernel of their own, or one that is used only where torch's is not faster."""
    inputs = [torch.randn(shape) for shape in shapes]
    made = session(Made(function), *inputs)
    assert not any("reference" in kernel for kernel in kernels(made, *inputs)), kernels(made, *inputs)


def test_inputs_at_any_address() -> None:
    """A view of bytes may begin between two elements."""
    inputs = torch.randn(3, 4)
    made = session(Made(lambda x: x.exp() + x), inputs)
    held = torch.zeros(3 * 4 * 4 + 1, dtype=torch.uint8).numpy()
    held[1:] = inputs.flatten().numpy().view("uint8")
    shifted = torch.from_numpy(held[1:].view("float32").reshape(3, 4))
    assert shifted.data_ptr() % 4 == 1
    torch.testing.assert_close(made.run([shifted])[0], inputs.exp() + inputs)


def test_the_operators_limit_of_instructions() -> None:
    """Products are split for the matrix unit, and kernels run with AVX-512, only where the operator allows it."""
    model, x = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)).eval(), torch.randn(128, 256)
    lz.configure(max_cpu_isa="avx2")
    try:
        made = session(model, x)
        candidates = [name for step in made.steps([x]) for name in step["candidates"]]
    finally:
        lz.configure(max_cpu_isa=None)
    assert not any("avx512" in name or "amx" in name or ".split" in name for name in candidates), candidates
