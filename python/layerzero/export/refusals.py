"""Models that cannot be exported: the error, and the line of the model that is the cause."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from layerzero.errors import ExportError, first_line, named_line

if TYPE_CHECKING:
    from types import TracebackType

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])


def _is_torchs(file: str) -> bool:
    return file.startswith((_TORCH, "<"))


def _of_model(file: str) -> bool:
    return not file.startswith((_TORCH, _OURS)) and not file.startswith("<")


def _shown(file: str, number: int | None) -> str:
    code = linecache.getline(file, number or 0).strip()
    return f"{Path(file).name}:{number}" + (f": {code}" if code else "")


def line_of(raised: BaseException) -> str:
    """The last line of the model in the traceback of an exception or of what caused it."""
    found = ""
    one: BaseException | None = raised
    while one is not None:
        frames = traceback.extract_tb(_traceback(one))
        # The first lines are those of the caller of `export`; the model's begin where `forward` is called.
        called = [i for i, frame in enumerate(frames) if frame.name == "forward" and not _is_torchs(frame.filename)]
        inside = [frame for frame in frames[called[0] :] if _of_model(frame.filename)] if called else []
        if inside:
            found = _shown(inside[-1].filename, inside[-1].lineno)
        one = one.__cause__ or one.__context__
    return found


def line_of_definition(function: Any) -> str:
    """The first line of a function."""
    code = getattr(function, "__code__", None)
    return "" if code is None else _shown(code.co_filename, code.co_firstlineno)


def _traceback(raised: BaseException) -> TracebackType | None:
    return raised.__traceback__


def line_of_node(node: Any) -> str:
    """The line of the model that made a node of a torch.fx graph."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith('File "'):
            file, _, rest = lines[i][len('File "') :].partition('", line ')
            if _of_model(file):
                number = rest.split(",")[0]
                return _shown(file, int(number)) if number.isdigit() else ""
    return ""


def not_exported(raised: BaseException) -> ExportError:
    """The error for a model that torch.export refuses."""
    if "transformers.cache_utils." in first_line(raised):
        return ExportError(
            "the model gives a cache, which a graph does not",
            code="NOT_EXPORTABLE",
            hint="call it with use_cache=False, or generate text with compiled.generate(input_ids, max_new_tokens)",
        )
    text = f"torch.export cannot trace the model: {named_line(raised)}"
    hint = (
        "the code a graph is made of may not depend on values of tensors: use torch.where or torch.cond, or give the "
        "size a range with torch.export.Dim"
    )
    return ExportError(text, line=line_of(raised), code="NOT_EXPORTABLE", hint=hint)


def unsupported(what: str, node: Any, hint: str) -> ExportError:
    """The error for something that torch exports and a graph cannot hold."""
    return ExportError(what, line=line_of_node(node), code="NOT_EXPORTABLE", hint=hint)
