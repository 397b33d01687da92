"""What the caller's own code raises while a kernel runs goes to the caller, and is no kernel's failure: activation
checkpointing, saved-tensor hooks, modes, tensor subclasses, signal handlers, debuggers."""

from __future__ import annotations

import bdb
import functools
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import layerzero as lz
import pytest
import torch
from faults.states import events, fresh, last_event
from gradients import leaves, weighted_sum
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch_cases import DIFFERENTIABLE, Case, as_tuple, doubled

X = torch.linspace(-2.0, 2.0, 64).reshape(4, 16)
GIVEN: dict[str, Any] = {"operation": "norm.rms", "platform": "cpu", "supported_dtypes": ["float32"], "autograd": True}


def normed(x: Tensor, eps: float = 1e-6) -> Tensor:
    """What rms_norm gives."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@pytest.fixture(autouse=True)
def nobody_failed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does: no warning, no failure counted, no circuit moved, nothing that lowers the health."""
    fresh()
    if "kernels_fail" in request.fixturenames:
        yield
        return
    since = last_event()
    counted = {name: kernel["failures"] for name, kernel in lz.health().kernels.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", lz.LayerZeroWarning)
        yield
    health = lz.health()
    assert events(since) == []
    assert {name: k["failures"] for name, k in health.kernels.items() if k["failures"] > counted.get(name, 0)} == {}
    assert all(b["state"] == "closed" and b["failures"] == 0 for b in health.breakers)
    assert health.level == "full" and health.score == 100.0
    fresh()


# --- checkpointing ----------------------------------------------------------------------------------------------------


def _once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def _to_the_end(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with set_checkpoint_early_stop(False):
        return checkpoint(function, *args, use_reentrant=False, **kwargs)


def _nested(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _once(functools.partial(_once, functools.partial(_once, function)), *args, **kwargs)


def _reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(functools.partial(function, **kwargs), *args, use_reentrant=True)


def _selective(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """LayerZero's operators are kept, the rest is computed again."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = getattr(op, "namespace", "") == "layerzero"
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _recompute_all(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _on_cpu(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return function(*args, **kwargs)


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "early-stop": _once,
    "no-early-stop": _to_the_end,
    "nested": _nested,
    "reentrant": _reentrant,
    "selective": _selective,
    "recompute-all": _recompute_all,
    "save-on-cpu": _on_cpu,
}


def grads(case: Case, function: Callable[..., Any], change: Callable[[Any], Any] = lambda v: v) -> list[Tensor]:
    """The loss and its gradients, by `backward`, which reentrant checkpointing needs."""
    args, kwargs, wanted = leaves(case, change)
    loss = weighted_sum(as_tuple(function(*args, **kwargs)))
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in wanted if leaf.grad is not None)]


@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.id)
def test_checkpointed_calls_have_the_right_gradients(case: Case, how: str) -> None:
    if how == "reentrant" and any(isinstance(place, str) for place in case.grads):
        pytest.skip("reentrant checkpointing takes no keyword arguments")
    expected = grads(case, case.reference, doubled)
    # Twice: the first call of a kind and the remembered one take different paths.
    for _ in range(2):
        got = grads(case, functools.partial(CHECKPOINTS[how], case.call))
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4)


def _block(x: Tensor, weight: Tensor) -> Tensor:
    hidden = lz.linear(lz.rms_norm(x), weight)
    return x + lz.gelu(hidden)


def _plain_block(x: Tensor, weight: Tensor) -> Tensor:
    return x + torch.nn.functional.gelu(normed(x) @ weight.T)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_model_of_checkpointed_blocks_trains_as_plain_torch_does(early_stop: bool) -> None:
    weights = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0)) / 4

    def trained(block: Callable[..., Tensor], checkpointed: bool, dtype: torch.dtype) -> list[Tensor]:
        layers = [w.detach().clone().to(dtype).requires_grad_() for w in weights]
        for _ in range(3):
            x = X.to(dtype)
            with set_checkpoint_early_stop(early_stop):
                for layer in layers:
                    x = checkpoint(block, x, layer, use_reentrant=False) if checkpointed else block(x, layer)
                x.square().mean().backward()
            with torch.no_grad():
                for layer in layers:
                    assert layer.grad is not None
                    layer -= 0.1 * layer.grad
                    layer.grad = None
        return [layer.detach() for layer in layers]

    got = trained(_block, True, torch.float32)
    for a, b in zip(got, trained(_plain_block, False, torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


# --- code of the caller's that raises ---------------------------------------------------------------------------------


class Stop(Exception):
    """Raised by the caller's code, to be caught by the caller."""


def _raise(*_: Any) -> Any:
    raise Stop("of my own")


def _through_a_helper(*_: Any) -> Any:
    _raise()


class Callable_:
    """A hook that is an object."""

    def __call__(self, tensor: Tensor) -> Tensor:
        raise Stop("of my own")

    def method(self, tensor: Tensor) -> Tensor:
        raise Stop("of my own")


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "function": lambda tensor: _raise(),
    "helper": _through_a_helper,
    "object": Callable_(),
    "method": Callable_().method,
    "partial": functools.partial(lambda given, tensor: _raise(), 3),
}


class FunctionMode(TorchFunctionMode):
    """Stops at the first function of torch's that is not a question about a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        raise Stop("of my own")


class HelpedFunctionMode(FunctionMode):
    """The same, by a function it calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        return _raise()


class DispatchMode(TorchDispatchMode):
    """Stops at the first operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Stop("of my own")


class Subclass(Tensor):
    """Stops whatever is done with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "requires_grad_"):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise Stop("of my own")


@contextmanager
def _alarm() -> Iterator[None]:
    """A handler that raises an ordinary exception at the next chance."""
    before = signal.signal(signal.SIGUSR1, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _serving(body: Callable[[Tensor, float], Tensor]) -> AbstractContextManager[None]:
    """A kernel of the user's own that goes first."""

    @contextmanager
    def registered() -> Iterator[None]:
        lz.register_kernel(kernel_id="users.norm", priority=99, **GIVEN)(users_norm)
        try:
            yield
        finally:
            lz.unregister_kernel("users.norm")

    def users_norm(input: Tensor, eps: float) -> Tensor:
        return body(input, eps)

    return registered()


def _killed(x: Tensor, eps: float) -> Tensor:
    os.kill(os.getpid(), signal.SIGUSR1)
    return normed(x, eps)


def _wrapping(x: Tensor, eps: float) -> Tensor:
    """A library that wraps what it meets."""
    try:
        return normed(x, eps)
    except Exception as error:
        raise RuntimeError("the library failed") from error


BODIES: dict[str, Any] = {"torch's": None, "own": normed, "wrapping": _wrapping}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_saved_tensor_hook_that_raises_reaches_the_caller(hook: str, body: str) -> None:
    x = X.clone().requires_grad_()
    with _serving(BODIES[body]) if BODIES[body] else nullcontext():
        for _ in range(7):
            lz.rms_norm(x)
            with torch.autograd.graph.saved_tensors_hooks(HOOKS[hook], lambda t: t), pytest.raises(Stop):
                lz.rms_norm(x)
        torch.testing.assert_close(lz.rms_norm(x), normed(x))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("mode", [FunctionMode, HelpedFunctionMode, DispatchMode], ids=lambda mode: mode.__name__)
def test_a_mode_that_raises_reaches_the_caller(mode: Any, body: str) -> None:
    with _serving(BODIES[body]) if BODIES[body] else nullcontext():
        lz.rms_norm(X)
        for _ in range(7):
            with mode(), pytest.raises(Stop):
                lz.rms_norm(X)
        torch.testing.assert_close(lz.rms_norm(X), normed(X))


def test_a_subclass_that_raises_reaches_the_caller() -> None:
    for _ in range(7):
        with pytest.raises(Stop):
            lz.rms_norm(X.as_subclass(Subclass))


def test_a_signal_handler_that_raises_reaches_the_caller() -> None:
    with _serving(_killed), _alarm():
        for _ in range(7):
            with pytest.raises(Stop):
                lz.rms_norm(X)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, bdb.BdbQuit])
def test_interrupts_reach_the_caller(kind: type[BaseException]) -> None:
    def interrupted(x: Tensor, eps: float) -> Tensor:
        raise kind

    with _serving(interrupted):
        for _ in range(7):
            with pytest.raises(kind):
                lz.rms_norm(X)


def test_a_hook_that_is_interrupted_and_called_again_serves() -> None:
    """The path after an interruption is the path before it."""
    x, state = X.clone().requires_grad_(), {"raise": True}

    def pack(tensor: Tensor) -> Tensor:
        if state["raise"]:
            raise Stop("of my own")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for attempt in range(6):
            state["raise"] = attempt % 2 == 0
            if state["raise"]:
                with pytest.raises(Stop):
                    lz.rms_norm(x)
            else:
                (got,) = torch.autograd.grad(lz.rms_norm(x).square().sum() * 0.5, x)
                y = X.double().requires_grad_()
                (wanted,) = torch.autograd.grad(normed(y).square().sum() * 0.5, y)
                torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


# --- a kernel's own failure stays one ---------------------------------------------------------------------------------


class PassingOn(TorchFunctionMode):
    """Only looks on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _wrong_sizes(x: Tensor, eps: float) -> Tensor:
    return torch.cat([x, x[:, :3].T])


def _wrong_in_python(x: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.conv2d(x, x) if x.dim() == 2 else x


def _of_its_own(x: Tensor, eps: float) -> Tensor:
    raise Stop("no hook, but the kernel's code")


def _reused_in_a_hook(x: Tensor, eps: float) -> Tensor:
    """Uses hooks inside: they are the kernel's, not the caller's."""
    with torch.autograd.graph.saved_tensors_hooks(_raise, lambda t: t):
        return normed(x.requires_grad_() if not x.requires_grad else x, eps)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "save-on-cpu": torch.autograd.graph.save_on_cpu,
    "function mode": PassingOn,
    "default device": lambda: torch.device("cpu"),
}


@pytest.fixture
def kernels_fail() -> None:
    """Failures are counted in this test."""


@pytest.mark.usefixtures("kernels_fail")
@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("body", [_wrong_sizes, _wrong_in_python, _of_its_own, _reused_in_a_hook])
def test_a_kernels_own_failure_is_still_followed_by_another(body: Any, surroundings: str) -> None:
    if body is _reused_in_a_hook and "hook" not in surroundings and surroundings != "nothing":
        pytest.skip("what a kernel's hook raises inside of a mode cannot be told from what the mode raises")
    x = X.clone().requires_grad_()
    with _serving(body):
        before = lz.health().kernels.get("users.norm", {"failures": 0})["failures"]
        for _ in range(3):
            with SURROUNDINGS[surroundings]():
                torch.testing.assert_close(lz.rms_norm(x), normed(x))
        assert lz.health().kernels["users.norm"]["failures"] == before + 3
    fresh()
