"""Triton's interpreter."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def interpret() -> None:
    """Makes Triton's interpreter work with a numpy that no longer turns arrays into integers."""
    interpreter = import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
