"""Compiled blocks on a GPU: the same results as in torch, in every mode; and the kernels that libraries bring.

Run it with ``PYTHONPATH=python pytest --confcutdir=tests/gpu tests/gpu/test_gpu_compile.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import layerzero as lz
import pytest
import torch
from layerzero.bench import blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Each test compiles for itself."""
    torch.compiler.reset()
    lz.compile_report(clear=True)
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("family", blocks.FAMILIES)
def test_a_block_gives_what_torch_gives(family: str, mode: str) -> None:
    ours, plain, sizes, _ = blocks.FAMILIES[family]
    function = torch.compile(ours, fullgraph=True, dynamic=False, mode=None if mode == "default" else mode)
    with torch.no_grad():
        for length in (1, 64):
            weights = blocks.weights(sizes, length, torch.bfloat16, "cuda")
            x = torch.randn(1, length, sizes.hidden, device="cuda", dtype=torch.bfloat16)
            exact = plain(x.double(), {name: weight.double() for name, weight in weights.items()}, sizes)
            for _ in range(3):
                result = function(x, weights, sizes).clone()
            torch.testing.assert_close(result.double(), exact, rtol=5e-2, atol=5e-2)
    assert lz.compile_report().calls


@pytest.mark.parametrize("family", blocks.FAMILIES)
def test_a_length_that_varies_and_gradients(family: str) -> None:
    ours, plain, sizes, _ = blocks.FAMILIES[family]
    function = torch.compile(ours, fullgraph=True, dynamic=True)
    for length in (48, 64, 80):
        weights = blocks.weights(sizes, length, torch.float32, "cuda")
        x = torch.randn(1, length, sizes.hidden, device="cuda", requires_grad=True)
        (grad,) = torch.autograd.grad(function(x, weights, sizes).square().sum(), x)
        (exact,) = torch.autograd.grad(plain(x, weights, sizes).square().sum(), x)
        torch.testing.assert_close(grad, exact, rtol=1e-2, atol=1e-2)


def _kernels() -> list[str]:
    infos = lz.list_kernels("attention") if torch.cuda.is_available() else []
    return sorted({info.kernel_id for info in infos if info.available and "cuda" in info.platforms})


@pytest.mark.parametrize("kernel", _kernels())
def test_a_locked_kernel_serves_compiled_calls(kernel: str) -> None:
    made = [torch.randn(2, 64, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    if not lz.validate(kernel, *made)[0]:
        pytest.skip("it does not take the call")
    exact = lz.attention(*(tensor.double().cpu() for tensor in made))
    lz.force_kernel("attention.standard.prefill", kernel)
    try:
        with torch.no_grad():
            function = torch.compile(lambda *tensors: lz.attention(*tensors), fullgraph=True)
            for _ in range(2):
                torch.testing.assert_close(function(*made).double().cpu(), exact, rtol=3e-2, atol=3e-2)
    finally:
        lz.unforce_kernel("attention.standard.prefill")
    (call,) = lz.compile_report().calls
    assert call.kernel == kernel
