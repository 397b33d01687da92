"""The projections of query, key and value as one product.

An attention module writes, in its ``forward``, three statements one after the other:

    query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
    value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

In a copy of the function the three calls become the parts of one product. Everything else stays as written.

The weights move next to each other, into one block of memory of the same size: each parameter is a part of it, and a write
to a parameter is a write to the block. Before each product the addresses are compared. Where a parameter lies elsewhere (the
model was moved or copied, a checkpoint replaced it), or somebody watches a projection, or gradients of the weights are
wanted, or `torch.func.functional_call` uses other weights, the three projections run as before.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from layerzero._native import linear
from layerzero.integrations.models.replacing import Forward, is_replaced
from layerzero.integrations.models.rewriting import around, assigned, definition_of, is_name

__all__ = ["fuse", "of", "owners_of", "separate"]

#: What the copied functions call the product, and its parts.
_NAME, _PARTS = "_lz_projected", ("_lz_query", "_lz_key", "_lz_value")
#: Names of the projections of query, key and value.
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"))
#: Where a module keeps its block.
_BLOCK = "_lz_block"


@dataclass(frozen=True)
class _Block:
    """The memory that the weights of three projections are parts of."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    #: How many features each projection gives.
    sizes: list[int]


def owners_of(model: nn.Module) -> dict[int, int]:
    """How many parameters of a model lie in each storage, by its address. One that is tied counts for each module."""
    parameters = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    plain = [p for p in parameters if type(p.data) is torch.Tensor and not p.is_meta]
    return Counter(p.untyped_storage().data_ptr() for p in plain)


def of(module: nn.Module) -> list[nn.Module]:
    """The projections of query, key and value of a module; none where it has no such."""
    children = dict(module.named_children())
    names = next((names for names in _PROJECTIONS if children.keys() >= set(names)), ())
    return [children[name] for name in names]


def fuse(module: Any, owners: dict[int, int]) -> Forward | str | None:
    """Moves the weights of a module together, and returns a forward that uses them so; why not; None without projections.

    Args:
        module: any module.
        owners: of its model, see :func:`owners_of`.
    """
    linears: list[Any] = of(module)
    if not linears:
        return None
    kind: type = type(module)
    found = _rewritten(kind)
    if found is None or [getattr(module, name, None) for name in found[1]] != linears:
        return "QKV: its forward does not call the three projections one after the other"
    if is_replaced(module):
        return "QKV: its forward was replaced before"
    if (why := _not_fusible(linears, owners)) is not None:
        return f"QKV: {why}"
    with torch.no_grad():
        weight = _together([layer.weight for layer in linears])
        bias = _together([layer.bias for layer in linears]) if linears[0].bias is not None else None
    module.__dict__[_BLOCK] = _Block(weight, bias, [layer.out_features for layer in linears])
    return found[0]


def separate(module: nn.Module) -> None:
    """Each parameter in memory of its own again."""
    if module.__dict__.pop(_BLOCK, None) is None:
        return
    for layer in of(module):
        for parameter in layer.parameters(recurse=False):
            parameter.data = parameter.data.clone()


def _not_fusible(linears: list[Any], owners: dict[int, int]) -> str | None:
    for layer in linears:
        if type(layer) is not nn.Linear or is_replaced(layer):
            return f"its projections are {type(layer).__name__}, not Linear: quantized, or wrapped by an adapter"
        if type(layer.weight) is not nn.Parameter or type(layer.weight.data) is not torch.Tensor:
            return f"its weights are {type(layer.weight.data).__name__}, not plain tensors"
        if _watched(layer):
            return "its projections have hooks"
    parameters = [p for layer in linears for p in layer.parameters(recurse=False)]
    if any(p.is_meta for p in parameters):
        return "its weights have no memory (on the meta device)"
    if len({(p.dtype, p.device) for p in parameters}) != 1 or len({layer.in_features for layer in linears}) != 1:
        return "its projections differ in dtype, device or width of the input"
    if len({layer.bias is None for layer in linears}) != 1:
        return "only some of its projections have a bias"
    if any(owners.get(p.untyped_storage().data_ptr(), 0) != 1 for p in parameters):
        return "its weights share their memory with others"
    return None


def _together(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Moves parameters into one block, in order."""
    block = torch.cat([parameter.data for parameter in parameters])
    at = 0
    for parameter in parameters:
        parameter.data = block[at : at + len(parameter)]
        at += len(parameter)
    return block


def _watched(layer: Any) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def _in_place(block: _Block, linears: list[Any]) -> bool:
    """Whether the parameters of projections are the parts of a block, in order."""
    at, beside = block.weight.data_ptr(), 0 if block.bias is None else block.bias.data_ptr()
    for layer in linears:
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        if (
            weight.data_ptr() != at
            or (bias is None) != (beside == 0)
            or (bias is not None and bias.data_ptr() != beside)
        ):
            return False
        at += weight.nbytes
        if bias is not None:
            beside += bias.nbytes
    return True


def _as_written(layer: Any) -> bool:
    """Whether a projection is its product with its own parameters, nobody watches it, and no gradient of them is wanted.

    `torch.func.functional_call` puts other tensors in their place for a call. Those of transforms have no address.
    """
    return (
        type(layer) is nn.Linear
        and all(type(p) is nn.Parameter for p in layer._parameters.values() if p is not None)
        and "forward" not in layer.__dict__
        and not _watched(layer)
        and not (torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters(recurse=False)))
    )


def _moved(block: _Block, layer: Any) -> bool:
    """Whether the model was moved to another device or dtype, so that nobody uses the block any more."""
    weight = layer._parameters["weight"]
    return weight is not None and (weight.dtype is not block.weight.dtype or weight.device != block.weight.device)


def _projected(self: Any, x: torch.Tensor, names: tuple[str, str, str]) -> Any:
    """What the three projections give."""
    children = self._modules
    linears = [children[name] for name in names]
    # The compiler cannot see addresses.
    if torch.compiler.is_compiling():
        return [layer(x) for layer in linears]
    block: _Block | None = self.__dict__.get(_BLOCK)
    if block is not None and _moved(block, linears[0]):
        del self.__dict__[_BLOCK]
        block = None
    if (
        block is None
        or x.dtype is not block.weight.dtype
        or x.device != block.weight.device
        or torch.is_autocast_enabled(x.device.type)
        or not all(map(_as_written, linears))
    ):
        return [layer(x) for layer in linears]
    if not _in_place(block, linears):
        # Nobody uses this memory any more.
        del self.__dict__[_BLOCK]
        return [layer(x) for layer in linears]
    return torch.split_with_sizes(linear(x, block.weight, block.bias), block.sizes, -1)


@cache
def _rewritten(kind: type) -> tuple[Forward, tuple[str, str, str]] | None:
    """The forward of a class with its three projections as one product, and their names."""
    read = definition_of(kind)
    if read is None:
        return None
    function, definition = read
    names = _replace(definition)
    if names is None:
        return None
    rewritten = around(kind, function, definition, _NAME, _projected, "one product for query, key and value")

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return type(self).forward(self, *args, **named) if self.training else rewritten(self, *args, **named)

    return forward, names


def _replace(definition: ast.FunctionDef) -> tuple[str, str, str] | None:
    """Replaces the first three such statements of the function's own block."""
    body = definition.body
    for at in range(len(body) - 2):
        three = body[at : at + 3]
        for names in _PROJECTIONS:
            argument = _argument(three, names)
            if argument is None:
                continue
            for statement, name, part in zip(three, names, _PARTS, strict=True):
                _Calls(name, part).visit(statement)
            first = ast.parse(f"{', '.join(_PARTS)} = {_NAME}(self, {argument}, {names!r})").body[0]
            body.insert(at, first)
            return names
    return None


def _argument(three: list[ast.stmt], names: tuple[str, str, str]) -> str | None:
    """The variable that three statements call the projections with, each once, and none of them assigns."""
    arguments: set[str] = set()
    for statement, name in zip(three, names, strict=True):
        given = assigned(statement)
        calls = [node for node in ast.walk(statement) if _is_call(node, names)]
        if given is None or len(calls) != 1 or not _is_call(calls[0], (name,)):
            return None
        call = calls[0]
        assert isinstance(call, ast.Call)
        if call.keywords or len(call.args) != 1 or not isinstance(call.args[0], ast.Name):
            return None
        arguments.add(call.args[0].id)
        if given[0] in arguments:
            return None
    return arguments.pop() if len(arguments) == 1 else None


def _is_call(node: ast.AST, names: tuple[str, ...]) -> bool:
    """Whether it is ``self.name(…)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in names and is_name(node.func.value, "self")


class _Calls(ast.NodeTransformer):
    """A call of a projection becomes a variable."""

    def __init__(self, name: str, variable: str) -> None:
        self._name = name
        self._variable = variable

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """One call."""
        if _is_call(node, (self._name,)):
            return ast.Name(self._variable, ast.Load())
        return self.generic_visit(node)
