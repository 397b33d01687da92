"""Compiled blocks on a GPU: the same results as in torch, in every mode; and the kernels that libraries bring.

Run it with ``PYTHONPATH=python pytest --confcutdir=tests/gpu tests/gpu/test_gpu_compile.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def forced(operation: str, kernel: str) -> Iterator[None]:
    """Has one kernel serve an operation."""
    lz.force_kernel(operation, kernel)
    try:
        yield
    finally:
        lz.unforce_kernel(operation)


@pytest.mark.parametrize("kernel", _kernels())
def test_a_locked_kernel_serves_compiled_calls(kernel: str) -> None:
    made = [torch.randn(2, 64, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    if not lz.validate(kernel, *made)[0]:
        pytest.skip("it does not take the call")
    exact = lz.attention(*(tensor.double().cpu() for tensor in made))
    with torch.no_grad(), forced("attention.standard.prefill", kernel):
        function = torch.compile(lambda *tensors: lz.attention(*tensors), fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(function(*made).double().cpu(), exact, rtol=3e-2, atol=3e-2)
    (call,) = lz.compile_report().calls
    assert call.kernel == kernel


#: Calls that our own Triton kernels serve: the kernel, query heads, key heads, queries, keys, and how.
LAUNCHED = {
    "window": ("triton.attention.gqa", 8, 2, 96, 96, {"causal": True, "window": 40}),
    "softcap": ("triton.attention.gqa", 8, 2, 96, 96, {"causal": True, "softcap": 20.0}),
    "plain": ("triton.attention", 4, 4, 70, 130, {"causal": False}),
    "decode": ("triton.decode.gqa", 8, 2, 1, 700, {}),
    "capped decode": ("triton.decode", 4, 4, 1, 300, {"softcap": 20.0, "window": 128}),
}


def _tensors(heads: int, kv_heads: int, seq_q: int, seq_k: int, layout: str) -> list[torch.Tensor]:
    made = [
        torch.randn(2, length, many, 64, device="cuda", dtype=torch.bfloat16)
        for length, many in ((seq_q, heads), (seq_k, kv_heads), (seq_k, kv_heads))
    ]
    return [one.transpose(1, 2) for one in made] if layout == "BHSD" else made


def _exact(tensors: list[torch.Tensor], layout: str, how: dict[str, object]) -> torch.Tensor:
    """Attention in float64, by the definition."""
    q, k, v = (one.double() if layout == "BHSD" else one.double().transpose(1, 2) for one in tensors)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if "softcap" in how:
        scores = float(how["softcap"]) * torch.tanh(scores / float(how["softcap"]))  # type: ignore[arg-type]
    at = torch.arange(q.shape[2], device="cuda")[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2], device="cuda")
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device="cuda")
    if how.get("causal"):
        allowed &= key <= at
    if "window" in how:
        allowed &= key >= at - int(how["window"])  # type: ignore[call-overload]
    y = torch.softmax(scores.masked_fill(~allowed, float("-inf")), -1) @ v
    return y if layout == "BHSD" else y.transpose(1, 2)


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", LAUNCHED)
def test_our_kernels_are_launched_by_the_compiled_code(case: str, dynamic: bool, layout: str) -> None:
    kernel, heads, kv_heads, seq_q, seq_k, how = LAUNCHED[case]
    operation = f"attention.{'gqa' if heads != kv_heads else 'standard'}.{'decode' if seq_q == 1 else 'prefill'}"

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Neighbours, so that memory before and after the kernel is the compiler's.
        return lz.attention(q + 0.0, k, v, layout=layout, **how) * 2.0

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic)
    lengths = (seq_k, seq_k + 17, seq_k + 64) if dynamic else (seq_k,)
    with torch.no_grad(), forced(operation, kernel):
        for length in lengths:
            queries = seq_q if seq_q == 1 else seq_q + length - seq_k
            tensors = _tensors(heads, kv_heads, queries, length, layout)
            for _ in range(2):
                result = compiled(*tensors)
            torch.testing.assert_close(result.double() / 2.0, _exact(tensors, layout, how), rtol=2e-2, atol=2e-2)
    seen = {(row.lowered_to, row.kernel) for row in lz.compile_report().calls}
    assert seen == {("launch", kernel)}, lz.compile_report()


def test_rows_that_cannot_be_loaded_at_once_are_called_as_an_operator() -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        return lz.attention(q, q, q, layout="BSHD", causal=True)

    q = torch.randn(1, 64, 4, 65, device="cuda", dtype=torch.bfloat16)[..., 1:]
    with torch.no_grad(), forced("attention.standard.prefill", "triton.attention"):
        result = torch.compile(call, fullgraph=True)(q)
    torch.testing.assert_close(result.double(), _exact([q, q, q], "BSHD", {"causal": True}), rtol=2e-2, atol=2e-2)
    assert {row.lowered_to for row in lz.compile_report().calls} <= {"kernel", "operator"}
