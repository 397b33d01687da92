"""`torch.vmap` of the operators: rows are folded into one call where the operator works on rows, else slices loop."""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from layerzero.arrays import draw_seed
from layerzero.errors import LayerZeroError
from layerzero.integrations.torch_operators.fakes import RULES, SEED_TENSOR
from layerzero.integrations.torch_operators.operators import Operator

# What vmap says of the batch, and, per argument, which axis is its batch. Where it is no integer (None, or a list of
# them for a list), the argument is the same for all.
Info = Any
Axes = tuple[Any, ...]


def vmap_rule(operator: Operator) -> Callable[..., tuple[Any, Any]]:
    """The rule of an operator."""
    op = getattr(torch.ops.layerzero, operator.name).default
    folded = frozenset(operator.place(name) for name in RULES[operator.name].row_inputs)
    updated = [operator.place(name) for name in operator.updates]

    def rule(info: Info, axes: Axes, *args: Any) -> tuple[Any, Any]:
        batched = {at for at, axis in enumerate(axes) if isinstance(axis, int)}
        for at in updated:
            if at not in batched:
                raise LayerZeroError(
                    f"vmap: {operator.name} updates '{operator.names[at]}' in place for every slice, so it must be batched",
                    code="VMAP_UPDATES_SHARED",
                    hint="give it a batch dimension, or loop",
                )
        if operator.draws:
            args = _with_seed(operator, info.randomness, args)
        elif folded and batched <= folded:
            return _all_in_front(op(*_in_front(info.batch_size, axes, args, folded)))
        return _loop(op, info.batch_size, axes, args)

    return rule


def backward_vmap_rule(operator: Operator) -> Callable[..., tuple[Any, Any]]:
    """The rule of an operator's backward."""
    op = getattr(torch.ops.layerzero, f"{operator.name}_backward").default

    def rule(info: Info, axes: Axes, *args: Any) -> tuple[Any, Any]:
        return _loop(op, info.batch_size, axes, args)

    return rule


def _loop(op: Any, size: int, axes: Axes, args: tuple[Any, ...]) -> tuple[Any, Any]:
    def slice_of(i: int) -> list[Any]:
        given = zip_longest(args, axes)
        return [arg.select(axis, i) if isinstance(axis, int) else arg for arg, axis in given]

    if size == 0:
        text = f"vmap: {op._opname} is called once per slice, and there is none to tell the result's shape by"
        raise LayerZeroError(text, code="VMAP_EMPTY", hint="do not map over a dimension of size 0")
    results = [op(*slice_of(i)) for i in range(size)]
    if results[0] is None:
        return None, None
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return _all_in_front(type(results[0])(torch.stack(slices) for slices in zip(*results, strict=True)))


def _in_front(size: int, axes: Axes, args: tuple[Any, ...], folded: frozenset[int]) -> list[Any]:
    """The arguments with the batch as one more leading axis of all that have rows."""
    moved = list(args)
    for at in folded:
        if at >= len(args) or args[at] is None:
            continue
        axis = axes[at]
        moved[at] = args[at].movedim(axis, 0) if isinstance(axis, int) else args[at].expand(size, *args[at].shape)
    return moved


def _all_in_front(results: Any) -> tuple[Any, Any]:
    return results, 0 if isinstance(results, Tensor) else type(results)(0 for _ in results)


def _with_seed(operator: Operator, randomness: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that draw as vmap was told to: every slice anew, or all the same."""
    filled = list(operator.fill(args))
    values = dict(zip(operator.names, filled, strict=True))
    settled = any(values.get(name) is not None for name in ("seed", SEED_TENSOR, "uniform"))
    if settled or values.get("dropout_p") == 0.0 or randomness == "different":
        return args
    if randomness == "error":
        raise LayerZeroError(
            f"vmap: {operator.name} draws random numbers, and randomness='error'",
            code="VMAP_RANDOMNESS",
            hint="give a seed, or pass randomness='different' or 'same' to torch.vmap",
        )
    filled[operator.place("seed")] = draw_seed(values.pop("generator", None))
    if "generator" in operator.names:
        filled[operator.place("generator")] = None
    return tuple(filled)
