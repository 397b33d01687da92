"""How `generate()` of transformers keeps its cache, while a model's steps are replayed as CUDA graphs."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

__all__ = ["fixed_cache"]

#: Arguments of `generate()` that say what the cache is, or need one that grows.
_OWN_CACHE = (
    *("past_key_values", "cache_implementation", "cache_config", "custom_generate"),
    *("assistant_model", "prompt_lookup_num_tokens"),
)


def fixed_cache(model: Any) -> Callable[[], None] | None:
    """Has `generate()` use a cache of fixed size, and not compile the model for it, unless a call says otherwise. Returns what
    undoes that.

    `None` where nothing is changed: the model does not generate, or its code cannot use such a cache.
    """
    config = getattr(model, "config", None)
    if not hasattr(model, "generate") or config is None or getattr(config, "is_encoder_decoder", False):
        return None
    # Its name until transformers 4.55, and since.
    supported = getattr(model, "_can_compile_fullgraph", getattr(model, "_supports_static_cache", False))
    # transformers 5.17 cannot make masks of chunks for such a cache.
    chunks = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if not supported or chunks:
        return None
    before = vars(model).get("generate")
    inner = type(model).generate if before is None else before.__func__

    @functools.wraps(inner)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        from layerzero.integrations.models import step_graphs

        if step_graphs.of(self) is not None and not _has_its_own(self, args, kwargs):
            kwargs |= {"cache_implementation": "static", "disable_compile": True}
        return inner(self, *args, **kwargs)

    model.__dict__["generate"] = types.MethodType(generate, model)

    def undo() -> None:
        model.__dict__.pop("generate", None)
        if before is not None:
            model.__dict__["generate"] = before

    return undo


def _has_its_own(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call says how tokens are cached, or searches with beams, which reorders the cache at every step."""
    settings = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or model.generation_config
    own = [kwargs.get(name) for name in _OWN_CACHE]
    own += [getattr(settings, name, None) for name in ("cache_implementation", "prompt_lookup_num_tokens")]
    if kwargs.get("use_cache", getattr(settings, "use_cache", True)) is False:
        return True
    beams = kwargs.get("num_beams") or getattr(settings, "num_beams", None) or 1
    return beams > 1 or any(value is not None for value in own)
