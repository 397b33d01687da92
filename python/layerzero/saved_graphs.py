"""The fields of a plan file: the graph, the nesting of its arguments and results, and the sizes and values that it is for.

`plan_files.py` reads and writes the bytes; this module reads and writes the fields of the head. They are data, never code: a
condition on sizes may have only known words, and a constant argument is a number, a text or ``None``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils._sympy import functions

from layerzero import nesting, plan_files
from layerzero.call_arguments import Signature
from layerzero.errors import ConfigurationError, InvalidCallError, first_line
from layerzero.export import Exported
from layerzero.export.host_calls import HostCalls
from layerzero.graph_variants import How, Variant

#: The largest example input that a file may have, in elements.
_MOST_ELEMENTS = 1 << 30
#: The words that a condition may have, besides symbols and numbers.
_WORDS = frozenset(["Eq", "Ne", "Mod", "Max", "Min", "FloorDiv", "PythonMod", "CleanDiv", "And", "Or", "Not"])
#: Constant arguments, by the name of their type: how each is read from its text.
_CONSTANTS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: {"True": True, "False": False}[text],
    "str": str,
    "NoneType": lambda _: None,
}


@dataclass(frozen=True)
class SavedGraph:
    """What a plan file holds."""

    #: The name of the model.
    model: str
    #: The name of the CPU it was written on.
    hardware: str
    #: The parameters of the model.
    signature: Signature
    #: The graph and its weights.
    variant: Variant


def write(path: str | Path, saved: SavedGraph) -> Path:
    """Writes a file. A model with calls that stay torch's is refused, and so is a nesting that could be read only with code."""
    exported, how = saved.variant.exported, saved.variant.how
    if len(exported.host_calls):
        raise InvalidCallError(
            f"{', '.join(exported.hosts)} stay torch's calls, which a file cannot hold",
            code="NOT_EXPORTABLE",
            hint="compile with strict=True to see all of them",
        )
    try:
        arguments, results = nesting.dumps(exported.in_spec), nesting.dumps(exported.out_spec)
    except nesting.NestingError as error:
        raise InvalidCallError(
            f"arguments or results cannot be written: {first_line(error)}",
            code="NOT_EXPORTABLE",
            hint="pass and return tensors, lists, tuples and dicts",
        ) from error
    names = json.loads(exported.document)["constants"]
    weights = dict(zip(names, exported.constants, strict=True))
    weights |= {f"buffer:{at}": buffer for at, buffer in enumerate(exported.buffers)}
    head = {
        "model": saved.model,
        "hardware": saved.hardware,
        "document": exported.document,
        "conditions": [str(one) for one in exported.conditions],
        "taken": exported.taken,
        "fixed": [[at, type(value).__name__, _text(value)] for at, value in exported.fixed.items()],
        "parameters": saved.signature.dumps(),
        "given": exported.given,
        "arguments": arguments,
        "results": results,
        "examples": [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in saved.variant.example],
        "off": list(how.off),
        "tune": how.tune,
        "weight_dtype": how.weights,
        "precision": how.precision,
    }
    return plan_files.write(path, head, weights)


def read(path: str | Path, *, verify: bool) -> SavedGraph:
    """Reads a file and checks that its fields fit together. `verify` compares the weights with their checksums."""
    try:
        file = plan_files.read(path, verify=verify)
        return _read(file.head, file.weights)
    except ConfigurationError:
        raise
    except (
        *(KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError),
        *(RecursionError, OverflowError, MemoryError, NotImplementedError, SyntaxError),
    ) as error:
        raise plan_files.bad(path, first_line(error)) from error


def _read(head: dict[str, Any], weights: list[Tensor]) -> SavedGraph:
    count = len(json.loads(head["document"])["constants"])
    exported = Exported(
        document=head["document"],
        constants=weights[:count],
        buffers=weights[count:],
        held=[],
        host_calls=HostCalls(),
        conditions=[condition(one) for one in head["conditions"]],
        taken=[int(at) for at in head["taken"]],
        given=[(None if at is None else int(at), constant) for at, constant in head["given"]],
        in_spec=nesting.loads(head["arguments"]),
        out_spec=nesting.loads(head["results"]),
        fixed={int(at): _constant(str(name), text) for at, name, text in head["fixed"]},
    )
    example = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for dtype, shape in head["examples"]]
    how = How(
        tune=bool(head["tune"]),
        off=tuple(str(one) for one in head["off"]),
        weights=head["weight_dtype"],
        precision=str(head["precision"]),
    )
    variant = Variant(exported, _zeros(example), how)
    saved = SavedGraph(str(head["model"]), str(head["hardware"]), Signature.loads(head["parameters"]), variant)
    _check(variant)
    return saved


def _check(variant: Variant) -> None:
    """Raises an error if arguments, results and examples are not those of the graph."""
    exported, graph = variant.exported, variant.graph
    taken, given = exported.taken, exported.given
    if len(taken) + len(exported.buffers) != len(graph.inputs) or len(set(taken)) != len(taken):
        raise ValueError(f"it takes {len(taken)} arguments, and its graph {len(graph.inputs)}")
    if any(not 0 <= at < exported.in_spec.num_leaves for at in taken) or exported.in_spec.num_children != 2:
        raise ValueError("it takes arguments that it does not have")
    if {*taken, *exported.fixed} != {*range(exported.in_spec.num_leaves)} or not exported.fixed.keys().isdisjoint(
        taken
    ):
        raise ValueError("it has arguments that are neither tensors nor constants")
    results = range(len(graph.outputs))
    if len(given) != exported.out_spec.num_leaves or any(at is not None and at not in results for at, _ in given):
        raise ValueError("it gives results that its graph does not have")
    if len(variant.example) != len(graph.inputs):
        raise ValueError(f"it has {len(variant.example)} examples for {len(graph.inputs)} inputs")
    if why := variant.fits([*variant.example[: len(taken)], *exported.buffers]):
        raise ValueError(f"its examples do not fit: {why}")


def _zeros(outlines: Sequence[Tensor]) -> list[Tensor]:
    """Inputs of these sizes. They are single zeros, expanded, so that they take no memory."""
    if any(one.numel() > _MOST_ELEMENTS for one in outlines):
        raise ValueError("its examples are too large")
    return [torch.zeros((), dtype=one.dtype).expand(one.shape) for one in outlines]


def condition(text: str) -> Any:
    """A condition on sizes from its text. Only symbols, numbers, arithmetic and comparisons are accepted."""
    # sympify evaluates the text. So only known words get there, and no powers, which could take forever.
    tokens = re.findall(r"[A-Za-z_]\w*|\d+|\S", text) if len(text) <= 2000 else [""]
    known = (one in _WORDS or re.fullmatch(r"[su]\d{1,9}|\d{1,18}|[()+*/<>=,&|~-]", one) for one in tokens)
    if "**" in text or not all(known):
        raise ValueError(f"the condition {text[:100]!r} is not understood")
    names = {name: sympy.Symbol(name, integer=True) for name in re.findall(r"[su]\d+", text)}
    ours = {word: getattr(functions, word) for word in ("FloorDiv", "Mod", "PythonMod", "CleanDiv")}
    return sympy.sympify(text, locals={**names, **ours})


def _text(value: Any) -> str:
    """The text of a constant argument."""
    return value if isinstance(value, str) else repr(value)


def _constant(name: str, text: Any) -> Any:
    """A constant argument from the name of its type and its text."""
    return _CONSTANTS[name](str(text))
