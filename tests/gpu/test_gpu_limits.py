"""The limits of a GPU: memory that is full or only held, and batches beyond what a launch can have."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
from layerzero import _native, memory
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GIB = 1 << 30


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()
    _native.refresh_memory()
    lz.forget_failures()


def decode_inputs(batch: int, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """One query per sequence over 512 tokens, in the order batch, sequence, heads, element."""
    shapes = ((batch, 1, 8, 64), (batch, 512, kv_heads, 64), (batch, 512, kv_heads, 64))
    q, k, v = (torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    return q, k, v


def decoded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[2] // k.shape[2]
    wide = [t.double().transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))]
    weights = (wide[0] @ wide[1].transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
    return (weights @ wide[2]).transpose(1, 2)


def accepted(kernel: str, *tensors: Tensor) -> tuple[bool, int | None]:
    explained = lz.explain("attention", *tensors, causal=False)
    candidate = next(c for c in explained.candidates if c.kernel_id == kernel)
    return not any(r.code == "MEMORY_HEADROOM_EXCEEDED" for r in candidate.reasons), explained.available_bytes


def test_memory_that_torch_holds_unused_is_available() -> None:
    q, k, v = decode_inputs(4)
    # Devices are known from the first call on.
    lz.which("attention", q, k, v, causal=False)
    free, total = torch.cuda.mem_get_info()
    block = torch.empty(max(free - total // 20, 1), dtype=torch.uint8, device="cuda")
    size = block.numel()
    del block
    _native.refresh_memory()
    told = memory.held(1)
    assert told is not None
    driver_free, unused, largest = told
    assert unused >= size and largest >= size and driver_free < total // 10
    fits, available = accepted("triton.decode.gqa", q, k, v)
    assert fits and available is not None and available > total // 2


def test_a_full_device_leaves_no_workspace_and_the_call_is_right() -> None:
    q, k, v = decode_inputs(4)
    expected = decoded(q, k, v)
    # Devices are known from the first call on.
    lz.which("attention", q, k, v, causal=False)
    # What torch holds unused is available, too.
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    filled = torch.empty(max(free - GIB // 4, 1), dtype=torch.uint8, device="cuda")
    _native.refresh_memory()
    fits, available = accepted("triton.decode.gqa", q, k, v)
    assert not fits and available == 0
    torch.testing.assert_close(lz.attention(q, k, v, causal=False).double(), expected, rtol=0.03, atol=0.03)
    del filled


def test_a_remembered_call_follows_memory() -> None:
    q, k, v = decode_inputs(4)
    with lz.prefer("triton"):
        for _ in range(3):
            lz.attention(q, k, v, causal=False)
        calls = {kernel["kernel"]: kernel["calls"] for kernel in lz.health().to_dict()["kernels"]}
        free, _ = torch.cuda.mem_get_info()
        filled = torch.empty(max(free - GIB // 2, 1), dtype=torch.uint8, device="cuda")
        _native.refresh_memory()
        for _ in range(3):
            y = lz.attention(q, k, v, causal=False)
        now = {kernel["kernel"]: kernel["calls"] for kernel in lz.health().to_dict()["kernels"]}
    assert now.get("triton.decode.gqa", 0) == calls.get("triton.decode.gqa", 0)
    del filled
    torch.testing.assert_close(y.double(), decoded(q, k, v), rtol=0.03, atol=0.03)


def test_calls_do_not_look_at_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    stats = torch.cuda.memory_stats

    def counted(*arguments: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        return stats(*arguments, **named)

    monkeypatch.setattr(torch.cuda, "memory_stats", counted)
    x = torch.randn(4, 256, dtype=torch.bfloat16, device="cuda")
    for _ in range(5000):
        lz.rms_norm(x)
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("kernel", ["torch.cuda.sdpa.flash", "torch.cuda.sdpa.efficient"])
def test_a_batch_beyond_the_grid_is_split(kernel: str) -> None:
    q, k, v = (torch.randn(70_000, 2, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    lz.force_kernel("attention.standard.prefill", kernel)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            y = lz.attention(q, k, v, causal=False)
    finally:
        lz.unforce_kernel("attention.standard.prefill")
    assert len(said) <= 1 and all("split into 2 pieces" in str(w.message) for w in said)
    rows = torch.tensor([0, 34_999, 35_000, 65_535, 65_536, 69_999], device="cuda")
    expected = decoded(q[rows], k[rows], v[rows])
    torch.testing.assert_close(y[rows].double(), expected, rtol=0.03, atol=0.03)


def test_a_batch_beyond_the_grid_is_served_by_whoever_can() -> None:
    q, k, v = (torch.randn(70_000, 2, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    y = lz.attention(q, k, v, causal=False)
    rows = torch.tensor([0, 65_535, 65_536, 69_999], device="cuda")
    torch.testing.assert_close(y[rows].double(), decoded(q[rows], k[rows], v[rows]), rtol=0.03, atol=0.03)
