"""How `generate()` of transformers keeps its cache, while a model's steps are replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["fixed_cache"]


def fixed_cache(model: Any) -> Callable[[], None] | None:
    """Has `generate()` use a cache of fixed size, and not compile the model for it. Returns what undoes that.

    `None` where nothing is changed: the model does not generate, its code cannot use such a cache, or its user has chosen
    one already.
    """
    settings = getattr(model, "generation_config", None)
    if settings is None or getattr(settings, "cache_implementation", None) is not None:
        return None
    # Its name until transformers 4.55, and since.
    supported = getattr(model, "_can_compile_fullgraph", getattr(model, "_supports_static_cache", False))
    # transformers 5.17 cannot make masks of chunks for such a cache.
    chunks = "chunked_attention" in (getattr(model.config, "layer_types", None) or ())
    if not supported or chunks:
        return None
    before = settings.cache_implementation, getattr(settings, "disable_compile", False)
    settings.cache_implementation, settings.disable_compile = "static", True

    def undo() -> None:
        settings.cache_implementation, settings.disable_compile = before

    return undo
