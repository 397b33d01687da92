"""Attention of a model of diffusers that is already built: switched to LayerZero's, module by module, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from layerzero.integrations._transformers.switch import Attentions

__all__ = ["of_diffusers", "switch"]


def of_diffusers(model: Any) -> bool:
    """Whether a module of the model is an attention module of diffusers."""
    return "diffusers.models.attention_processor" in sys.modules and any(map(_is_attention, model.modules()))


def _is_attention(module: Any) -> bool:
    """Whether a module is diffusers' and leaves attention to a processor."""
    return callable(getattr(module, "processor", None)) and hasattr(module, "set_processor")


def switch(model: Any) -> tuple[list[Callable[[], None]], Attentions]:
    """Gives each attention module LayerZero's processor, or its processor LayerZero's backend, where it is certain.

    Returns what undoes it, and which modules are served.
    """
    from layerzero.integrations._diffusers.backend import register_with_diffusers

    register_with_diffusers()
    undo: list[Callable[[], None]] = []
    found = Attentions()
    for module in filter(_is_attention, model.modules()):
        why = _switched(module, undo)
        if why is None:
            found.served[type(module).__name__] += 1
        else:
            found.kept[type(module).__name__, f"attention: {why}"] += 1
    return undo, found


def _switched(module: Any, undo: list[Callable[[], None]]) -> str | None:
    """Switches one module. Returns why not, where it stays as it was."""
    from layerzero.integrations._diffusers import processors as ours
    from layerzero.integrations._diffusers.backend import member

    processor = module.processor
    kind = type(processor)
    if getattr(processor, "_parallel_config", None) is not None:
        return "context parallelism"
    if kind in (ours.LayerZeroAttnProcessor, ours.LayerZeroJointAttnProcessor):
        return "its processor is LayerZero's already"
    if hasattr(processor, "_attention_backend"):
        # Several modules may share a processor, so its backend may be ours by now.
        if processor._attention_backend != member():
            _set_backend(processor, member(), undo)
        return None
    if kind.__module__ != "diffusers.models.attention_processor":
        return f"its processor is {kind.__name__}, of {kind.__module__}"
    new: Any
    match kind.__name__:
        case "AttnProcessor2_0" | "FusedAttnProcessor2_0":
            new, why = ours.LayerZeroAttnProcessor(), ours.not_plain(module)
        case "AttnProcessor":
            upcast = module.upcast_attention or module.upcast_softmax
            why = ours.not_plain(module) or ("scores in float32 by its own setting" if upcast else None)
            new = ours.LayerZeroAttnProcessor()
        case "JointAttnProcessor2_0":
            new, why = ours.LayerZeroJointAttnProcessor(), ours.not_joint(module)
        case _:
            return f"its processor is {kind.__name__}, which computes attention itself"
    if why is not None:
        return why
    module.set_processor(new)
    undo.append(lambda: _bring_back(module, new, processor))
    return None


def _bring_back(module: Any, new: Any, old: Any) -> None:
    # Somebody else may have set one since.
    if module.processor is new:
        module.set_processor(old)


def _set_backend(processor: Any, backend: Any, undo: list[Callable[[], None]]) -> None:
    was_own = "_attention_backend" in vars(processor)
    was = processor._attention_backend

    def back() -> None:
        if processor._attention_backend != backend:
            return
        if was_own:
            processor._attention_backend = was
        else:
            del processor._attention_backend

    processor._attention_backend = backend
    undo.append(back)
