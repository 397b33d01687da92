"""torch's own kernels in compiled models, called without Python: what they give, where they are candidates, what keeps them out."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
import torch.nn.functional as F
from exported_graphs import Function
from layerzero import _native
from torch import Tensor, nn

PRODUCTS = ["torch.mm", "torch.addmm", "torch.bmm", "torch.baddbmm"]
NAMES = [*PRODUCTS, "torch.sdpa.flash", "torch.convolution"]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def as_configured() -> Iterator[None]:
    yield
    lz.configure(rules=[])


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def attention(causal: bool = False, scale: float | None = None) -> Function:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)

    return Function(function)


CASES: dict[str, tuple[nn.Module, list[Tensor], str]] = {}


def case(name: str, kernel: str, model: nn.Module, *inputs: Tensor) -> None:
    CASES[name] = (model.double().eval(), list(inputs), kernel)


torch.manual_seed(0)
case("linear", "torch.addmm", nn.Linear(96, 80), drawn(5, 96))
case("linear-3d", "torch.addmm", nn.Linear(96, 80), drawn(2, 5, 96))
case("linear-row", "torch.addmm", nn.Linear(96, 80), drawn(96))
case("linear-no-bias", "torch.mm", nn.Linear(96, 80, bias=False), drawn(5, 96))
case("linear-gelu", "torch.addmm+gelu", nn.Sequential(nn.Linear(96, 80), nn.GELU()), drawn(5, 96))
case("matmul", "torch.mm", Function(lambda a, b: a @ b), drawn(7, 64), drawn(64, 9))
case("matmul-turned", "torch.mm", Function(lambda a, b: a.T @ b.T), drawn(64, 7), drawn(9, 64))
case("matmul-scaled", "torch.addmm", Function(lambda a, b: a @ b * 0.25), drawn(7, 64), drawn(64, 9))
case("batches", "torch.bmm", Function(lambda a, b: a @ b), drawn(3, 4, 7, 8), drawn(3, 4, 8, 9))
case("batches-scaled", "torch.baddbmm", Function(lambda a, b: a @ b * 0.25), drawn(6, 7, 8), drawn(6, 8, 9))
case("one-for-all", "copy+torch.bmm", Function(lambda a, b: a @ b), drawn(3, 1, 7, 8), drawn(4, 8, 9))
case("heads", "torch.bmm", Function(lambda a, b: a.transpose(1, 2) @ b.mT), drawn(1, 7, 3, 8), drawn(1, 3, 9, 8))
case("attention", "torch.sdpa.flash", attention(), *(drawn(2, 3, 9, 16) for _ in range(3)))
case("attention-causal", "torch.sdpa.flash", attention(causal=True, scale=0.4), *(drawn(2, 3, 9, 16) for _ in range(3)))
case("attention-longer", "torch.sdpa.flash", attention(causal=True), drawn(2, 3, 5, 16), *[drawn(2, 3, 9, 16)] * 2)
case("attention-mask", "torch.sdpa.flash", attention(), *(drawn(2, 3, 9, 16) for _ in range(3)), drawn(9, 9))
case("conv", "torch.convolution", nn.Conv2d(4, 6, 3, 2, 1, groups=2), drawn(2, 4, 9, 10))
case("conv-1d", "torch.convolution+relu", nn.Sequential(nn.Conv1d(4, 6, 3, dilation=2), nn.ReLU()), drawn(2, 4, 19))


def failures(compiled: Any, inputs: list[Tensor]) -> list[tuple[str, str, str]]:
    """Kernels that failed: the value, the kernel, and why."""
    found: list[tuple[str, str, str]] = compiled._variants[0].session.failures(inputs)
    return found


def step(compiled: Any) -> Any:
    """The step with the kernel of torch's, or the last one."""
    steps = compiled.explain()
    return next((one for one in steps if any("torch." in name for name in one.candidates)), steps[-1])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).partition(".")[2])
@pytest.mark.parametrize("name", CASES)
def test_they_give_what_float64_gives(name: str, dtype: torch.dtype) -> None:
    model, inputs, kernel = CASES[name]
    lz.configure(rules=[{"prefer": "torch"}])
    with torch.no_grad():
        expected = model(*inputs)
        rounded = [x.to(dtype) for x in inputs]
        if dtype != torch.float64:
            expected = model.to(dtype).double()(*[x.double() for x in rounded])
        compiled = lz.compile(model.to(dtype), *rounded, precision="float32")
        try:
            compiled(*rounded)
            found = step(compiled)
            assert kernel in found.candidates, found
            assert found.kernel == kernel, found
            result = compiled(*rounded)
            assert step(compiled).kernel == kernel, failures(compiled, rounded)
        finally:
            model.double()
    assert result.dtype == dtype
    limit = TOLERANCES[dtype] * max(1.0, float(expected.abs().max()))
    assert float((result.double() - expected).abs().max()) <= limit


def test_queries_without_keys_give_zero() -> None:
    q = drawn(1, 2, 4, 8)
    mask = torch.zeros(4, 4, dtype=torch.float64)
    mask[1] = -torch.inf
    compiled = lz.compile(attention().eval(), q, q, q, mask)
    with torch.no_grad():
        result = compiled(q, q, q, mask)
    assert step(compiled).kernel == "torch.sdpa.flash"
    assert bool((result[:, :, 1] == 0).all()) and bool(result.isfinite().all())


@pytest.mark.parametrize("rule", ["torch.addmm", "torch.*", "torch"])
def test_the_policy_names_them(rule: str) -> None:
    model, inputs, kernel = CASES["linear"]
    lz.configure(rules=[{"deny": rule}])
    denied = step(lz.compile(model, *inputs))
    assert not denied.kernel.startswith("torch.")
    assert kernel not in denied.candidates
    lz.configure(rules=[])
    assert step(lz.compile(model, *inputs)).kernel == kernel


@pytest.mark.parametrize("name", NAMES)
def test_their_names_are_known(name: str) -> None:
    lz.configure(rules=[{"deny": name}])
    with pytest.raises(lz.ConfigurationError, match="torch.addmm"):
        lz.configure(rules=[{"deny": "torch.admm"}])


def test_a_torch_that_rounds_float32_is_not_asked_to_multiply() -> None:
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    model = Function(lambda a, b: a @ b).eval()
    exact = a.double() @ b.double()
    compiled = lz.compile(model, a, b, precision="float32")
    before = step(compiled)
    assert before.kernel == "torch.mm", before
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.no_grad():
            torch.testing.assert_close(compiled(a, b).double(), exact, atol=1e-4, rtol=1e-4)
        after = step(compiled)
        assert after.kernel == "primitive.matmul" and "may round float32" in failures(compiled, [a, b])[0][2]
        made_then = step(lz.compile(model, a, b, precision="float32"))
        assert all("torch." not in name for name in made_then.candidates)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_measuring_times_them() -> None:
    """Each is among what was timed, and the reference, which is not, comes last."""
    model, inputs, kernel = CASES["attention"]
    found = step(lz.compile(model, *inputs, tune=True))
    assert kernel in found.candidates[:-1]
    assert found.candidates[-1] == "reference.attention"
    x = torch.randn(16, 96)
    layer = nn.Linear(96, 80).eval()
    tuned = step(lz.compile(layer, x, tune=True))
    # Measured kernels come before the reference, in the order of their times.
    assert "torch.addmm" in tuned.candidates[:-1] and tuned.candidates[-1] == "reference.linear"


def test_gradient_mode_is_as_before_and_nothing_requires_gradients() -> None:
    model, inputs, _ = CASES["linear"]
    compiled = lz.compile(model, *inputs)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert not compiled(*inputs).requires_grad
            assert torch.is_grad_enabled() == enabled
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*inputs), model(*inputs))


def test_threads_may_call_them_at_once() -> None:
    model, inputs, _ = CASES["batches"]
    compiled = lz.compile(model, *inputs)
    others = [[x * (i + 1) for x in inputs] for i in range(6)]
    results: list[Tensor | None] = [None] * len(others)

    def call(at: int) -> None:
        with torch.no_grad():
            for _ in range(50):
                results[at] = compiled(*others[at])

    threads = [threading.Thread(target=call, args=(at,)) for at in range(len(others))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for args, result in zip(others, results, strict=True):
        torch.testing.assert_close(result, model(*args))


def test_narrow_weights_are_not_read_wide() -> None:
    layer, x = nn.Linear(96, 80).eval(), torch.randn(5, 96)
    found = step(lz.compile(layer, x, weights="int8"))
    assert all("torch." not in name for name in found.candidates)


def test_a_plan_file_loads_where_a_kernel_is_denied(tmp_path: Any) -> None:
    model, inputs, kernel = CASES["linear"]
    path = lz.compile(model, *inputs).save(tmp_path / "one.plan")
    lz.configure(rules=[{"deny": kernel}])
    loaded = lz.load_plan(path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(*inputs), model(*inputs))
    assert not step(loaded).kernel.startswith("torch.")


CHILD = """
import layerzero as lz, torch
from layerzero import _native
from torch.utils._python_dispatch import TorchDispatchMode

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise RuntimeError("refused")

lz.gelu(torch.ones(2))  # torch is known from here on
with Mode():
    inside = _native.status()["graph_kernels"]
after = _native.status()["graph_kernels"]
print(any(inside.values()), any(after.values()))
"""


def test_what_torch_refuses_in_a_dispatch_mode_is_tried_again() -> None:
    """The first look happens in a mode that refuses every operation."""
    ran = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "False"], ran.stderr


def test_doctor_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    found = lz.doctor()
    assert list(_native.status()["graph_kernels"]) == NAMES
    assert f"torch's kernels that compiled models call without Python: {', '.join(NAMES)}\n" in str(found)
    assert capsys.readouterr().out
    lacking = dict(found.status, graph_kernels={"torch.mm": None, "torch.bmm": "why"}, graph_kernels_take_float32=False)
    from dataclasses import replace

    text = str(replace(found, status=lacking))
    assert "without Python: torch.mm\n  not torch.bmm: why\n  products and convolutions of float32 are left out" in text
