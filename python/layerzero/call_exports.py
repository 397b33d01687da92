"""Exports a model for a call. Sizes that differ from those of an earlier call are symbols."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from layerzero.call_arguments import Call, Signature
from layerzero.errors import ExportError, InvalidCallError
from layerzero.export import Exported, export
from layerzero.export.refusals import line_of_definition

if TYPE_CHECKING:
    from layerzero.graph_variants import Variant


def export_call(
    model: Any,
    signature: Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic_shapes: Any,
    strict: bool,
) -> Exported:
    """The model exported for the arguments of a call. With `strict`, a call that would stay torch's is an error."""
    if getattr(model, "training", False):
        raise InvalidCallError(
            "the model is in training mode, and a compiled model is for inference",
            code="TRAINING_MODE",
            hint="call model.eval() first",
        )
    try:
        exported = export(_module(model, signature, [*kwargs]), args, kwargs, dynamic_shapes=dynamic_shapes)
    except ExportError as error:
        # torch records no lines of functions, only of modules.
        if error.line or not (line := line_of_definition(model)):
            raise
        raise ExportError(error.message, line=line, code=error.code, hint=error.hint) from error
    if strict and len(exported.host_calls):
        raise InvalidCallError(
            f"{', '.join(exported.hosts)} would stay torch's",
            code="NOT_EXPORTABLE",
            hint="leave strict=True out, or write the model without these",
        )
    return exported


def open_sizes(
    model: Any,
    signature: Signature,
    earlier: Sequence[Variant],
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`dynamic_shapes` for torch.export, in which the sizes that differ from those of an earlier call are symbols."""
    shapes: list[Any] = [None] * len(call.flat)
    for variant in earlier:
        before = dict(zip(variant.exported.taken, variant.example, strict=False))
        now = {at: one for at, one in enumerate(call.flat) if isinstance(one, torch.Tensor)}
        if variant.exported.in_spec == call.spec and before.keys() == now.keys():
            if any(now[at].dim() != before[at].dim() for at in now):
                continue
            for at, one in now.items():
                shapes[at] = {
                    axis: torch.export.Dim.AUTO
                    for axis, (a, b) in enumerate(zip(one.shape, before[at].shape, strict=True))
                    # torch.export never makes a size of 0 or 1 a symbol.
                    if a != b and a > 1
                }
            break
    else:
        return None
    # In the order in which this call passes its arguments.
    _, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    given: list[Any] = [None] * len(shapes)
    for at, place in enumerate(signature.places(args, kwargs)):
        given[place] = shapes[at]
    positional, named = pytree.tree_unflatten(given, spec)
    return dict(inspect.signature(_module(model, signature, [*kwargs]).forward).bind(*positional, **named).arguments)


def _module(model: Any, signature: Signature, names: Sequence[str]) -> Any:
    """The model as a module, which is all that torch.export takes. Each of the names is a parameter of its ``forward``.

    torch.export has no symbols for the sizes of arguments that are collected in ``**kwargs``.
    """
    if isinstance(model, torch.nn.Module) and all(name in signature.parameters for name in names):
        return model

    class Function(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.model(*args, **kwargs)

    Function.forward.__signature__ = signature.of_method(names)  # type: ignore[attr-defined]
    return Function()
