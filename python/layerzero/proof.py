"""Proof before trust: a kernel that is not built in is compared with the reference, on a small call, before it serves."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from layerzero import _native
from layerzero.errors import LayerZeroError
from layerzero.tuning.gate import Gate, is_data
from layerzero.tuning.inputs import Inputs, make

#: Directions in which the gradient of each input is compared.
DIRECTIONS = 4
#: How far a point is moved for a difference quotient, in float64: it is then right to about eight digits.
STEP = 1e-4
#: How many times the tolerance of results a gradient may be off: it is the sum of many of them.
LENIENCE = 8.0


class CannotCompare(Exception):
    """Nothing here can say what is right for a call."""


def compare(
    kernel: str, small: str, call: str, device: int, gradients: bool, wanted: Sequence[str]
) -> tuple[float, str | None, float, str]:
    """Compares a kernel with the reference: the largest error, what is wrong if something is, the tolerance, the call.

    It is compared on a small call; where it raises there, on one of the call's own sizes, and what it raises there is
    raised. ``wanted`` names the arguments that must get a gradient, where ``gradients`` are wanted at all.
    """
    raised: Exception | None = None
    with _undisturbed(device):
        for text in dict.fromkeys((small, call)):
            try:
                return (*_judge(kernel, text, device, gradients, wanted), text)
            except Exception as error:  # noqa: BLE001 - its own sizes may suit it better
                raised = error if raised is None or not isinstance(error, CannotCompare) else raised
    assert raised is not None, "a call that was compared is returned"
    if isinstance(raised, LayerZeroError):
        # The call that was made up is at fault, not the one the caller made.
        raise CannotCompare(str(raised)) from raised
    raise raised


@contextmanager
def _undisturbed(device: int) -> Iterator[None]:
    """Leaves the random numbers of the caller as they are, and does without autocast and inference mode."""
    import torch

    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numbers = numpy.random.get_state() if numpy is not None else None
    place = torch.device(_native.device_name(device))
    drawn = torch.get_rng_state()
    # Of backends that do not tell the state of their generator nothing can be put back.
    generator: Any = torch.get_device_module(place) if device > 0 else None
    generator = generator if hasattr(generator, "get_rng_state") and hasattr(generator, "set_rng_state") else None
    on_device: Any = generator.get_rng_state(place) if generator is not None else None
    try:
        with torch.inference_mode(False), torch.no_grad(), _no_autocast(place.type):
            yield
    finally:
        # Put back only where a kernel has drawn: another thread may be drawing.
        if not torch.equal(drawn, torch.get_rng_state()):
            torch.set_rng_state(drawn)
        if on_device is not None and not torch.equal(on_device, generator.get_rng_state(place)):
            generator.set_rng_state(on_device, place)
        if python != random.getstate():
            random.setstate(python)
        if numpy is not None and numbers is not None and str(numbers) != str(numpy.random.get_state()):
            numpy.random.set_state(numbers)


def _no_autocast(kind: str) -> AbstractContextManager[Any]:
    """Does without autocast; on devices torch has none for there is nothing to do."""
    import torch

    return torch.autocast(kind, enabled=False) if torch.amp.autocast_mode.is_autocast_available(kind) else nullcontext()


def _judge(
    kernel: str, call: str, device: int, gradients: bool, wanted: Sequence[str]
) -> tuple[float, str | None, float]:
    from torch import Tensor

    try:
        inputs = make(call, device)
    except Exception as error:
        raise CannotCompare(f"no inputs could be made: {type(error).__name__}: {error}") from error
    if inputs.kwargs.get("dropout_p"):
        # What is dropped differs from kernel to kernel; that it runs can be seen, and the rest compared without.
        Gate(inputs, legal=True).run(kernel)
        inputs = dataclasses.replace(inputs, kwargs={**inputs.kwargs, "dropout_p": 0.0})
    gate = Gate(inputs, legal=True)
    allowed = 2 * inputs.tolerance
    try:
        # Before the kernel runs: it may write to what it should only read.
        gate.settle()
    except Exception as error:
        raise CannotCompare(f"the reference cannot say what is right: {type(error).__name__}: {error}") from error
    before = {k: v.clone() for k, v in inputs.kwargs.items() if isinstance(v, Tensor) and k not in inputs.updated}
    worst, wrong = gate.judge(kernel)
    touched = [name for name, value in before.items() if not value.equal(inputs.kwargs[name])]
    if wrong is None and touched:
        worst, wrong = float("inf"), f"writes to its input '{touched[0]}'"
    if wrong is None and gradients:
        worst, wrong = _judge_gradients(gate, inputs, kernel, wanted)
        allowed = LENIENCE * inputs.tolerance
    return (worst, wrong, allowed)


def _judge_gradients(gate: Gate, inputs: Inputs, kernel: str, wanted: Sequence[str]) -> tuple[float, str | None]:
    """Compares the gradients of a kernel, in random directions, with difference quotients of the reference in float64."""
    import torch

    generator = torch.Generator().manual_seed(1)
    leaves = {
        name: value.detach().requires_grad_()
        for name, value in inputs.kwargs.items()
        if is_data(value) and name not in inputs.updated
    }
    with torch.enable_grad():
        results = gate.run(kernel, {**inputs.kwargs, **leaves})
        worst, wrong = gate.judge_results(tuple(result.detach() for result in results))
        if wrong is not None:
            return (worst, f"where gradients are wanted it {wrong}")
        weights = [
            torch.randn(result.shape, generator=generator, dtype=torch.float64) if result.requires_grad else None
            for result in results
        ]
        reached = [(r, w.to(r)) for r, w in zip(results, weights, strict=True) if w is not None]
        if not reached:
            return (float("inf"), "gives results without a gradient")
        outputs, seeds = zip(*reached, strict=True)
        found = torch.autograd.grad(outputs, list(leaves.values()), seeds, allow_unused=True)

    # A seed is rounded to the result's dtype before it is used.
    exact = [w if w is None else w.to(r.dtype).double() for r, w in zip(results, weights, strict=True)]
    wide = {k: v.detach().cpu().double() if is_data(v) else _on_host(v) for k, v in inputs.kwargs.items()}

    def weighed(name: str, value: Any) -> float:
        right = gate.run(inputs.reference, {**wide, name: value})
        return sum(float((r.double() * w).sum()) for r, w in zip(right, exact, strict=True) if w is not None)

    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        if gradient is None:
            if name in wanted:
                return (float("inf"), f"gives no gradient with respect to '{name}'")
            continue
        for _ in range(DIRECTIONS):
            direction = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
            try:
                ahead = weighed(name, wide[name] + STEP * direction)
                quotient = (ahead - weighed(name, wide[name] - STEP * direction)) / (2 * STEP)
            except Exception:  # noqa: BLE001 - no reference in float64: there is no right gradient to compare with
                return (worst, None)
            given = gradient.detach().cpu().double()
            off = abs(float((given * direction).sum()) - quotient)
            size = float((given * direction).abs().sum())
            allowed = (LENIENCE * inputs.tolerance + STEP**2) * (1.0 + min(size, 1e300))
            if not off <= allowed:
                worst = float("inf") if math.isnan(off) else max(worst, off)
                text = f"its gradient with respect to '{name}' is off by {off:g} in a direction; at most {allowed:g} is allowed"
                return (worst, text)
    return (worst, None)


def _on_host(value: Any) -> Any:
    return value.cpu() if hasattr(value, "cpu") else value


def hard_texts(op: str, texts: list[Any]) -> list[Any]:
    """The texts of a call, or its lists of ids, and where it takes texts those on which tokenizers were seen to differ."""
    if op != "tokenize.encode":
        return list(texts)
    from layerzero.backends.tiktoken.hard_texts import HARD

    return [*texts, *HARD]


def texts_differ(given: list[Any], found: Any, right: Any) -> str | None:
    """What is wrong with the ids (and offsets) or texts a kernel gave, as the beginning of a sentence; ``None`` when they
    are right."""
    pairs = [(found, right)] if isinstance(right, list) else list(zip(found, right, strict=True))
    for results, expected in pairs:
        for text, one, other in zip(given, results, expected, strict=True):
            if _plain(one) != _plain(other):
                shown = repr(text)
                return f"gives something else for {shown if len(shown) <= 60 else shown[:60] + '…'}"
    return None


def _plain(result: Any) -> Any:
    """A result with lists in the place of tuples."""
    return [_plain(item) for item in result] if isinstance(result, list | tuple) else result
