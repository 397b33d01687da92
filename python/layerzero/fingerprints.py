"""What the kernels of a compiled graph were chosen by, as a short text that torch's compiler can guard.

A graph that is traced while :data:`SEEN` says one thing is compiled again where it says another, and torch's cache of
compiled graphs on disk keeps the two apart. Nothing is computed until a graph is traced for the first time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from layerzero import _native

#: By the words of ``compile.recompile``: the fingerprint that was seen last. The compiler reads it while it traces.
SEEN: dict[str, str] = {"policy": "", "measurements": ""}

#: What code said in this process, in order. Settings say what they are; rules and locks do not.
_said: list[str] = []
#: The part that does not depend on `with` blocks; `None` while nobody has traced a graph.
_base: list[str | None] = [None]
#: Gives the frames that calls made here are inside of. Set by :mod:`layerzero.control`.
_frames: list[Callable[[], Sequence[Any]]] = [lambda: ()]


#: By the part that does not depend on blocks, and the overlay.
_known: dict[tuple[str, int], str] = {}
_MOST = 1024


def of_frames(frames: Callable[[], Sequence[Any]]) -> None:
    """Says who knows what `with` blocks are open."""
    _frames[0] = frames


def said(what: str, *values: Any) -> None:
    """Takes note of what code says: rules, locks, kernels."""
    _said.append(f"{what} {values!r}")
    changed()


def forgotten() -> None:
    """Forgets what code said."""
    _said.clear()
    changed()


def changed() -> None:
    """The policy of the process may have changed."""
    if _base[0] is not None:
        begin()


def begin() -> None:
    """Computes the fingerprint; from here on it is kept up to date."""
    _base[0] = _digest(_settings(), *_said)
    look()


def look() -> None:
    """Takes note of the `with` blocks that are open."""
    if _base[0] is not None:
        SEEN["policy"] = policy()


def policy() -> str:
    """What is in force for calls made here; empty while nobody has asked for it to be kept up to date."""
    base, frames = _base[0], _frames[0]()
    if base is None:
        return ""
    return _inside(base, frames) if frames else base


def _inside(base: str, frames: Sequence[Any]) -> str:
    """Of what is in force inside of these blocks. An overlay is made of all of them, and does not change."""
    key = base, frames[0].number
    known = _known.get(key)
    if known is None:
        if len(_known) >= _MOST:
            _known.clear()
        known = _known[key] = _digest(base, *map(_block, frames))
    return known


def measured() -> None:
    """Takes note of the measurements there are."""
    if _base[0] is not None:
        known = json.loads(_native.health()[0])["perfdb"]
        SEEN["measurements"] = _digest(json.dumps(known, sort_keys=True))


def _settings() -> str:
    found = json.loads(_native.settings())
    values = {entry["key"]: entry["value"] for entry in found["entries"]}
    return json.dumps([values, [_content(file) for file in found["files"]]], sort_keys=True)


def _content(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"{file}: {error}"


def _block(frame: Any) -> str:
    plan = frame.plan.table() if isinstance(frame.plan, _native.Plan) else ""
    return f"{sorted(frame.said.items(), key=lambda item: item[0])!r} {plan}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
