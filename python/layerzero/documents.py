"""What users describe in dicts and lists, written as JSON for the native side."""

from __future__ import annotations

import json
from typing import Any

#: How deep dicts and lists may nest, and how many values they may hold, counted wherever they appear. They may contain
#: each other or themselves: without limits a few dozen lists are more text than fits into memory.
MAX_DEPTH = 64
MOST_VALUES = 1_000_000


def to_json(value: Any) -> str:
    """The value as JSON, within the limits."""
    _check(value)
    return json.dumps(value)


def _check(value: Any) -> None:
    count = 0
    left = [(value, MAX_DEPTH)]
    while left:
        inner, levels = left.pop()
        count += 1
        if count > MOST_VALUES:
            _refuse(f"there are more than {MOST_VALUES} values in it")
        if isinstance(inner, dict | list | tuple):
            if levels == 0:
                _refuse(f"dicts and lists are nested more than {MAX_DEPTH} deep")
            values = inner.values() if isinstance(inner, dict) else inner
            left += [(item, levels - 1) for item in values]


def _refuse(why: str) -> None:
    from layerzero.errors import ConfigurationError

    raise ConfigurationError(f"the description cannot be read: {why}", code="TOO_LARGE", hint="describe it in less")
