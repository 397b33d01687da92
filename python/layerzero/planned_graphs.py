"""``lz.dry_run`` and ``lz.solve`` of models that ``lz.compile`` makes a graph of. The graph is planned, and never run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from layerzero import graph_questions
from layerzero.errors import InvalidCallError, named_line
from layerzero.graph_answers import GraphStep, PlannedGraph
from layerzero.inspection import TensorSpec, list_kernels

if TYPE_CHECKING:
    from layerzero.compiled_model import CompiledModel

#: Larger models are not compiled for a dry run: packing copies their weights.
MOST_WEIGHT_BYTES = 2 << 30


def of_compiled(compiled: CompiledModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedGraph:
    """The plan of a compiled model for some inputs, without inputs for those of its first call.

    If no graph fits the inputs, the model is exported for them.
    """
    from layerzero.call_arguments import tensors, wants_gradients

    args, kwargs = _with_memory((args, kwargs))
    if wants_gradients(tensors((args, kwargs))):
        raise InvalidCallError(
            "a call with these inputs runs uncompiled: an input needs gradients",
            code="WRONG_INPUT",
            hint="ask under torch.no_grad(), or detach the inputs",
        )
    variant, inputs = compiled._variant(args, kwargs)
    report = graph_questions.report(
        compiled._variants,
        variant,
        inputs,
        model=compiled._name,
        # Measuring it would run the model.
        largest_error=compiled._error,
        calls=compiled._calls,
        model_calls=compiled._left,
    )
    return PlannedGraph(graph_questions.steps(variant, inputs), report)


def of_module(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PlannedGraph | None, str]:
    """The plan of a module that is not compiled, or why there is none."""
    from layerzero.compiled_model import compile

    if why := _why_not(model, args, kwargs):
        return None, why
    try:
        return of_compiled(compile(model), args, kwargs), ""
    except Exception as error:  # noqa: BLE001 - whatever keeps the model from being compiled is the answer
        return None, getattr(error, "message", "") or named_line(error)


def is_on_cpu(*trees: Any) -> bool:
    """Whether all tensors in these arguments are on the CPU, or are only described."""
    return all(str(one.device) in ("cpu", "meta") for one in _leaves(trees) if _is_tensor(one))


def plan_of_bucket(
    compiled: CompiledModel, args: tuple[Any, ...], kwargs: dict[str, Any], undecided: Callable[[GraphStep, str], None]
) -> list[dict[str, Any]]:
    """The kernels of a graph's nodes for one bucket, as entries of a dispatch table. `undecided` gets the other steps."""
    known = {one.kernel_id: one for one in list_kernels()}
    largest: dict[str, GraphStep] = {}
    taken: dict[str, str] = {}
    steps = of_compiled(compiled, args, kwargs).steps
    for step in sorted(steps, key=lambda one: (one.flops, one.bytes), reverse=True):
        # A step may be several calls: `lz_cpu.linear_packed+add`.
        kernel = next((part for part in step.kernel.split("+") if part in known), None)
        if kernel is None:
            undecided(step, f"{step.kernel} is no kernel of an operation: selection does not choose it")
            continue
        operation = known[kernel].operation
        first = largest.setdefault(operation, step)
        if taken.setdefault(operation, kernel) != kernel:
            undecided(
                step, f"{kernel} runs it, and {taken[operation]} the larger call of {operation} in {first.output}"
            )
    return [
        {"op": operation, "kernel_id": kernel, "version": known[kernel].version}
        for operation, kernel in sorted(taken.items())
    ]


def buckets_of(axes: Mapping[str, Sequence[int]], tree: Any) -> dict[str, list[int]]:
    """The axes, and one bucket each for the batch and the sequence length where only the inputs say them."""
    first = next(filter(_is_tensor, _leaves(tree)), None)
    sizes = () if first is None else tuple(first.shape)
    found = {name: list(ends) for name, ends in axes.items()}
    if len(sizes) > 1:
        found.setdefault("batch", [sizes[0]])
    # The second size of two is a sequence length only of ids.
    if len(sizes) > 2 or len(sizes) == 2 and "int" in str(first.dtype):  # type: ignore[union-attr]
        found.setdefault("seq_len", [sizes[1]])
    return found


def sizes_of(axes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """The upper ends of each bucket."""
    return (dict(zip(axes, sizes, strict=True)) for sizes in product(*axes.values()))


def undecided_call(step: GraphStep) -> str:
    """A step that a table does not decide, as JSON."""
    return json.dumps({"op": step.op, "output": step.output, "origin": step.origin})


def _why_not(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a module is not compiled for a dry run; ``""`` if it is."""
    import torch

    if not isinstance(model, torch.nn.Module):
        return "it is not a torch.nn.Module"
    if model.training:
        return "it is in training mode"
    held = [*model.parameters(), *model.buffers()]
    if not is_on_cpu(args, kwargs) or any(one.device.type != "cpu" for one in held):
        return "it is not on the CPU"
    if (size := sum(one.nbytes for one in held)) > MOST_WEIGHT_BYTES:
        return (
            f"its weights are {size / 1e9:.1f} GB, of which packing makes copies: ask lz.dry_run(lz.compile(model), …)"
        )
    return ""


def _leaves(tree: Any) -> Iterable[Any]:
    from torch.utils import _pytree as pytree

    return pytree.tree_leaves(tree)


def _is_tensor(one: Any) -> bool:
    import torch

    return isinstance(one, torch.Tensor | TensorSpec)


def _with_memory(tree: Any) -> Any:
    """The arguments with memory for tensors that are only described. Nobody reads it."""
    import torch
    from torch.utils import _pytree as pytree

    def filled(one: Any) -> Any:
        if not _is_tensor(one) or isinstance(one, torch.Tensor) and one.device.type != "meta":
            return one
        dtype = one.dtype if isinstance(one.dtype, torch.dtype) else getattr(torch, str(one.dtype))
        return torch.empty(tuple(one.shape), dtype=dtype, device="cpu")

    return pytree.tree_map(filled, tree)
