"""Attention of a model of transformers that is already built: switched to LayerZero's, and back."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from layerzero.integrations._transformers.registering import NAME, register_with_transformers

__all__ = ["Attentions", "of_transformers", "restore", "switch"]


@dataclass
class Attentions:
    """The attention modules of a model: how many LayerZero serves by class, and what it does not."""

    served: Counter[str] = field(default_factory=Counter)
    kept: Counter[tuple[str, str]] = field(default_factory=Counter)


def of_transformers(model: Any) -> bool:
    """Whether it is a model of transformers, by whatever name its class was imported."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


@dataclass
class _Group:
    """A model inside the model: its configurations, and its attention modules with why each is not served."""

    configs: dict[int, Any] = field(default_factory=dict)
    modules: list[tuple[str, str | None]] = field(default_factory=list)


def switch(model: Any) -> tuple[list[tuple[Any, str | None]], Attentions]:
    """Sets the implementation in every configuration of which LayerZero serves all attention modules.

    A mask is made once for a configuration, so one module that is not served keeps the others as they are.

    Returns the configurations with what they said before, and which modules are served.
    """
    register_with_transformers()
    groups = _groups(model)
    refused: dict[int, str] = {}
    # A configuration may belong to several groups: what one refuses, all of them do.
    for _ in groups:
        for group in groups:
            why = next((f"{name}: {why}" for name, why in group.modules if why is not None), None)
            why = why or next((refused[key] for key in group.configs if key in refused), None)
            if why is not None:
                refused |= dict.fromkeys(group.configs, why)
    found = Attentions()
    for group in groups:
        shared = next((refused[key] for key in group.configs if key in refused), None)
        for name, why in group.modules:
            if shared is None:
                found.served[name] += 1
            else:
                found.kept[name, why or f"its configuration is also that of {shared}"] += 1
    configs = {key: config for group in groups for key, config in group.configs.items() if key not in refused}
    kept = [(config, config._attn_implementation) for config in configs.values()]
    kept = [held for held in kept if held[1] != NAME]
    for config, _ in kept:
        config._attn_implementation_internal = NAME
    return kept, found


def _groups(model: Any) -> list[_Group]:
    """The models of transformers in a model that look attention up by name, and those that do not where they attend."""
    from transformers import PreTrainedModel

    from layerzero.integrations._transformers.masks import written

    # Outer models come first, so what is left is the innermost model that a module belongs to.
    owners = {
        id(part): inner for inner in model.modules() if isinstance(inner, PreTrainedModel) for part in inner.modules()
    }
    groups: dict[int, _Group] = {}
    for module in model.modules():
        owner = owners[id(module)]
        group = groups.setdefault(id(owner.config), _Group())
        if module is owner and written(type(module).__module__).serves(type(module.config)):
            group.configs[id(module.config)] = module.config
        elif module is not owner and _is_attention(module):
            # Some keep a copy of the model's.
            own = getattr(module, "config", None)
            for config in (owner.config, own if hasattr(own, "_attn_implementation") else owner.config):
                group.configs[id(config)] = config
            group.modules.append((type(module).__name__, _not_served(module, owner.config)))
    return list(groups.values())


def _not_served(module: Any, config: Any) -> str | None:
    """Why the attention of a module is not LayerZero's; None where it is."""
    from layerzero.integrations._transformers.masks import written

    file = written(type(module).__module__)
    if not file.by_name:
        return "its file computes attention itself"
    if not file.serves(type(config)):
        return "its file has a class that computes attention itself, with the same mask"
    if unknown := file.arguments - _SERVED:
        return f"attention with {', '.join(sorted(unknown))}, which LayerZero does not know"
    return None


#: Arguments that modeling files give to attention and that are served, or change nothing.
_SERVED = frozenset(
    [
        "attention_mask",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "dropout",
        "indices",
        "is_causal",
        "key",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "position_bias",
        "position_ids",
        "query",
        "s_aux",
        "scaling",
        "sliding_window",
        "softcap",
        "value",
        "head_mask",
    ]
)


def _is_attention(module: Any) -> bool:
    """Whether a module is the one that calls the attention function: it has projections, and a scale or heads."""
    name = type(module).__name__
    if "Attention" not in name:
        return False
    children = [type(child).__name__ for child in module.children()]
    return any(kind in ("Linear", "Conv1D") for kind in children) and any(
        hasattr(module, known) for known in ("scaling", "num_heads", "head_dim", "attention_head_size", "scale")
    )


def restore(configs: list[tuple[Any, str | None]]) -> None:
    """What the configurations said before."""
    for config, before in configs:
        config._attn_implementation_internal = before
