"""Copies of a class's ``forward`` with some of its statements replaced."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from typing import Any

__all__ = ["around", "assigned", "definition_of", "is_name"]

#: What transformers wraps the forward of a layer in, so that it can be recomputed in the backward pass.
_CHECKPOINTING = "forward_with_checkpointing"


def definition_of(kind: type) -> tuple[Any, ast.FunctionDef] | None:
    """The ``forward`` that a class defines itself, and its parsed source; None where it is decorated or cannot be read."""
    function = kind.__dict__.get("forward")
    if inspect.isfunction(function) and function.__qualname__ != f"{kind.__qualname__}.forward":
        return None
    if inspect.isfunction(function) and function.__code__.co_name == _CHECKPOINTING:
        # It calls this one outside of training; in training the class's own forward runs.
        function = function.__wrapped__  # type: ignore[attr-defined]
    if not inspect.isfunction(function) or function.__closure__ is not None:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return None
    return function, definition


def around(kind: type, function: Any, definition: ast.FunctionDef, name: str, value: Any, what: str) -> Any:
    """The function of a changed definition, in which a name is a value of ours.

    Args:
        kind: the class of the function.
        function: the function whose source was parsed.
        definition: the source, changed.
        name: what the changed source calls our value.
        value: our value.
        what: what was changed, for tracebacks.
    """
    # Annotations may name what is not there at run time.
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    definition.returns = None
    # Its globals are those of the file, so our value is a variable of a function around it.
    outer = ast.parse(f"def around({name}):\n    return {definition.name}")
    assert isinstance(outer.body[0], ast.FunctionDef)
    outer.body[0].body.insert(0, definition)
    ast.fix_missing_locations(outer)
    space: dict[str, Any] = {}
    # The file's own source, with statements replaced: nothing from outside the process is run.
    code = compile(outer, f"<{kind.__qualname__}.forward with {what}>", "exec")
    exec(code, vars(sys.modules[kind.__module__]), space)  # noqa: S102
    rewritten = space["around"](value)
    rewritten.__defaults__, rewritten.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return rewritten


def assigned(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """(name, value) of ``name = value``."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    return (target.id, statement.value) if isinstance(target, ast.Name) else None


def is_name(node: ast.expr, name: str) -> bool:
    """Whether it is a variable of this name."""
    return isinstance(node, ast.Name) and node.id == name
