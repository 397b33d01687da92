"""Writes python/layerzero/_native.pyi, the types of the native module, from what the module says of its functions.

With `--check` nothing is written; it ends with 1 when the file is not what would be written.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

from layerzero import _native

STUB = Path(__file__).parents[1] / "python" / "layerzero" / "_native.pyi"
WIDTH = 120

HEADER = '''\
# Written by scripts/stubs.py from the operations' schemas; `make stubs` writes it again.
"""The native half of the package: the functions people call, and what the rest of the package is built on."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from os import PathLike
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, final, overload

from numpy.typing import NDArray
from torch import Generator, Tensor

from layerzero.arrays import Quantized
from layerzero.inspection import Reason
from layerzero.packing import PackedWeight

class _DLPack(Protocol):
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> Any: ...

# Tensors in, tensors out; numpy arrays in, numpy arrays out; any other DLPack producer in, tensors out. The arrays of a
# call are of one kind.
_Array = TypeVar("_Array", Tensor, NDArray[Any], _DLPack)

# A kernel's id, the function that runs it, and the names of that function's parameters.
_Adapter: TypeAlias = tuple[str, Callable[..., Any], list[str]]

'''

#: Classes, as they are written.
CLASSES = {
    "Graph": '''\
@final
class Graph:
    """A model as a graph of operations."""

    @staticmethod
    def from_document(text: str, constants: Sequence[Any]) -> Graph: ...
    def interpret(
        self, inputs: Sequence[Any], host: Callable[[int, list[Any]], Any] | None = None
    ) -> tuple[list[Any], list[Any]]: ...
    def __len__(self) -> int: ...
    @property
    def inputs(self) -> list[tuple[str, str, list[int | str]]]: ...
    @property
    def operations(self) -> list[str]: ...
    @property
    def outputs(self) -> list[tuple[str, str, list[int | str]]]: ...
    @property
    def symbols(self) -> list[tuple[str, int, int | None]]: ...
    @property
    def updates(self) -> list[str]: ...

''',
    "Plan": '''\
@final
class Plan:
    """The decisions of a plan: those of a dispatch table, in force for the calls made inside."""

    def __new__(cls, text: str, name: str, learns: bool) -> Plan: ...
    def learned(self, onto: Plan) -> Plan | None: ...
    def mismatches(self) -> str: ...
    def noted(self) -> list[tuple[str, int]]: ...
    def table(self) -> str: ...

''',
    "DeviceGraph": '''\
@final
class DeviceGraph:
    """A graph that was optimised, and whose nodes Python runs on a device."""

    def __new__(cls, graph: Graph, *, off: Sequence[str] = ...) -> DeviceGraph: ...
    def constant(self, name: str) -> Any: ...
    def dot(self) -> str: ...
    def nodes(self, inputs: Sequence[tuple[str, Sequence[int]]]) -> list[dict[str, Any]]: ...
    def text(self) -> str: ...
    @property
    def inputs(self) -> list[str]: ...
    @property
    def optimised(self) -> dict[str, Any]: ...
    @property
    def outputs(self) -> list[str]: ...
    @property
    def updates(self) -> list[tuple[str, str]]: ...

''',
    "Session": '''\
@final
class Session:
    """A graph that was optimised, and is compiled for each size of its inputs at the first use."""

    def __new__(
        cls,
        graph: Graph,
        *,
        threads: int,
        off: Sequence[str] = ...,
        tune: bool = False,
        weights: str = "float32",
        precision: str = "highest",
        share: Session | None = None,
    ) -> Session: ...
    def arena(self, inputs: Sequence[Any]) -> int: ...
    def dot(self) -> str: ...
    def failures(self, inputs: Sequence[Any]) -> list[tuple[str, str, str]]: ...
    @staticmethod
    def passes() -> list[str]: ...
    def profile(
        self, inputs: Sequence[Any], rounds: int, host: Callable[[int, list[Any]], Any] | None = None
    ) -> list[dict[str, Any]]: ...
    def quick(self, inputs: tuple[Any, ...]) -> Any: ...
    def run(self, inputs: Sequence[Any], host: Callable[[int, list[Any]], Any] | None = None) -> list[Any]: ...
    def steps(self, inputs: Sequence[Any]) -> list[dict[str, Any]]: ...
    def text(self) -> str: ...
    @property
    def optimised(self) -> dict[str, Any]: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def plans(self) -> int: ...
    @property
    def source_bytes(self) -> int: ...

''',
    "Checkpoint": '''\
@final
class Checkpoint:
    """What is registered and configured at a moment."""

''',
    "Overlay": '''\
@final
class Overlay:
    """What the calls of a ``with`` block, or of a plan, are made in."""

    @property
    def number(self) -> int: ...

''',
    "Subject": '''\
@final
class Subject:
    """The arguments of one call, on which kernels are run one by one, whatever the ranking."""

    def __new__(cls, function: str, kwargs: dict[str, Any], legal: bool = False) -> Subject: ...
    def run(self, kernel: str) -> Any: ...
    def time(self, kernel: str, calls: int) -> float: ...
    def time_between(
        self, kernel: str, calls: int, before: Callable[[], object], after: Callable[[], float]
    ) -> list[float]: ...

''',
    "TextCall": '''\
@final
class TextCall:
    """A call on texts, but for the texts."""

    def __new__(
        cls, op: str, identity: dict[str, Any], tokenizer: Any, own: str, refused: Sequence[tuple[str, str]]
    ) -> TextCall: ...
    def run(self, texts: list[Any], length: int, only: str | None = None) -> Any: ...
    def which(self, texts: int, length: int) -> dict[str, Any]: ...
    def explain(self, texts: int, length: int) -> tuple[str, str]: ...
    def validate(self, kernel: str, texts: int, length: int) -> list[Reason]: ...

''',
}

#: Functions that are no operations: their arguments, and last their result. The module does not know their types,
#: stubtest knows all else about them.
OTHERS: dict[str, tuple[str, ...]] = {
    "allocations": ("int | None",),
    "exchange_capture_mode": ("mode: int", "int | None"),
    "backends": ("str",),
    "call_inputs": ("call: str", "device: int", "dict[str, Any]"),
    "device_name": ("device: int", "str"),
    "device_number": ("name: str", "int"),
    "explain_call": ("call: str", "device: int", "tuple[str, str]"),
    "graph_captured": ("kernel: str", "call: str", "device: int", "doubt: str | None = None", "None"),
    "graph_hold": ("call: str", "device: int", "str"),
    "graph_release": ("None",),
    "graph_wanted": ("call: str", "device: int", "str | None"),
    "jit_begin": ("kernel: str", "call: str", "device: int", "int"),
    "jit_done": ("id: int", "compile_ms: float", "caches: Sequence[str | PathLike[str]]", "None"),
    "jit_failed": ("id: int", "error: str", "None"),
    "jit_forked": ("int",),
    "jit_next": ("tuple[int, str, str, int] | None",),
    "jit_wanted": ("call: str", "device: int", "capturing: bool = False", "str | None"),
    "learn": ("int",),
    "load_table": ("text: str", "origin: str", "str"),
    "load_warm": ("int",),
    "lockfile": ("calls: Sequence[str]", "device: int", "str"),
    "manifest": ("str",),
    "measure": (
        "request: str",
        "budget_s: float",
        "samples: int",
        "force: bool",
        "seed: int",
        "regret: bool",
        "tell: Callable[[str], bool] | None = None",
        "stop: Callable[[], bool] | None = None",
        "str",
    ),
    "checkpoint": ("Checkpoint",),
    "restore": ("checkpoint: Checkpoint", "None"),
    "write_file": ("path: PathLike[str]", "text: str", "None"),
    "perfdb_warnings": ("list[str]",),
    "pin_warnings": ("list[str]",),
    "plan_call": ("call: str", "device: int", "str"),
    "read_manifest": ("path: PathLike[str] | None = None", "model_hash: str | None = None", "tuple[str, int]"),
    "recording": ("Plan",),
    "replay": ("text: str", "origin: str", "str"),
    "requested_calls": ("request: str", "list[str]"),
    "save_manifest": ("path: PathLike[str] | None = None", "model_hash: str | None = None", "str"),
    "configure": ("settings: dict[str, Any]", "None"),
    "cli": ("args: Sequence[str]", "int"),
    "default_layouts": ("here: bool", "tuple[str, str]"),
    "devices": ("str",),
    "disable": ("name: str", "why: str", "None"),
    "document": ("text: str", "version: str | None = None", "str"),
    "explain": ("op: str", "*args: Any", "**kwargs: Any", "tuple[str, str]"),
    "explain_to_compile": ("op: str", "captured: bool", "*args: Any", "**kwargs: Any", "str"),
    "after_fork": ("None",),
    "after_fork_in_child": ("None",),
    "before_fork": ("None",),
    "busy": ("function: Any", "args: tuple[Any, ...]", "kwargs: dict[str, Any]", "Any"),
    "end": ("None",),
    "forget_failures": ("None",),
    "health": ("tuple[str, str, bool]",),
    "load_config": ("path: str | PathLike[str]", "None"),
    "load_sources": ("None",),
    "lock": ("operation: str", "kernel: str", "optional: bool = False", "None"),
    "settle_names": ("None",),
    "overlay": ("settings: dict[str, Any]", "plans: Sequence[Plan]", "Overlay"),
    "readiness": ("tuple[str, str, bool]",),
    "rearm": ("name: str", "bool"),
    "refresh_memory": ("None",),
    "reload": ("None",),
    "reset": ("None",),
    "settings": ("str",),
    "calls_made": ("int",),
    "may_explain": ("None",),
    "packed_weights": ("cls: type[PackedWeight]", "None"),
    "set_launch_limits": (
        "device: int",
        "max_grid: tuple[int, int, int] | None",
        "max_threads_per_block: int | None",
        "None",
    ),
    "solve": (
        "model_id: str",
        "calls: Sequence[str]",
        "device: int",
        "buckets: dict[str, list[int]]",
        "tuple[str, str]",
    ),
    "text_operation": ("kernel_id: str", "str | None"),
    "hold_changes": ("None",),
    "settle_changes": ("None",),
    "time_host_by_events": ("yes: bool", "None"),
    "tokenizer_settings": ("tuple[bool, int]",),
    "unpin": ("None",),
    "unlock": ("operation: str", "None"),
    "use_context_variable": ("variable: ContextVar[int]", "None"),
    "functions": ("list[dict[str, Any]]",),
    "inner": ("name: str", "*args: Any", "**kwargs: Any", "Any"),
    "list_kernels": ("op: str | None = None", "str"),
    "load_backend": (
        "name: str",
        "document: str",
        "versions: dict[str, str]",
        "adapters: Sequence[_Adapter]",
        "unavailable: tuple[str, str] | None = None",
        'trust: str = "unproven"',
        "lacks: Sequence[str] = ...",
        "importer: Callable[[], object] | None = None",
        "None",
    ),
    "register": ("document: str", "kernel: _Adapter", 'trust: str = "unproven"', "None"),
    "run_kernel": ("kernel_id: str", "*args: Any", "**kwargs: Any", "Any"),
    "schema": ("operation: str", "dict[str, Any]"),
    "status": ("dict[str, Any]",),
    "unregister": ("kernel_id: str", "None"),
    "validate": ("kernel_id: str", "*args: Any", "**kwargs: Any", "list[Reason]"),
    "which": ("op: str", "*args: Any", "**kwargs: Any", "dict[str, Any]"),
}

#: Arguments that are neither tensors nor parameters of a schema.
SPECIALS = {
    "format": "str",
    "generator": "Generator",
    "layout": "str",
    "normalized_shape": "int | Sequence[int]",
    "out": "_Array",
    "return_lse": "bool",
    "window": "int | tuple[int, int]",
}
TYPES = {"tensor": "_Array", "bool": "bool", "int": "int", "float": "float", "str": "str"}


def argument(declared: dict[str, Any]) -> str:
    """One argument as a stub writes it."""
    name, default = declared["name"], declared["default_text"]
    kind = SPECIALS[name] if declared["kind"] == "special" else TYPES[declared["type"]]
    if declared["required"]:
        return f"{name}: {kind}"
    default = f'"{default[1:-1]}"' if default.startswith("'") else default
    return f"{name}: {kind}{' | None' if default == 'None' else ''} = {default}"


def arguments(function: dict[str, Any], **instead: str) -> list[str]:
    """A function's arguments, some of them as given."""
    found: list[str] = []
    for declared in function["args"]:
        if declared["keyword_only"] and "*" not in found:
            found.append("*")
        found.append(instead.get(declared["name"]) or argument(declared))
    return found


def definition(name: str, given: list[str], result: str, doc: str = "", decorator: str = "") -> str:
    """A definition, broken into lines as ruff breaks it."""
    body = "\n" + textwrap.indent(f'"""{doc}\n"""\n', "    ") if doc else " ..."
    lead = f"{decorator}\ndef {name}" if decorator else f"def {name}"
    line = f"def {name}({', '.join(given)}) -> {result}:"
    if len(line) + (0 if doc else 4) <= WIDTH:
        return f"{lead}({', '.join(given)}) -> {result}:{body}\n"
    inside = f"    {', '.join(given)}"
    if len(inside) <= WIDTH:
        return f"{lead}(\n{inside}\n) -> {result}:{body}\n"
    lines = "".join(f"    {one},\n" for one in given)
    return f"{lead}(\n{lines}) -> {result}:{body}\n"


def docstring(name: str) -> str:
    """The function's own documentation, as wide as the file."""
    lines = (getattr(_native, name).__doc__ or "").splitlines()
    wrapped: list[str] = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        further = indent + ("    " if indent else "")
        wrapped += textwrap.wrap(line, WIDTH - 4, subsequent_indent=further, break_long_words=False) or [""]
    return "\n".join(wrapped)


def operation(function: dict[str, Any]) -> str:
    """The definition, or definitions, of an operation's function."""
    name, outputs = function["name"], function["outputs"]
    if name == "quantize":
        given = arguments(function, scale="scale: _Array")
        chosen = arguments(function, scale="scale: None = None")
        first = definition(name, given, "_Array", docstring(name), "@overload")
        return first + definition(name, chosen, "Quantized", decorator="@overload")
    if any(declared["name"] == "return_lse" for declared in function["args"]):
        alone = arguments(function, return_lse="return_lse: Literal[False] | None = None")
        both = arguments(function, return_lse="return_lse: Literal[True]")
        first = definition(name, alone, "_Array", docstring(name), "@overload")
        return first + definition(name, both, "tuple[_Array, _Array]", decorator="@overload")
    if name in ("linear", "linear_packed", "linear_quantized"):
        # A packed weight says its sizes itself, and brings its scales.
        sizes = {} if name == "linear" else {"out_features": "out_features: int = ..."}
        if name == "linear_quantized":
            sizes["scales"] = "scales: _Array = ..."
        takes = arguments(function, weight="weight: _Array | PackedWeight", **sizes)
        return definition(name, takes, "_Array", docstring(name))
    results = ", ".join("_Array" for _ in outputs)
    result = "None" if not outputs else "_Array" if len(outputs) == 1 else f"tuple[{results}]"
    return definition(name, arguments(function), result, docstring(name))


def stub() -> str:
    """The whole file."""
    functions = _native.functions()
    known = {function["name"] for function in functions} | set(OTHERS) | set(CLASSES)
    public = {name for name in dir(_native) if not name.startswith("_")}
    if public != known:
        sys.exit(f"scripts/stubs.py: give these a signature, or take it away: {sorted(public ^ known)}")
    names = "".join(f'    "{name}",\n' for name in sorted(["__version__", *known]))
    parts = [HEADER, f"__all__ = [\n{names}]\n\n__version__: str\n\n"]
    parts += CLASSES.values()
    parts += [operation(function) for function in functions]
    parts += [definition(name, list(given), result) for name, (*given, result) in sorted(OTHERS.items())]
    return "".join(parts)


def main() -> int:
    """Writes or checks the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="end with 1 when the file is not up to date")
    text = stub()
    if not parser.parse_args().check:
        STUB.write_text(text, encoding="utf-8")
        return 0
    if STUB.is_file() and STUB.read_text(encoding="utf-8") == text:
        return 0
    print(f"{STUB.name} is not up to date; write it with: make stubs", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
