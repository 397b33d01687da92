"""The numerical gate: what a kernel gives is compared with what is right, before it is timed and may win."""

from __future__ import annotations

from typing import Any

from layerzero import _native
from layerzero.checks import difference
from layerzero.errors import InvalidCallError
from layerzero.tuning.inputs import Inputs

#: Work up to which the reference itself says what is right. It goes through every element one by one, in float64.
REFERENCE_FLOPS = 3e7
#: Work beyond which the reference would take minutes.
REFERENCE_LIMIT = 1e10
#: How many draws of a sampling kernel are looked at.
DRAWS = 8


class Gate:
    """What is right for the inputs of one call."""

    def __init__(self, inputs: Inputs, *, legal: bool = False) -> None:
        self._inputs = inputs
        #: Whether every kernel runs that can, whatever the operator wants.
        self._legal = legal
        self._right: tuple[Any, ...] | None = None

    def judge(self, kernel: str, given: Any = None) -> tuple[float, str | None]:
        """The largest error of a kernel, and what is wrong with it if something is. What the kernel raises is raised.

        ``given`` is what it gave for these inputs, if that is known: where it says all, it is not run again.
        """
        if self._inputs.op in ("sampling.topk", "sampling.topp"):
            return self._judge_draws(kernel)
        if self._inputs.kind == "sampling" and "uniform" not in self._inputs.kwargs:
            # Draws of one's own: only that it runs, and gives what the operation gives, can be seen.
            self.run(kernel)
            return (0.0, None)
        known = given is not None and not self._inputs.updated
        return self.judge_results(self._tensors(given, {}) if known else self.run(kernel))

    def judge_results(self, given: tuple[Any, ...]) -> tuple[float, str | None]:
        """The same of results that are there."""
        worst, within = difference(given, self.expected(given), self._inputs.tolerance)
        if within:
            return (worst, None)
        allowed = f"at most {2 * self._inputs.tolerance:g} of the value's size is allowed"
        return (worst, f"differs from the right result by up to {worst:g}; {allowed}")

    def run(self, kernel: str, kwargs: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """What a kernel gives, and what it updates; for other arguments, where some are given."""
        kwargs = self._inputs.copied() if kwargs is None else kwargs
        return self._tensors(_native.Subject(self._inputs.function, kwargs, self._legal).run(kernel), kwargs)

    def _tensors(self, result: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What a call gives: its results, and what it updated."""
        results = result if isinstance(result, tuple | list) else [] if result is None else [result]
        return (*results, *(kwargs[name] for name in self._inputs.updated))

    def expected(self, like: tuple[Any, ...]) -> tuple[Any, ...]:
        """What is right, in the dtypes and on the devices of these results."""
        self.settle()
        assert self._right is not None, "it is settled what is right"
        return tuple(r.to(device=t.device, dtype=t.dtype) for r, t in zip(self._right, like, strict=True))

    def settle(self) -> None:
        """Finds out what is right, once."""
        if self._right is None:
            self._right = self._by_reference() if self._inputs.flops <= REFERENCE_FLOPS else self._in_float64()

    def _by_reference(self) -> tuple[Any, ...]:
        kwargs = {k: v.cpu() if hasattr(v, "cpu") else v for k, v in self._inputs.copied().items()}
        return self.run(self._inputs.reference, kwargs)

    def _in_float64(self) -> tuple[Any, ...]:
        """The same call in float64, by torch. Where nothing there takes that, or it takes too much memory, half-width
        floats are judged in float32; the reference says what is right where neither can be had."""
        import torch

        halves = all(v.element_size() <= 2 for v in self._inputs.kwargs.values() if is_data(v))
        for dtype in (torch.float64, torch.float32) if halves else (torch.float64,):
            try:
                wide = {k: v.to(dtype) if is_data(v) else v for k, v in self._inputs.copied().items()}
            except RuntimeError:
                # No memory for it.
                continue
            for candidate in _native_candidates(self._inputs.function, wide):
                try:
                    return self.run(candidate, wide)
                except Exception:  # noqa: BLE001, S112 - the next one may do it
                    continue
        if self._inputs.flops > REFERENCE_LIMIT:
            raise RuntimeError("nothing here can say what is right for a call this large")
        return self._by_reference()

    def _judge_draws(self, kernel: str) -> tuple[float, str | None]:
        """Every token drawn must be one that may be drawn."""
        import torch

        kwargs = self._inputs.kwargs
        logits = kwargs["logits"].double()
        # A tie at the edge may be resolved either way, and a sum may round.
        if self._inputs.op == "sampling.topk":
            k = min(int(kwargs["k"]), logits.shape[-1])
            edge = logits.topk(k, dim=-1).values[..., -1:]
        else:
            probabilities, order = torch.softmax(logits, -1).sort(-1, descending=True)
            before = probabilities.cumsum(-1) - probabilities
            last = (before < float(kwargs["p"]) + 1e-6).sum(-1, keepdim=True).clamp(min=1) - 1
            edge = logits.gather(-1, order.gather(-1, last))
        tolerance = self._inputs.tolerance * (1 + edge.abs())
        for seed in range(DRAWS):
            (tokens,) = self.run(kernel, {**kwargs, "seed": seed})
            drawn = tokens.long().reshape(*logits.shape[:-1], -1)
            if bool(((drawn < 0) | (drawn >= logits.shape[-1])).any()):
                return (float("inf"), "drew a token that is not in the vocabulary")
            if bool((logits.gather(-1, drawn) < edge - tolerance).any()):
                return (float("inf"), "drew a token that may not be drawn")
        return (0.0, None)


def is_data(value: Any) -> bool:
    """Whether an argument is a tensor of real numbers."""
    return bool(getattr(value, "is_floating_point", lambda: False)())


def _native_candidates(function: str, kwargs: dict[str, Any]) -> list[str]:
    """The torch kernels that take a call, the plainest first: it is not the one in question that says what is right."""
    import json

    try:
        report = json.loads(_native.explain(function, **kwargs)[0])
    except InvalidCallError:
        # The operation takes no such dtype: scales are always float32.
        return []
    torch_ones = [c for c in report["candidates"] if c["accepted"] and c["backend"] in ("torch", "torch_cuda")]
    return [c["kernel_id"] for c in reversed(torch_ones)]
