"""How arguments and results are nested, as text in a plan file: lists, tuples, dicts and classes that registered themselves.

torch's own reader imports the modules that a text names, for defaultdicts and enums. A plan file is data, so these are refused.
"""

from __future__ import annotations

import json
from typing import Any

from torch.utils import _pytree as pytree

#: Nesting deeper than this is no model's.
_DEEPEST = 100


class NestingError(ValueError):
    """Something that a plan file cannot hold."""


def dumps(spec: Any) -> str:
    """The text of a nesting."""
    try:
        text: str = pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, AttributeError) as error:
        raise NestingError(str(error)) from error
    _check(text)
    return text


def loads(text: str) -> Any:
    """The nesting of a text. Nothing is imported."""
    _check(text)
    try:
        return pytree.treespec_loads(text)
    except (NotImplementedError, AssertionError) as error:
        raise NestingError(str(error)) from error


def _check(text: str) -> None:
    _, rows = json.loads(text)
    _row(rows, 0)


def _row(row: Any, depth: int) -> None:
    if depth > _DEEPEST:
        raise NestingError("arguments or results are nested too deeply")
    if row["type"] == "collections.defaultdict":
        raise NestingError("a defaultdict names a function, which a plan file cannot hold")
    context = row["context"]
    if _names_enum(context) or isinstance(context, str) and _names_enum(_decoded(context)):
        raise NestingError("an enum names a class, which a plan file cannot hold")
    for child in row["children_spec"]:
        _row(child, depth + 1)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _names_enum(value: Any) -> bool:
    """Whether torch's reader would look up a class for it."""
    if isinstance(value, dict):
        return "__enum__" in value or any(map(_names_enum, value.values()))
    return isinstance(value, list) and any(map(_names_enum, value))
