"""`torch.nn.attention.sdpa_kernel` means for LayerZero what it means for torch: only what it allows computes attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

MATH, FLASH = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
EFFICIENT, CUDNN, OVERRIDEABLE = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.OVERRIDEABLE

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")


def operands(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*(shape or (2, 4, 33, 16)), generator=generator, dtype=dtype) for _ in range(3))
    return q, k, v


def ran(call: Callable[[], Any]) -> set[str]:
    """Which of torch's implementations of attention a call runs, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        call()
    names = {event.name for event in profile.events()}
    return {name for name in names if "_attention_math" in name or "_flash_attention" in name}


@pytest.mark.parametrize(
    ("backends", "more"),
    [
        (MATH, {}),
        (FLASH, {}),
        ([FLASH, MATH], {}),
        ([MATH, FLASH], {"set_priority": True}),
        ([FLASH, MATH], {"set_priority": True}),
        ([EFFICIENT, CUDNN, MATH], {}),
        ([CUDNN, FLASH, EFFICIENT, MATH], {"set_priority": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_runs_is_what_torch_runs(backends: Any, more: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = operands(dtype=dtype)
    for causal in (False, True):
        # Remembered outside: the context must not be served from it, nor the calls after it from the context.
        for _ in range(3):
            lz.attention(q, k, v, causal=causal, layout="BHSD")
        outside = lz.which("attention", q, k, v, causal=causal, layout="BHSD").kernel_id
        with sdpa_kernel(backends, **more):
            torchs = ran(lambda causal=causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
            assert torchs
            if more and backends[0] is MATH:
                # On a CPU torch itself does not follow the order; LayerZero does.
                torchs = {"aten::_scaled_dot_product_attention_math"}
            for _ in range(3):
                found = ran(lambda causal=causal: lz.attention(q, k, v, causal=causal, layout="BHSD"))
                assert found == torchs
                assert ran(lambda causal=causal: lz.scaled_dot_product_attention(q, k, v, is_causal=causal)) == torchs
            expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            assert torch.allclose(lz.scaled_dot_product_attention(q, k, v, is_causal=causal), expected, atol=2e-2)
        assert lz.which("attention", q, k, v, causal=causal, layout="BHSD").kernel_id == outside


def test_other_threads_see_it_as_torch_does() -> None:
    # torch keeps what is allowed for the process.
    import threading

    q, k, v = operands()
    found: list[set[str]] = []
    with sdpa_kernel(MATH):
        thread = threading.Thread(target=lambda: found.append(ran(lambda: lz.attention(q, k, v, layout="BHSD"))))
        thread.start()
        thread.join()
    assert found[0] == {"aten::_scaled_dot_product_attention_math"}


def test_explanations_say_why() -> None:
    q, k, v = operands()
    with sdpa_kernel(MATH):
        report = lz.explain("attention", q, k, v, layout="BHSD")
    text = str(report)
    assert report.chosen == "torch.sdpa.math"
    assert "the first that can serve the call of those that torch's sdpa_kernel allows (MATH)" in text
    reasons = {c.kernel_id: [r.code for r in c.reasons] for c in report.candidates if not c.accepted}
    assert "SDPA_BACKEND_DISABLED" in reasons["torch.sdpa.flash"]
    assert "SDPA_BACKEND_DISABLED" in reasons["lz_cpu.ref.attention.standard.prefill"]
    assert "is OVERRIDEABLE to torch's sdpa_kernel, which allows MATH here" in text
    assert "SDPA" not in str(lz.explain("attention", q, k, v, layout="BHSD"))


def test_what_nobody_allowed_can_serve_is_refused_as_torch_refuses_it() -> None:
    q, k, v = operands()
    lz.attention(q, k, v, layout="BHSD")
    with sdpa_kernel(EFFICIENT):
        with pytest.raises(RuntimeError, match="No viable backend|No available kernel"):
            F.scaled_dot_product_attention(q, k, v)
        with pytest.raises(lz.NoKernelFoundError, match="sdpa_kernel, which allows EFFICIENT_ATTENTION here"):
            lz.attention(q, k, v, layout="BHSD")
    # Softcap is what none of torch's flash kernels has.
    with sdpa_kernel(FLASH), pytest.raises(lz.NoKernelFoundError, match="FLASH_ATTENTION"):
        lz.attention(q, k, v, softcap=5.0, layout="BHSD")


def test_plain_torch_is_math() -> None:
    q, k, v = operands(dtype=torch.float64)
    scores = 5.0 * torch.tanh(q @ k.transpose(-1, -2) / 4.0 / 5.0)
    later = torch.ones(33, 33, dtype=torch.bool).triu(1)
    expected = torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ v
    with sdpa_kernel(MATH):
        assert not ran(lambda: lz.attention(q, k, v, causal=True, softcap=5.0, layout="BHSD"))
        assert (
            lz.which("attention", q, k, v, causal=True, softcap=5.0, layout="BHSD").kernel_id
            == "torch.attention.unfused"
        )
        assert torch.allclose(lz.attention(q, k, v, causal=True, softcap=5.0, layout="BHSD"), expected)


@contextmanager
def a_kernel_of_ones_own() -> Iterator[list[int]]:
    calls: list[int] = []

    @lz.register_kernel(
        operation="attention",
        kernel_id="mine.attention",
        platform="cpu",
        supported_dtypes=[torch.float32],
        layouts=["BHSD"],
        priority=99,
        trusted=True,
        dims={"head_dim": {}},
    )
    def own(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, layout: str) -> Tensor:
        calls.append(1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)

    try:
        yield calls
    finally:
        lz.unregister_kernel("mine.attention")


def test_kernels_that_are_not_torchs_are_overrideable() -> None:
    q, k, v = operands()
    with a_kernel_of_ones_own() as calls:
        lz.attention(q, k, v, layout="BHSD")
        assert len(calls) == 1
        with sdpa_kernel([MATH, FLASH]):
            lz.attention(q, k, v, layout="BHSD")
        assert len(calls) == 1
        with sdpa_kernel([MATH, OVERRIDEABLE]):
            lz.attention(q, k, v, layout="BHSD")
        assert len(calls) == 2


def test_a_backend_that_is_switched_off_leaves_the_others() -> None:
    # `torch.backends.cuda.enable_cudnn_sdp(False)` is no wish for torch's kernels alone.
    q, k, v = operands()
    with a_kernel_of_ones_own() as calls:
        torch.backends.cuda.enable_flash_sdp(False)
        try:
            lz.attention(q, k, v, layout="BHSD")
            report = lz.explain("attention", q, k, v, layout="BHSD")
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
        assert len(calls) == 1
    flash = next(c for c in report.candidates if c.kernel_id == "torch.sdpa.flash")
    assert [r.code for r in flash.reasons] == ["SDPA_BACKEND_DISABLED"]


def test_attention_that_torchs_function_does_not_compute_is_as_before() -> None:
    q, k, v = (tensor.transpose(1, 2).reshape(-1, 4, 16) for tensor in operands())
    ends = torch.tensor([0, 30, 66], dtype=torch.int32)

    def call() -> Tensor:
        out: Tensor = lz.varlen_attention(q, k, v, ends, ends, 36, 36, causal=True)
        return out

    expected = call()
    with sdpa_kernel(EFFICIENT):
        assert torch.equal(call(), expected)


def test_a_lock_and_the_context_must_agree() -> None:
    q, k, v = operands()
    lz.force_kernel("attention", "torch.sdpa.flash")
    try:
        with sdpa_kernel(FLASH):
            lz.attention(q, k, v, layout="BHSD")
        with sdpa_kernel(MATH), pytest.raises(lz.NoKernelFoundError, match="allows MATH here"):
            lz.attention(q, k, v, layout="BHSD")
    finally:
        lz.unforce_kernel("attention")


def test_gradients_and_autocast() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in operands())
    with sdpa_kernel(MATH):
        assert ran(lambda: lz.attention(q, k, v, layout="BHSD").sum().backward()) == {
            "aten::_scaled_dot_product_attention_math"
        }
        with torch.autocast("cpu", torch.bfloat16):
            assert ran(lambda: lz.attention(q, k, v, layout="BHSD")) == {"aten::_scaled_dot_product_attention_math"}


def test_compiled_inside_of_the_function_and_around_it() -> None:
    q, k, v = operands()

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(MATH):
            return lz.attention(q, k, v, layout="BHSD")

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lz.attention(q, k, v, layout="BHSD")

    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    torch._dynamo.reset()
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    with sdpa_kernel(MATH):
        compiled(q, k, v)
        assert flash not in ran(lambda: compiled(q, k, v))
    torch._dynamo.reset()
    assert ran(lambda: torch.compile(plain, backend="aot_eager", fullgraph=True)(q, k, v)) >= {flash}
    compiled = torch.compile(inside, backend="aot_eager")
    assert torch.allclose(compiled(q, k, v), expected, atol=1e-5)
    assert flash not in ran(lambda: compiled(q, k, v))
