"""Gradients of calls, by a loss that weighs every element differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_cases import Case, as_tuple, copied


def leaves(
    case: Case, change: Callable[[Any], Any] = lambda value: value
) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """Arguments, and those of them that want gradients."""
    args, kwargs = copied(case.make(5))
    values: dict[Any, Any] = dict(enumerate(args))
    values.update(kwargs)
    values = {key: change(value) for key, value in values.items()}
    wanted = []
    for at in case.grads:
        values[at] = values[at].detach().requires_grad_()
        wanted.append(values[at])
    return tuple(values[i] for i in range(len(args))), {name: values[name] for name in kwargs}, wanted


def weighted_sum(results: tuple[Tensor, ...]) -> Tensor:
    """A loss that weighs every element of every result differently."""
    terms = []
    for i, result in enumerate(results):
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        terms.append((result.double() * weights).sum())
    return torch.stack(terms).sum()


def gradients(
    case: Case, function: Callable[..., Any], change: Callable[[Any], Any] = lambda value: value
) -> tuple[Tensor, ...]:
    """Gradients of the weighted sum of what a function gives."""
    args, kwargs, wanted = leaves(case, change)
    return torch.autograd.grad(weighted_sum(as_tuple(function(*args, **kwargs))), wanted)


def assert_same(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Gradients agree within float32."""
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4)
