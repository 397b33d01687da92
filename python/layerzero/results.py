"""Answers: attributes to read, ``to_dict`` for machines, text for people, a table in a notebook.

Every public function that finds something out returns a :class:`Result`, or :class:`Rows` of them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike, fspath
from typing import Any, ClassVar, TypeVar, overload

from layerzero.deprecations import warn_once
from layerzero.printing import aligned, visible

R = TypeVar("R", bound="Result")


@dataclass(frozen=True, slots=True)
class Table:
    """What is shown of an answer: a table with a line above it and notes below."""

    caption: str
    #: The titles; none for a list of names and values.
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    #: Titles of the columns of numbers.
    right: Sequence[str] = ()
    #: CSS by row, for notebooks.
    styles: Sequence[str] = ()

    def text(self) -> str:
        """For a terminal."""
        head = [self.caption] if self.caption else []
        indent = "" if self.columns else "  "
        lines = (
            [indent + line for line in aligned(self.columns, self.rows, self.right)]
            if self.rows or self.columns
            else []
        )
        return visible("\n".join([*head, *lines, *self.notes]))

    def html(self) -> str:
        """For a notebook. All of it is escaped."""
        caption = f"<caption>{_escaped(self.caption)}</caption>" if self.caption else ""
        head = f"<thead>{_html_row(self.columns, 'th')}</thead>" if self.columns else ""
        styles = [*self.styles, *[""] * (len(self.rows) - len(self.styles))]
        body = "".join(_html_row(row, "td", style) for row, style in zip(self.rows, styles, strict=True))
        notes = "".join(f"<p>{_escaped(note)}</p>" for note in self.notes)
        return f"<table>{caption}{head}<tbody>{body}</tbody></table>{notes}"


def _html_row(cells: Iterable[str], tag: str, style: str = "") -> str:
    inside = "".join(f"<{tag}>{_escaped(cell)}</{tag}>" for cell in cells)
    return f'<tr style="{html.escape(style)}">{inside}</tr>' if style else f"<tr>{inside}</tr>"


def _escaped(text: str) -> str:
    return html.escape(visible(text))


def call_text(call: Mapping[str, Any], *, named: bool = True) -> str:
    """A call as it is written down, on one line: ``norm.rms input float32[2, 8]``."""
    tensors = (f"{name} {t['dtype']}{list(t['shape'])}" for name, t in call["tensors"].items())
    params = (f"{name}={value}" for name, value in call.get("params", {}).items())
    return " ".join([*([call["op"]] if named else []), *tensors, *params])


def cell(value: Any) -> str:
    """A value in a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        is_call = "op" in value and isinstance(value.get("tensors"), Mapping)
        return call_text(value) if is_call else json.dumps(plain(value), ensure_ascii=False, default=str)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{len(value)} {value._name}" if isinstance(value, Rows) else ", ".join(map(cell, value))
    return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """A value as JSON has it: dicts, lists, strings, numbers."""
    if isinstance(value, Rows):
        return [plain(row) for row in value]
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(inner) for inner in value]
    return fspath(value) if isinstance(value, PathLike) else value


def _names(kind: type[Result]) -> tuple[str, ...]:
    """The public attributes of an answer, in order: fields of a dataclass or of a named tuple."""
    found: Iterable[str] = getattr(kind, "_fields", None) or (f.name for f in fields(kind))  # type: ignore[arg-type]
    return tuple(name for name in found if not name.startswith("_"))


class Result:
    """An answer of LayerZero. Read its attributes; ``to_dict()`` gives plain data for JSON, ``print`` shows it, and a
    notebook draws it as a table."""

    __slots__ = ()

    #: What is shown of it in a table of several; all attributes where this is empty.
    _columns: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as data: dicts, lists, strings and numbers, as JSON has them."""
        return {name: plain(getattr(self, name)) for name in _names(type(self))}

    def _table(self) -> Table:
        """What is shown of it."""
        rows = [(name, cell(getattr(self, name))) for name in _names(type(self))]
        return Table(type(self).__name__, (), rows)

    def __str__(self) -> str:
        return self._table().text()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self._table().html()


class KeyedResult(Result):
    """A :class:`Result` that was a dict before: ``result["name"]`` still works, with a ``DeprecationWarning``."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        self._was_dict(name)
        return getattr(self, name) if name in _names(type(self)) else self.to_dict()[name]

    def __iter__(self) -> Iterator[str]:
        self._was_dict()
        return iter(self.to_dict())

    def __contains__(self, name: object) -> bool:
        self._was_dict()
        return name in self.to_dict()

    def keys(self) -> Iterable[str]:
        """Deprecated: use ``to_dict()``."""
        self._was_dict()
        return self.to_dict().keys()

    def values(self) -> Iterable[Any]:
        """Deprecated: use ``to_dict()``."""
        self._was_dict()
        return self.to_dict().values()

    def items(self) -> Iterable[tuple[str, Any]]:
        """Deprecated: use ``to_dict()``."""
        self._was_dict()
        return self.to_dict().items()

    def get(self, name: str, default: Any = None) -> Any:
        """Deprecated: use the attribute."""
        self._was_dict(name)
        return getattr(self, name) if name in _names(type(self)) else self.to_dict().get(name, default)

    def _was_dict(self, name: str = "to_dict()") -> None:
        kind = type(self).__name__
        warn_once(f"{kind} is no dict", f"{kind} is no dict any more: use .{name}", stacklevel=4)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Rows(Result, Sequence[R]):
    """Answers in a row. A sequence that cannot be changed; it equals a list or tuple of the same answers. Prints as a table."""

    _rows: tuple[R, ...]
    _name: str = "rows"

    @overload
    def __getitem__(self, at: int) -> R: ...
    @overload
    def __getitem__(self, at: slice) -> Rows[R]: ...
    def __getitem__(self, at: int | slice) -> R | Rows[R]:
        return Rows(self._rows[at], self._name) if isinstance(at, slice) else self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[R]:
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Rows | list | tuple):
            return self._rows == tuple(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """The same as data: the list of all, under the name of what they are (``kernels``, ``settings``, …)."""
        return {self._name: [row.to_dict() for row in self._rows]}

    def _table(self) -> Table:
        if not self._rows:
            return Table(f"no {self._name}", (), ())
        first = type(self._rows[0])
        columns = first._columns or _names(first)
        rows = [[cell(getattr(row, name)) for name in columns] for row in self._rows]
        numbers = [name for name in columns if all(_is_number(getattr(row, name)) for row in self._rows)]
        return Table("", columns, rows, right=numbers)


def rows(found: Iterable[R], name: str) -> Rows[R]:
    """Answers in a row, and what they are: ``rows(kernels, "kernels")``."""
    return Rows(tuple(found), name)
