"""The sum before a norm, computed with the norm: one pass over memory instead of two.

A layer of a transformer writes, in its ``forward``:

    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)

These three statements, one after the other, are found in the source of the layer's ``forward`` and replaced by

    hidden_states, residual = fused_add_rms_norm(hidden_states, residual, weight, eps)

in a copy of the function. Everything else in it stays as written. That is the same by the meaning of the statements, so
the layer is not compared, provided that the norm is one that `lz.rms_norm` replaces (which is). In bfloat16 and float16
the rounding differs: the norm is that of the sum before it is rounded.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import torch

from layerzero._native import fused_add_rms_norm
from layerzero.integrations.models.replacing import Forward, is_replaced, scale_of
from layerzero.integrations.models.rewriting import around, assigned, definition_of, is_name

__all__ = ["fused"]

#: What the copied functions call the fused form.
_NAME = "_lz_sum_and_norm"


def fused(module: torch.nn.Module) -> Forward | str | None:
    """A forward for the module with its sums and norms fused; why not; None where it has no such sums."""
    kind: type = type(module)
    found = _rewritten(kind)
    if found is None:
        return None
    forward, norms = found
    if is_replaced(module):
        return "its forward was replaced before"
    for norm in norms:
        if scale_of(getattr(module, norm, None)) is None:
            return f'its {norm} does not run lz.rms_norm: replace "norms" too'
    return forward


def _sum_and_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalized sum, and the sum. The norm's replacement may have been undone since."""
    scale = scale_of(norm)
    if scale is None or x.dtype is not residual.dtype or x.dtype is not norm.weight.dtype or _watched(norm):
        total = residual + x
        return norm(total), total
    weight, eps = scale(norm)
    out, total = fused_add_rms_norm(x, residual, weight, eps)
    return out, total


def _watched(norm: Any) -> bool:
    """Whether somebody looks at the norm's input or output, which the fused operation does not show."""
    return bool(norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks)


@cache
def _rewritten(kind: type) -> tuple[Forward, tuple[str, ...]] | None:
    """The forward of a class with its sums and norms fused, and the names of those norms."""
    read = definition_of(kind)
    if read is None:
        return None
    function, definition = read
    rewriter = _Rewriter()
    definition.body = rewriter.statements(definition.body)
    if not rewriter.norms:
        return None
    rewritten = around(kind, function, definition, _NAME, _sum_and_norm, "sums and norms fused")

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return type(self).forward(self, *args, **named) if self.training else rewritten(self, *args, **named)

    return forward, tuple(rewriter.norms)


class _Rewriter:
    """Finds the three statements in a list of statements."""

    def __init__(self) -> None:
        self.norms: list[str] = []

    def statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        at = 0
        while at < len(body):
            found = self._fused(body[at : at + 3])
            result.append(body[at] if found is None else found)
            at += 1 if found is None else 3
        return result

    def _fused(self, three: list[ast.stmt]) -> ast.stmt | None:
        if len(three) < 3:
            return None
        total, kept, normed = (assigned(statement) for statement in three)
        if total is None or kept is None or normed is None:
            return None
        x, residual = total[0], kept[0]
        if not _is_sum(total[1], x, residual) or not is_name(kept[1], x) or normed[0] != x or x == residual:
            return None
        call = normed[1]
        if not isinstance(call, ast.Call) or call.keywords or len(call.args) != 1 or not is_name(call.args[0], x):
            return None
        norm = call.func
        if not isinstance(norm, ast.Attribute) or not is_name(norm.value, "self"):
            return None
        self.norms.append(norm.attr)
        return ast.parse(f"{x}, {residual} = {_NAME}(self.{norm.attr}, {x}, {residual})").body[0]


def _is_sum(node: ast.expr, a: str, b: str) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    return (is_name(node.left, a) and is_name(node.right, b)) or (is_name(node.left, b) and is_name(node.right, a))
