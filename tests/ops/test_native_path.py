"""Native kernels called from Python: right on any memory, nothing of Python's in between, and never where they would be
missed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layerzero import _native
from strategies import examples
from torch.autograd import forward_ad

KERNELS = ("lz_cpu.rms_norm", "lz_cpu.rms_norm.avx2", "lz_cpu.rms_norm.avx512")
#: One step of the result's dtype, relative, and one step of its smallest numbers.
STEP = {torch.float32: (4e-7, 1e-37), torch.float16: (1.1e-3, 6e-8), torch.bfloat16: (8e-3, 1e-37)}


def exact(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The definition in float64."""
    x = x.double()
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.double()


def check(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    want = exact(x, weight, eps)
    assert got.dtype == x.dtype and got.shape == x.shape and got.is_contiguous()
    rtol, atol = STEP[x.dtype]
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


@pytest.fixture(params=KERNELS)
def kernel(restored: None, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each native kernel in turn, as the one that serves; those this CPU cannot run are skipped."""
    name: str = request.param
    lz.force_kernel("norm.rms", name)
    try:
        lz.which("rms_norm", torch.ones(2, 8))
    except lz.NoKernelFoundError:
        pytest.skip("this CPU lacks the instructions")
    else:
        yield name
    finally:
        lz.unforce_kernel("norm.rms")


def python_calls(call: Callable[[], Any]) -> list[str]:
    """The Python functions a call runs."""
    seen: list[str] = []
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in seen if name not in ("<lambda>",)]


def test_no_python_code_runs_between_the_call_and_the_kernel(kernel: str) -> None:
    x, w = torch.randn(4, 64), torch.randn(64)
    # The first call of a process finds out how tensors are read; the next is decided.
    for _ in range(3):
        check(lz.rms_norm(x, w), x, w, 1e-6)
    assert python_calls(lambda: lz.rms_norm(x, w)) == []
    # The profile sees Python code where there is some.
    assert python_calls(lambda: torch.nn.functional.rms_norm(x, (64,), w)) != []


def test_any_memory(kernel: str) -> None:
    @examples(100)
    @given(
        dtype=st.sampled_from(list(STEP)),
        weight=st.sampled_from((None, *STEP)),
        shape=st.sampled_from(((5,), (3, 7), (2, 3, 64), (0, 4), (3, 0), (1, 600), (40, 2048))),
        way=st.sampled_from(("plain", "turned", "stepped", "apart", "offset")),
        seed=st.integers(0, 2**16),
    )
    def run(dtype: torch.dtype, weight: torch.dtype | None, shape: tuple[int, ...], way: str, seed: int) -> None:
        make = torch.Generator().manual_seed(seed)
        x = torch.randn(*shape, generator=make).to(dtype)
        if way == "turned" and len(shape) > 2:
            x = x.transpose(0, 1)
        elif way == "stepped":
            x = torch.cat([x, x], -1)[..., : shape[-1]]
        elif way == "apart":
            x = torch.stack([x, x], -1)[..., 0]
        elif way == "offset":
            x = torch.cat([x.flatten(), x.flatten()[:1]])[x.numel() % 2 :][: x.numel()].view(x.shape)
        w = None if weight is None else torch.randn(shape[-1], generator=make).to(weight)
        for _ in range(2):
            check(lz.rms_norm(x, w), x, w, 1e-6)

    run()


def test_results_are_new_and_nobody_elses(kernel: str) -> None:
    x = torch.randn(4, 64)
    results = [lz.rms_norm(x) for _ in range(5)]
    assert len({r.data_ptr() for r in results}) == 5
    assert all(type(r) is torch.Tensor and sys.getrefcount(r) <= 4 and not r.requires_grad for r in results)
    with torch.inference_mode():
        lz.rms_norm(x)
        assert lz.rms_norm(x).is_inference()


def test_a_negative_view_is_not_taken_for_its_memory(kernel: str) -> None:
    x = torch.randn(4, 64)
    turned = torch._neg_view(x)
    for _ in range(3):
        check(lz.rms_norm(x), x, None, 1e-6)
        check(lz.rms_norm(turned), -x, None, 1e-6)


def test_nobody_who_records_misses_it(restored: None) -> None:
    """A trace and forward derivatives see torch's operations and nothing else."""
    x, w = torch.randn(4, 64), torch.randn(64)
    if "lz_cpu.rms_norm" not in [c.kernel_id for c in lz.explain("rms_norm", x, w).candidates if c.accepted]:
        pytest.skip("the kernel is not here")
    with lz.prefer("lz_cpu"), lz.avoid("torch"):
        for _ in range(2):
            assert lz.which("rms_norm", x, w).kernel_id.startswith("lz_cpu")
            lz.rms_norm(x, w)
        before = lz.health().kernels["lz_cpu.rms_norm"]["failures"]
        traced = torch.jit.trace(lambda x: lz.rms_norm(x, w), (x,), check_trace=False)
        other = torch.randn(4, 64)
        check(traced(other), other, w, 1e-6)
        failures = lz.health().kernels["lz_cpu.rms_norm"]["failures"]
        assert failures == before, "that it cannot be recorded is nobody's failure"
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            tangent = forward_ad.unpack_dual(lz.rms_norm(dual, w)).tangent
        assert tangent is not None
        _, want = torch.func.jvp(lambda x: exact(x, w, 1e-6), (x.double(),), (torch.ones(4, 64).double(),))
        torch.testing.assert_close(tangent.double(), want, rtol=1e-4, atol=1e-5)


def test_large_calls_give_up_the_interpreter_and_share_the_work(kernel: str) -> None:
    """Many threads at once, each with tensors of its own: every result is right."""
    inputs = [torch.randn(257, 1024) for _ in range(4)]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not torch.allclose(lz.rms_norm(inputs[i]).double(), exact(inputs[i], None, 1e-6), rtol=1e-5):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_native_side_allocates_nothing(kernel: str, nothing_measured: None) -> None:
    if _native.allocations() is None:
        pytest.skip("this build does not count")
    x, w = torch.randn(4, 64), torch.randn(64)
    for _ in range(3):
        lz.rms_norm(x, w)
    before = _native.allocations() or 0
    for _ in range(100):
        lz.rms_norm(x, w)
    assert (_native.allocations() or 0) - before == 0
