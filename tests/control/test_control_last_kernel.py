"""Caution never takes the last kernel away: levels, open circuits and broken siblings leave every call served that was
served before. Experiments and the caller's mistakes lower nobody's health."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import layerzero as lz
import pytest
import torch
from faults import plugin
from faults.states import events, fresh, last_event
from gradients import gradients
from layerzero import _native
from test_control_faults import OPERATIONS, sample_calls
from torch import Tensor
from torch_cases import DIFFERENTIABLE, Case, as_tuple, assert_right, copied, doubled, expected

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")

X = torch.linspace(-2.0, 2.0, 64).reshape(4, 16)
RMS: dict[str, Any] = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"]}
LEVELS = {
    "full": (0, 0, 0, 0),
    "reduced": (90, 0, 0, 0),
    "cached": (90, 90, 0, 0),
    "rule_based": (90, 90, 90, 0),
    "minimal": (90, 90, 90, 90),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Nothing of one test is left for the next."""
    fresh()
    yield
    fresh()


def degraded(level: str) -> None:
    """Brings the process to a level, by calls that nobody could serve."""
    names = ("reduced_health", "cached_health", "rule_based_health", "minimal_health")
    limits = dict(zip(names, LEVELS[level], strict=True))
    fresh(degradation={"min_calls": 5, "window_ms": 3_600_000, **limits}, breaker__enabled=False)

    def failing(input: Tensor, eps: float) -> Tensor:
        raise RuntimeError("broken")

    lz.register_kernel(kernel_id="failing.norm", priority=99, **RMS)(failing)
    try:
        for _ in range(6):
            lz.rms_norm(X)
    finally:
        lz.unregister_kernel("failing.norm")
    assert lz.health().level == level


@pytest.mark.parametrize("level", LEVELS)
def test_every_call_is_served_at_every_level(level: str) -> None:
    degraded(level)
    for case in sample_calls().values():
        args, kwargs = copied(case.make(5))
        result = as_tuple(case.call(*args, **kwargs))
        assert_right((*result, *(args[at] for at in case.updates)), expected(case))
    assert lz.health().level == level


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.id)
def test_every_gradient_is_there_at_every_level(case: Case, level: str) -> None:
    degraded(level)
    for a, b in zip(gradients(case, case.call), gradients(case, case.reference, doubled), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4)


def test_switched_off_gradients_are_plain_torchs() -> None:
    fresh(enabled=False)
    x = X.clone().requires_grad_()
    assert lz.which("gelu", X).kernel_id == "lz_cpu.ref.activation.gelu"
    assert lz.which("gelu", x).kernel_id == "torch.gelu"
    lz.gelu(x).sum().backward()
    y = X.double().requires_grad_()
    torch.nn.functional.gelu(y).sum().backward()
    assert x.grad is not None and y.grad is not None
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-6)


# --- experiments ------------------------------------------------------------------------------------------------------


def _raises(input: Tensor, eps: float) -> Tensor:
    raise RuntimeError("an experiment")


def _gives_nothing(input: Tensor, eps: float) -> Any:
    return None


@pytest.mark.parametrize("body", [_raises, _gives_nothing])
def test_a_kernel_that_is_run_by_name_moves_nothing(body: Callable[..., Any]) -> None:
    lz.register_kernel(kernel_id="tried.norm", priority=1, **RMS)(body)
    since = last_event()
    try:
        for n in range(60):
            with pytest.raises(lz.KernelExecutionError) as caught:
                lz.run_kernel("tried.norm", X)
            assert list(caught.value.failures) == ["tried.norm"], n
            assert "circuit" not in str(caught.value), n
        health = lz.health()
        assert health.level == "full" and health.score == 100.0 and health.well
        assert events(since) == [] and health.kernels["tried.norm"]["failures"] == 0
        assert all(b["state"] == "closed" and b["failures"] == 0 for b in health.breakers)
    finally:
        lz.unregister_kernel("tried.norm")


def test_a_kernel_is_run_by_name_although_its_circuit_is_open() -> None:
    broken = [True]

    def sometimes(input: Tensor, eps: float) -> Tensor:
        if broken:
            raise RuntimeError("broken")
        return input * torch.rsqrt(input.square().mean(-1, keepdim=True) + eps)

    lz.register_kernel(kernel_id="open.norm", priority=99, **RMS)(sometimes)
    try:
        for _ in range(6):
            lz.rms_norm(X)
        assert [b["state"] for b in lz.health().breakers if b["kernel"] == "open.norm"] == ["open"]
        broken.clear()
        torch.testing.assert_close(lz.run_kernel("open.norm", X), lz.rms_norm(X))
        assert [b["state"] for b in lz.health().breakers if b["kernel"] == "open.norm"] == ["open"]
    finally:
        lz.unregister_kernel("open.norm")


def test_a_mistake_of_the_callers_blames_nobody() -> None:
    """A kernel that fails on bad data first is not to blame, once another finds what is wrong with it."""

    def careless(indices: Tensor, weight: Tensor) -> Tensor:
        return weight[indices]

    lz.register_kernel(
        operation="embedding.lookup",
        kernel_id="careless.embedding",
        platform="cpu",
        supported_dtypes=["float32"],
        priority=99,
    )(careless)
    since = last_event()
    try:
        table = torch.randn(4, 8)
        for _ in range(40):
            with pytest.raises(lz.InvalidCallError, match="BAD_DATA"):
                lz.embedding(torch.tensor([1, 99]), table)
        assert torch.equal(lz.embedding(torch.tensor([1, 3]), table), table[[1, 3]])
        health = lz.health()
        assert health.level == "full" and health.score == 100.0 and events(since) == []
        assert health.kernels["careless.embedding"]["failures"] == 0
    finally:
        lz.unregister_kernel("careless.embedding")


# --- circuits ---------------------------------------------------------------------------------------------------------


def test_plain_torch_has_no_circuit_that_could_open() -> None:
    """References have no gradients: nobody else would be left."""
    x = X.clone().requires_grad_()
    broken = [True]

    def plain(input: Tensor, eps: float) -> Tensor:
        if broken:
            raise RuntimeError("broken")
        return input * torch.rsqrt(input.square().mean(-1, keepdim=True) + eps)

    capabilities: dict[str, Any] = {"autograd": True, "baseline": True}
    lz.register_kernel(kernel_id="plain.norm", priority=50, **RMS, **capabilities)(plain)
    try:
        fresh(rules=[{"deny_sources": ["torch", "onednn"]}])
        for _ in range(12):
            with pytest.raises(lz.KernelExecutionError):
                lz.rms_norm(x)
        assert [b["state"] for b in lz.health().breakers if b["kernel"] == "plain.norm"] == ["closed"]
        broken.clear()
        torch.testing.assert_close(lz.rms_norm(x), plain(x, 1e-6))
    finally:
        lz.unregister_kernel("plain.norm")


def _broken_sibling(op: str, calls: list[str]) -> Callable[..., Any]:
    """A kernel of torch's backend that takes whatever the operation has, goes first, and fails."""
    schema = _native.schema(op)
    names = [*schema["inputs"], *schema["params"]]

    def fail() -> Any:
        calls.append(op)
        raise RuntimeError("broken")

    made: dict[str, Any] = {"fail": fail}
    exec(f"def kernel({', '.join(names)}):\n    return fail()", made)  # noqa: S102
    described = plugin._describe(op, schema)
    for key in ("kernel_id", "priority", "dtypes", "requires_layouts"):
        del described[key]
    lz.register_kernel(
        operation=op,
        kernel_id=f"torch.broken.{op}",
        platform="cpu",
        supported_dtypes=plugin.FLOATS,
        layouts=schema["layouts"] or ["strided"],
        priority=100,
        **described,
    )(made["kernel"])
    function: Callable[..., Any] = made["kernel"]
    return function


@pytest.mark.usefixtures("nothing_measured")  # a kernel with times goes before one without
@pytest.mark.parametrize("op", OPERATIONS)
def test_one_broken_kernel_among_good_ones_hurts_nobody(op: str) -> None:
    """Its circuit opens at five failures; the kernels beside it serve, and the level stays."""
    case = sample_calls()[op]
    args, kwargs = case.make(5)
    good = lz.which(case.function, *args, **kwargs).kernel_id
    since, calls = last_event(), list[str]()
    _broken_sibling(op, calls)
    try:
        assert lz.which(case.function, *args, **kwargs).kernel_id == f"torch.broken.{op}"
        for _ in range(40):
            args, kwargs = copied(case.make(5))
            result = as_tuple(case.call(*args, **kwargs))
            assert_right((*result, *(args[at] for at in case.updates)), expected(case))
        assert len(calls) == 5
        assert lz.which(case.function, *args, **kwargs).kernel_id == good
        health = lz.health()
        opened = {b["kernel"] for b in health.breakers if b["state"] != "closed"}
        assert opened == {f"torch.broken.{op}"}
        assert health.level == "full"
        assert [e for e in events(since) if e["event"] == "level_changed"] == []
    finally:
        lz.unregister_kernel(f"torch.broken.{op}")
