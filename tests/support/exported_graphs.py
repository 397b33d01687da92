"""A module, exported and run by the references of the graph's operations, beside the module itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from layerzero import _native
from layerzero.export import Exported, export
from torch import Tensor
from torch.utils import _pytree as pytree

#: How far float32 results may be from those of the references, which compute in float64 and round each result once.
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Function(torch.nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        """The call."""
        return self.function(*args)


def run(exported: Exported, args: Sequence[Any]) -> tuple[Any, list[Tensor]]:
    """The results of the graph, and the new contents of what the model changes."""
    graph = _native.Graph.from_document(exported.document, exported.constants)
    results, updates = graph.interpret(exported.flatten(args), exported.host_calls)
    return exported.unflatten(results), updates


def run_compiled(exported: Exported, args: Sequence[Any]) -> Any:
    """The results of the graph, optimised and run by kernels. What it updates is copied before."""
    graph = _native.Graph.from_document(exported.document, exported.constants)
    session = _native.Session(graph, threads=2)
    inputs = copy.deepcopy(exported.flatten(args))
    return exported.unflatten(session.run(inputs, exported.host_calls))


def operations(exported: Exported) -> list[str]:
    """The operation of each node."""
    return _native.Graph.from_document(exported.document, exported.constants).operations


def assert_same(found: Any, expected: Any, close: float | None = None) -> None:
    """Structure, dtypes, sizes and, within what rounding makes, numbers are equal."""
    flat, spec = pytree.tree_flatten(found)
    wanted, same = pytree.tree_flatten(expected)
    assert spec == same
    for one, other in zip(flat, wanted, strict=True):
        if not isinstance(other, Tensor):
            assert one == other
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        bound = close if close is not None else CLOSE.get(other.dtype, 0.0)
        torch.testing.assert_close(one, other, rtol=bound, atol=bound, equal_nan=True)


def assert_graph_is(
    module: Any, args: Sequence[Any], *more: Sequence[Any], dynamic_shapes: Any = None, close: float | None = None
) -> Exported:
    """Exports with the first arguments; compares what references give, and kernels, with the module's own results, for `more` too."""
    if not isinstance(module, torch.nn.Module):
        # torch.export counts the arguments of `Function` as one.
        module, dynamic_shapes = Function(module), dynamic_shapes and (dynamic_shapes,)
    exported = export(module, args, dynamic_shapes=dynamic_shapes)
    for each in (args, *more):
        with torch.no_grad():
            expected = copy.deepcopy(module)(*copy.deepcopy(tuple(each)))
        found, _ = run(exported, each)
        assert_same(found, expected, close)
        assert_same(run_compiled(exported, each), expected, close)
    return exported
