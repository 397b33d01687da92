"""Proof before trust: a kernel that is not built in serves only after it gave what the reference gives."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import layerzero as lz
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

KERNEL = "mine.kernel"


@pytest.fixture(autouse=True)
def removed() -> Iterator[None]:
    """Undoes what a test registered and configured."""
    lz.reset()
    lz.configure(verify="first_use")
    yield
    for kernel in {k.kernel_id for k in lz.list_kernels() if k.kernel_id.startswith("mine.")}:
        lz.unregister_kernel(kernel)
    lz.reset()


def register(operation: str, function: Callable[..., Any], kernel_id: str = KERNEL, **more: Any) -> None:
    """A test that expects a warning has an id of its own: of one kernel the same is said once a minute."""
    capabilities: dict[str, Any] = {
        "platform": "cpu",
        "supported_dtypes": [torch.float32, torch.bfloat16, torch.float16],
        "priority": 95,
        **more,
    }
    if not operation.startswith("attention"):
        capabilities.setdefault("layouts", ["strided"])
    lz.register_kernel(operation=operation, kernel_id=kernel_id, **capabilities)(function)


def served(function: str, *args: Any, **kwargs: Any) -> str:
    return str(lz.which(function, *args, **kwargs).kernel_id)


def rms(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = input.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x if weight is None else x * weight.double()).to(input.dtype)


def right_rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """The definition, in float64, rounded once."""
    return rms(x, weight, 1e-6)


def halved(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return input * 0.5


def test_the_issues_kernel_never_serves() -> None:
    register("norm.rms", halved, priority=50)
    x = torch.randn(4, 64)
    for _ in range(3):
        torch.testing.assert_close(lz.rms_norm(x), right_rms(x))
        torch.testing.assert_close(lz.rms_norm(x, torch.ones(64)), right_rms(x))
    assert served("rms_norm", x) != KERNEL


def test_a_tie_goes_to_the_kernel_that_is_built_in() -> None:
    x = torch.randn(4, 64)
    before = served("rms_norm", x)
    priority = next(k.priority for k in lz.list_kernels("norm.rms") if k.kernel_id == before)
    register("norm.rms", rms, priority=priority)
    assert served("rms_norm", x) == before
    lz.unregister_kernel(KERNEL)
    register("norm.rms", rms, priority=priority + 1)
    assert served("rms_norm", x) == KERNEL


def test_a_wrong_kernel_is_out_with_its_evidence() -> None:
    kernel = "mine.halved"
    register("norm.rms", halved, kernel)
    x = torch.randn(4, 64)
    with pytest.warns(lz.LayerZeroWarning, match="mine.halved gave wrong results"):
        torch.testing.assert_close(lz.rms_norm(x), right_rms(x))
    report = lz.explain("rms_norm", x).to_dict()
    (candidate,) = [c for c in report["candidates"] if c["kernel_id"] == kernel]
    (reason,) = candidate["reasons"]
    assert reason["code"] == "NUMERICAL_MISMATCH"
    assert reason["max_error"] > reason["tolerance"] > 0
    assert "norm.rms(rows=" in reason["call"]
    # For every other call of the operation as well, and for no other operation.
    for call in [(x, torch.ones(64)), (x.bfloat16(),), (torch.randn(2, 3, 8),)]:
        assert served("rms_norm", *call) != kernel
    health = lz.health()
    assert [w["kernel"] for w in health.wrong_results] == [kernel] and not health.well
    checks = {check.name: check for check in lz.readiness_check().checks}
    assert checks["results"].status == "fail" and kernel in checks["results"].detail


def test_a_right_kernel_serves_after_it_was_compared() -> None:
    calls = []

    def counted(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        calls.append(tuple(input.shape))
        return rms(input, weight, eps)

    register("norm.rms", counted)
    x = torch.randn(512, 4096)
    for _ in range(3):
        torch.testing.assert_close(lz.rms_norm(x), right_rms(x))
    assert served("rms_norm", x) == KERNEL
    assert calls.count((512, 4096)) == 3, "it serves every call"
    small = [shape for shape in calls if shape != (512, 4096)]
    assert small and all(np.prod(shape) < 2000 for shape in small), "it was compared on a small one"
    # Once per class, whatever the sizes.
    lz.rms_norm(torch.randn(2, 3, 40))
    assert len([shape for shape in calls if shape not in {(512, 4096), (2, 3, 40)}]) == len(small)
    lz.rms_norm(torch.randn(5, 4096))
    assert calls[-1] == (5, 4096)


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize(
    ("fault", "fine", "caught"),
    [
        (lambda x, w: w is None, lambda x, w: (x, w), lambda x, w: (x, None)),
        (lambda x, w: x.dtype == torch.bfloat16, lambda x, w: (x, w), lambda x, w: (x.bfloat16(), w.bfloat16())),
        (lambda x, w: not x.is_contiguous(), lambda x, w: (x, w), lambda x, w: (x.t().contiguous().t(), w)),
    ],
    ids=["without a weight", "in bfloat16", "on transposed memory"],
)
def test_what_is_wrong_only_at_times_is_caught_then(fault: Any, fine: Any, caught: Any) -> None:
    def kernel(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return rms(input, weight, eps) * (0.9 if fault(input, weight) else 1.0)

    register("norm.rms", kernel)
    x, weight = torch.randn(4, 64), torch.rand(64) + 0.5
    given, scale = fine(x, weight)
    torch.testing.assert_close(lz.rms_norm(given, scale), right_rms(given, scale))
    assert served("rms_norm", given, scale) == KERNEL
    bad, scale = caught(x, weight)
    torch.testing.assert_close(lz.rms_norm(bad, scale), right_rms(bad, scale), rtol=1e-2, atol=1e-2)
    assert served("rms_norm", bad, scale) != KERNEL
    # And no longer serves what it was right for.
    assert served("rms_norm", given, fine(x, weight)[1]) != KERNEL


class WrongBackward(torch.autograd.Function):
    """Right forward, half of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (right,) = torch.autograd.grad(F.silu(y), y, grad)
        return right / 2


def test_what_is_wrong_only_in_its_gradients_is_caught() -> None:
    def kernel(gate: Tensor, up: Tensor) -> Tensor:
        return WrongBackward.apply(gate) * up  # type: ignore[no-any-return,no-untyped-call]

    register("activation.silu_mul", kernel, autograd=True, supported_dtypes=[torch.float32])
    gate, up = torch.randn(4, 16), torch.randn(4, 16)
    lz.silu_mul(gate, up)
    assert served("silu_mul", gate, up) == KERNEL, "its results are right"
    gate.requires_grad_()
    lz.silu_mul(gate, up).sum().backward()
    wide = gate.detach().double().requires_grad_()
    (F.silu(wide) * up.double()).sum().backward()
    assert gate.grad is not None and wide.grad is not None
    torch.testing.assert_close(gate.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)
    assert served("silu_mul", gate, up) != KERNEL


def test_right_gradients_serve() -> None:
    def kernel(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    register("activation.silu_mul", kernel, autograd=True, supported_dtypes=[torch.float32, torch.bfloat16])
    for dtype in (torch.float32, torch.bfloat16):
        gate = torch.randn(4, 16, dtype=dtype, requires_grad=True)
        lz.silu_mul(gate, torch.randn(4, 16, dtype=dtype)).sum().backward()
        assert served("silu_mul", gate, torch.randn(4, 16, dtype=dtype)) == KERNEL


def sdpa(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
    q, k, v = (t.double().transpose(1, 2) for t in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return out.transpose(1, 2).to(query.dtype)


def test_what_is_wrong_only_without_causal_is_caught() -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
        return sdpa(query, key, value, True, scale)

    register("attention.standard.prefill", kernel, layouts=["BSHD"], supported_dtypes=[torch.float32])
    q, k, v = (torch.randn(2, 16, 4, 32) for _ in range(3))
    for causal in (True, False):
        got = lz.attention(q, k, v, causal=causal, layout="BSHD")
        torch.testing.assert_close(got, sdpa(q, k, v, causal, None), rtol=1e-5, atol=1e-5)
        assert (served("attention", q, k, v, causal=causal, layout="BSHD") == KERNEL) == causal
    assert served("attention", q, k, v, layout="BSHD") != KERNEL


def test_a_kernel_that_raises_while_it_is_compared_is_followed_by_the_next() -> None:
    def kernel(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        raise RuntimeError("no such luck")

    register("norm.rms", kernel, "mine.raises")
    x = torch.randn(4, 64)
    with pytest.warns(lz.LayerZeroWarning, match="no such luck"):
        torch.testing.assert_close(lz.rms_norm(x), right_rms(x))
    assert not lz.health().wrong_results, "it failed, which is not being wrong"


def test_a_kernel_that_raises_at_small_sizes_alone_is_compared_at_the_calls_own() -> None:
    def kernel(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if input.shape[-1] % 1024:
            raise RuntimeError("only multiples of 1024")
        return rms(input, weight, eps)

    register("norm.rms", kernel)
    x = torch.randn(4, 2048)
    torch.testing.assert_close(lz.rms_norm(x), right_rms(x))
    assert served("rms_norm", x) == KERNEL


def test_its_constraints_hold_for_the_small_call_too() -> None:
    seen = []

    def kernel(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        seen.append(tuple(input.shape))
        return rms(input, weight, eps)

    register("norm.rms", kernel, dims={"hidden": {"multiple_of": 256, "min": 512}, "rows": {"multiple_of": 4}})
    x = torch.randn(64, 8192)
    lz.rms_norm(x)
    assert served("rms_norm", x) == KERNEL
    assert all(rows % 4 == 0 and hidden % 256 == 0 and hidden >= 512 for rows, hidden in seen)
    assert (8, 512) in seen


def test_trusted_serves_at_once() -> None:
    register("norm.rms", halved, trusted=True)
    x = torch.randn(4, 64)
    torch.testing.assert_close(lz.rms_norm(x), x * 0.5)


def test_a_trusted_backend_serves_at_once_and_another_does_not() -> None:
    document = {
        "schema_version": "1.0",
        "backend": "mine",
        "backend_version": "1",
        "platform": "cpu",
        "ops": {
            "norm.rms": [
                {
                    "kernel_id": KERNEL,
                    "dtypes": ["float32"],
                    "requires_layouts": ["strided"],
                    "priority": 95,
                    "inputs": {"weight": {}},
                }
            ]
        },
    }
    x = torch.randn(4, 64)
    lz.register_backend(document, {KERNEL: halved}, trusted=True)
    torch.testing.assert_close(lz.rms_norm(x), x * 0.5)
    lz.unregister_kernel(KERNEL)
    lz.register_backend(document, {KERNEL: halved})
    torch.testing.assert_close(lz.rms_norm(x), right_rms(x))


def test_verify_off_serves_at_once() -> None:
    lz.configure(verify="off")
    register("norm.rms", halved)
    x = torch.randn(4, 64)
    torch.testing.assert_close(lz.rms_norm(x), x * 0.5)
    checks = {check.name: check.status for check in lz.readiness_check().checks}
    assert checks["results"] == "warn"


def test_sampling_finds_a_trusted_kernel_wrong() -> None:
    lz.configure(verify="sample", health={"sample_every": 1})
    register("norm.rms", halved, trusted=True)
    x = torch.randn(4, 64)
    lz.rms_norm(x)
    torch.testing.assert_close(lz.rms_norm(x), right_rms(x))
    assert served("rms_norm", x) != KERNEL
    assert "sampled" in lz.health().wrong_results[0]["error"]


def test_a_lock_on_a_wrong_kernel_is_a_short_error() -> None:
    register("norm.rms", halved)
    lz.force_kernel("rms_norm", KERNEL)
    x = torch.randn(4, 64)
    for _ in range(2):
        with pytest.raises(lz.NoKernelFoundError, match="NUMERICAL_MISMATCH"):
            lz.rms_norm(x)


def test_it_is_compared_again_when_failures_are_forgotten_or_it_is_registered_anew() -> None:
    right = False

    def kernel(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return rms(input, weight, eps) if right else input

    register("norm.rms", kernel)
    x = torch.randn(4, 64)
    lz.rms_norm(x)
    assert served("rms_norm", x) != KERNEL
    right = True
    lz.rms_norm(x)
    assert served("rms_norm", x) != KERNEL, "nobody asked"
    lz.forget_failures()
    lz.rms_norm(x)
    assert served("rms_norm", x) == KERNEL
    assert not lz.health().wrong_results


def test_random_numbers_and_inputs_of_the_caller_are_left_alone() -> None:
    def kernel(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        torch.rand(7)
        random.random()
        np.random.rand(3)
        input.mul_(1.0)
        return rms(input, weight, eps)

    def draws() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()

    x = torch.randn(4, 64)

    def drawn(calls: int) -> tuple[Any, ...]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        for _ in range(calls):
            lz.rms_norm(x)
        return draws()

    register("norm.rms", kernel)
    first = drawn(1)
    # The first call compared and served, this one serves alone: the kernel's own draws are the same.
    assert first == drawn(1)
    assert served("rms_norm", x) == KERNEL


def test_a_kernel_that_writes_to_its_input_is_wrong() -> None:
    def kernel(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        result = rms(input, weight, eps)
        input.add_(1.0)
        return result

    register("norm.rms", kernel)
    x = torch.randn(4, 64)
    kept = x.clone()
    torch.testing.assert_close(lz.rms_norm(x), right_rms(kept))
    assert torch.equal(x, kept)


def test_inference_mode_autocast_and_no_grad_do_not_disturb() -> None:
    register("norm.rms", rms)
    x = torch.randn(4, 64)
    with torch.inference_mode():
        torch.testing.assert_close(lz.rms_norm(x), right_rms(x))
    assert served("rms_norm", x) == KERNEL


def test_while_one_thread_compares_another_uses_the_next() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def kernel(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        inside.set()
        assert go_on.wait(60)
        return rms(input, weight, eps)

    register("norm.rms", kernel)
    x = torch.randn(4, 64)
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(lz.rms_norm(x)))
    thread.start()
    assert inside.wait(60)
    torch.testing.assert_close(lz.rms_norm(x), right_rms(x))
    go_on.set()
    thread.join(60)
    torch.testing.assert_close(results[0], right_rms(x))
    assert served("rms_norm", x) == KERNEL


def test_many_threads_see_no_wrong_result() -> None:
    register("norm.rms", halved)
    wrong: list[Tensor] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        x = torch.randn(4, 64)
        barrier.wait(60)
        for _ in range(20):
            got = lz.rms_norm(x)
            if not torch.allclose(got, right_rms(x), rtol=1e-4, atol=1e-4):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong


def test_a_locked_kernel_is_waited_for() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def kernel(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        inside.set()
        assert go_on.wait(60)
        return rms(input, weight, eps)

    register("norm.rms", kernel)
    lz.force_kernel("rms_norm", KERNEL)
    x = torch.randn(4, 64)
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(lz.rms_norm(x))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert inside.wait(60)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2
    for result in results:
        torch.testing.assert_close(result, right_rms(x))


# --- any fault, any operation -------------------------------------------------------------------


def scaled(result: Tensor) -> Tensor:
    return result * 1.05


def transposed(result: Tensor) -> Tensor:
    flat = result.reshape(-1)
    return flat.flip(0).reshape(result.shape)


def off_by_one_row(result: Tensor) -> Tensor:
    return result.roll(1, 0)


def one_nan(result: Tensor) -> Tensor:
    result = result.clone()
    result.reshape(-1)[-1] = float("nan")
    return result


def wrong_dtype(result: Tensor) -> Tensor:
    return result.double()


FAULTS = [scaled, transposed, off_by_one_row, one_nan, wrong_dtype]


def gelu(input: Tensor, approximate: str) -> Tensor:
    return F.gelu(input, approximate=approximate)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input, weight, bias)


def layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(input, input.shape[-1:], weight, bias, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(indices, weight)


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
    return sdpa(query, key, value, causal, scale)


#: Function, operation, a right kernel of it, and arguments for a number of rows and a width.
OPERATIONS: dict[str, tuple[str, Callable[..., Tensor], Callable[[int, int], dict[str, Any]]]] = {
    "rms_norm": ("norm.rms", rms, lambda n, w: {"input": torch.randn(n, w)}),
    "layer_norm": ("norm.layer", layer_norm, lambda n, w: {"input": torch.randn(n, w), "normalized_shape": (w,)}),
    "gelu": ("activation.gelu", gelu, lambda n, w: {"input": torch.randn(n, w)}),
    "silu_mul": ("activation.silu_mul", silu_mul, lambda n, w: {"gate": torch.randn(n, w), "up": torch.randn(n, w)}),
    "linear": ("mlp.linear", linear, lambda n, w: {"input": torch.randn(n, w), "weight": torch.randn(7, w)}),
    "embedding": (
        "embedding.lookup",
        embedding,
        lambda n, w: {"indices": torch.arange(n) % 11, "weight": torch.randn(11, w)},
    ),
    "attention": (
        "attention.standard.prefill",
        attention,
        lambda n, w: {name: torch.randn(1, n + 1, 2, 16) for name in ("query", "key", "value")} | {"layout": "BSHD"},
    ),
}


@settings(max_examples=60)
@given(
    function=st.sampled_from(sorted(OPERATIONS)),
    fault=st.sampled_from(FAULTS),
    rows=st.integers(2, 9),
    width=st.sampled_from([8, 24, 64, 200]),
)
def test_no_faulty_kernel_serves(function: str, fault: Callable[[Tensor], Tensor], rows: int, width: int) -> None:
    operation, right, arguments = OPERATIONS[function]
    names = right.__code__.co_varnames[: right.__code__.co_argcount]
    source = f"def kernel({', '.join(names)}): return fault(right({', '.join(names)}))"
    space: dict[str, Any] = {"fault": fault, "right": right}
    exec(source, space)  # noqa: S102 - a kernel that names its operation's arguments
    kwargs = arguments(rows, width)
    before = getattr(lz, function)(**kwargs)
    layouts = ["BSHD"] if function == "attention" else ["strided"]
    register(operation, space["kernel"], layouts=layouts, supported_dtypes=[torch.float32])
    try:
        for _ in range(2):
            after = getattr(lz, function)(**kwargs)
            torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
        if fault is not wrong_dtype:
            assert served(function, **kwargs) != KERNEL
    finally:
        lz.unregister_kernel(KERNEL)
        lz.forget_failures()


@pytest.mark.parametrize("function", sorted(OPERATIONS))
def test_the_same_kernels_without_a_fault_serve(function: str) -> None:
    operation, right, arguments = OPERATIONS[function]
    layouts = ["BSHD"] if function == "attention" else ["strided"]
    kwargs = arguments(5, 24)
    before = getattr(lz, function)(**kwargs)
    register(operation, right, layouts=layouts, supported_dtypes=[torch.float32])
    torch.testing.assert_close(getattr(lz, function)(**kwargs), before, rtol=1e-5, atol=1e-5)
    assert served(function, **kwargs) == KERNEL, lz.explain(function, **kwargs)


# --- wrong results that others find -----------------------------------------------------------------------------------


def reasons_of(function: str, *args: Any) -> list[str]:
    (candidate,) = [c for c in lz.explain(function, *args).candidates if c.kernel_id == KERNEL]
    return [reason.code for reason in candidate.reasons]


def test_nan_that_checked_mode_finds_removes_the_kernel() -> None:
    def undefined(input: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return rms(input, weight, eps) if input.shape[-1] != 6 else torch.full_like(input, torch.nan)

    register("norm.rms", undefined, trusted=True)
    lz.configure(checked=True)
    x = torch.randn(4, 6)
    torch.testing.assert_close(lz.rms_norm(x), right_rms(x))
    (wrong,) = lz.health().wrong_results
    assert wrong["kernel"] == KERNEL and "NaN" in wrong["error"]
    # No call of the operation, whatever its sizes; not even where nobody checks.
    lz.configure(checked=False)
    assert reasons_of("rms_norm", torch.randn(2, 8)) == ["NUMERICAL_MISMATCH"]
    lz.forget_failures()
    assert served("rms_norm", torch.randn(2, 8)) == KERNEL


def test_what_tuning_finds_counts_without_a_database() -> None:
    register("norm.rms", halved, trusted=True, dims={"hidden": {}})
    lz.configure(perfdb={"enabled": False})
    call = {"op": "norm.rms", "tensors": {"input": {"dtype": "float32", "shape": [4, 64]}}}
    report = lz.tune(calls=[call], budget="2s")
    assert KERNEL in dict(report.tuned[0].out)
    x = torch.randn(4, 64)
    assert reasons_of("rms_norm", x) == ["NUMERICAL_MISMATCH"]
    assert [wrong["kernel"] for wrong in lz.health().wrong_results] == [KERNEL]
    torch.testing.assert_close(lz.rms_norm(x), right_rms(x))
