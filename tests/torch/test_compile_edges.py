"""`lz.compile` at the edges: tensors without elements, any address, operations without a kernel of their own, limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import layerzero as lz
import pytest
import torch
from exported_graphs import Function
from layerzero import _native
from layerzero.export import export
from processes import answer
from torch import Tensor, nn
from torch.nn import functional as F


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
    session(Function(lambda a, b: torch.cat([a.relu(), b]).cumsum(0)), torch.empty(0, 4), torch.randn(3, 4))
    session(Function(lambda a, b: (a.relu() @ b.relu()).cumsum(0)), torch.empty(3, 0), torch.empty(0, 4))


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
def test_no_common_call_is_left_to_its_reference(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    """They had no kernel of their own, or one that is used only where torch's is not faster."""
    inputs = [torch.randn(shape) for shape in shapes]
    made = session(Function(function), *inputs)
    left = [kernel for kernel in kernels(made, *inputs) if "reference" in kernel or ".ref." in kernel]
    assert left == []


def test_inputs_at_any_address() -> None:
    """A view of bytes may begin between two elements."""
    inputs = torch.randn(3, 4)
    made = session(Function(lambda x: x.exp() + x), inputs)
    held = torch.zeros(3 * 4 * 4 + 1, dtype=torch.uint8).numpy()
    held[1:] = inputs.flatten().numpy().view("uint8")
    shifted = torch.from_numpy(held[1:].view("float32").reshape(3, 4))
    assert shifted.data_ptr() % 4 == 1
    torch.testing.assert_close(made.run([shifted])[0], inputs.exp() + inputs)


def test_the_operators_limit_of_instructions() -> None:
    """Products are split for the matrix unit, and kernels run with AVX-512, only where the operator allows it."""
    model, x = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)).eval(), torch.randn(200, 256)
    lz.configure(max_cpu_isa="avx2")
    try:
        made = session(model, x)
        candidates = [name for step in made.steps([x]) for name in step["candidates"]]
    finally:
        lz.configure(max_cpu_isa=None)
    assert not any("avx512" in name or "amx" in name or ".split" in name for name in candidates), candidates


_FORKS = """
import os
import signal
import threading

import layerzero as lz
import torch
from layerzero import _native
from layerzero.export import export

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).eval()
exported = export(model, (torch.randn(3, 64),), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=100_000)},))
session = _native.Session(_native.Graph.from_document(exported.document, exported.constants), threads=1)
done = threading.Event()


def compile_more():
    size = 1000
    while not done.is_set():
        session.steps([torch.randn(size, 64)])
        size += 1


compiling = [threading.Thread(target=compile_more) for _ in range(2)]
for thread in compiling:
    thread.start()
codes = []
for size in range(2, 22):
    x = torch.randn(size, 64)
    with torch.no_grad():
        wanted = model(x)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if torch.allclose(session.run([x])[0], wanted, atol=1e-4) else 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done.set()
for thread in compiling:
    thread.join()
answer(codes)
"""


def test_a_child_process_compiles_whatever_its_parent_compiled() -> None:
    """A lock that another thread held at the fork stayed locked in the child."""
    assert answer(_FORKS) == [0] * 20


def test_integers_keep_all_their_digits() -> None:
    """Hashes of ids: products that wrap, and constants beyond what a float64 holds."""
    ids = torch.arange(6).reshape(2, 3)

    def hashed(x: Tensor) -> Tensor:
        return x * 6364136223846793005 + torch.full((3,), 2**60 + 1, dtype=torch.int64) + torch.arange(3) * (2**53 + 1)

    exported = export(Function(hashed), (ids,))
    made = _native.Session(_native.Graph.from_document(exported.document, exported.constants), threads=1)
    assert torch.equal(made.run([ids])[0], hashed(ids))
