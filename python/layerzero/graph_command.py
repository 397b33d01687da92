"""``layerzero graph show``: the optimised graph of a model, as text, for Graphviz, or drawn."""

from __future__ import annotations

import argparse
import importlib
import inspect
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layerzero import loading
from layerzero.errors import ConfigurationError, LayerZeroError

_MODEL = (
    "a file that CompiledModel.save wrote; a transformers configuration: the path of a config.json, a name in the local Hugging Face "
    "cache, or a published one (gpt2); or MODULE:NAME, a torch.nn.Module, or a function without arguments that gives a model, or a "
    "model and its inputs"
)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def main(arguments: Sequence[str]) -> int:
    """Prints a graph; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="layerzero graph",
        description="Shows the graph that a model is compiled to, after optimisation.",
        epilog="Exit codes: 0 it is shown; 1 the model cannot be compiled; 2 wrong usage, or something is missing.",
    )
    parser.add_argument("action", choices=["show"], help="print the graph of a model")
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--dot", action="store_true", help="in the language of Graphviz")
    form.add_argument("--svg", action="store_true", help="drawn as SVG; needs Graphviz")
    parser.add_argument("--output", metavar="FILE", help="write it to a file")
    parser.add_argument(
        "--input",
        metavar="SIZES[:DTYPE]",
        action="append",
        default=[],
        help="an input of the model, for example 2x16:int64; once for each input",
    )
    parser.add_argument("--length", type=_count, default=16, help="tokens, for a configuration (16)")
    parser.add_argument("--layers", type=_count, help="only so many layers of a configuration: weights are allocated")
    parser.add_argument("--off", metavar="PASS", action="append", default=[], help="leave out an optimisation pass")
    options = parser.parse_args(arguments)
    loading.load()
    try:
        drawing = _drawing_program() if options.svg else ""
        compiled = _compiled(options)
        text = compiled.graph("dot" if options.dot or options.svg else "text")
        if drawing:
            text = _drawn(drawing, text)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    except LayerZeroError as error:
        print(error, file=sys.stderr)
        return 1
    if options.output:
        try:
            Path(options.output).write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"{options.output} cannot be written: {error.strerror or error}", file=sys.stderr)
            return 2
    else:
        print(text, end="" if text.endswith("\n") else "\n")
    return 0


def _drawing_program() -> str:
    found = shutil.which("dot")
    if found is None:
        raise ConfigurationError(
            "Graphviz is not installed: there is no program 'dot'",
            code="NO_GRAPHVIZ",
            hint="install Graphviz, or use --dot and draw it elsewhere",
        )
    return found


def _drawn(program: str, text: str) -> str:
    try:
        return subprocess.run([program, "-Tsvg"], input=text, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines() or [""]
        raise ConfigurationError(
            f"Graphviz could not draw the graph: {said[0]}",
            code="DRAWING_FAILED",
            hint="use --dot and draw it elsewhere",
        ) from error


def _compiled(options: argparse.Namespace) -> Any:
    from layerzero.compiled_model import compile
    from layerzero.loaded_models import load_plan

    name = options.model
    path = Path(name)
    if path.is_file() and path.suffix != ".json":
        return load_plan(path)
    module, colon, member = name.partition(":")
    if colon and not path.exists():
        model, inputs = _member(module, member)
        given = [_input(text) for text in options.input] or inputs
        if not given:
            raise ConfigurationError(
                f"{name} says nothing of its inputs",
                code="NO_EXAMPLE_INPUTS",
                hint="pass --input, for example --input 2x16",
            )
        return compile(model, *given, off=options.off)
    return _of_configuration(name, options.length, options.layers, options.off)


def _member(module: str, member: str) -> tuple[Any, list[Any]]:
    import torch

    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
        for part in member.split("."):
            found = getattr(found, part)
    except Exception as error:
        said = (
            error
            if isinstance(error, (ImportError, AttributeError, ValueError))
            else f"{type(error).__name__}: {error}"
        )
        raise ConfigurationError(
            f"{module}:{member} cannot be imported: {said}", code="BAD_MODEL", hint="give MODULE:NAME as in an import"
        ) from error
    finally:
        if "" in sys.path:
            sys.path.remove("")
    model: Any = found
    if not isinstance(model, torch.nn.Module) and callable(model) and not _needs_arguments(model):
        try:
            model = model()
        except Exception as error:
            raise ConfigurationError(
                f"{module}:{member}() gives no model: {type(error).__name__}: {error}",
                code="BAD_MODEL",
                hint="give a function without arguments that gives a module, or a module and its inputs",
            ) from error
    inputs: list[Any] = []
    if isinstance(model, tuple) and model:
        model, *inputs = model
        inputs = list(inputs[0]) if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)) else inputs
    if isinstance(model, torch.nn.Module):
        model = model.eval()
    return model, inputs


def _needs_arguments(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Built-in functions do not tell. None of them gives a model.
        return True
    return any(one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)


def _input(text: str) -> Any:
    import torch

    sizes, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    try:
        shape = [int(size) for size in sizes.split("x")] if sizes else []
    except ValueError:
        shape = [-1]
    if not isinstance(dtype, torch.dtype) or any(size < 0 for size in shape):
        raise ConfigurationError(f"--input {text} is not understood", code="BAD_PARAM", hint="for example 2x16:int64")
    return torch.zeros(shape, dtype=dtype)


def _of_configuration(name: str, length: int, layers: int | None, off: list[str]) -> Any:
    import torch

    from layerzero.compiled_model import compile
    from layerzero.integrations._transformers import models

    model = models.with_weights(name, layers)
    ids = torch.zeros(1, length, dtype=torch.int64)
    return compile(model, kwargs={"input_ids": ids, "use_cache": False}, off=off)
