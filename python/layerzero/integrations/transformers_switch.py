"""Attention of a model of transformers that is already built: switched to LayerZero's, and back."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from layerzero.integrations.registering import NAME, register_with_transformers

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


def switch(model: Any) -> tuple[list[tuple[Any, str | None]], Attentions]:
    """Sets the implementation in every configuration whose modeling file looks attention up by name.

    Returns the configurations with what they said before, and which modules are served.
    """
    from transformers import PreTrainedModel

    from layerzero.integrations.transformers_masks import written

    register_with_transformers()
    found = Attentions()
    configs: dict[int, tuple[Any, str | None]] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            if written(type(module).__module__).by_name:
                configs.setdefault(id(module.config), (module.config, module.config._attn_implementation))
        elif _is_attention(module):
            name, file = type(module).__name__, written(type(module).__module__)
            config: Any = getattr(module, "config", None)
            if file.by_name and hasattr(config, "_attn_implementation"):
                # Some keep a copy of the model's.
                configs.setdefault(id(config), (config, config._attn_implementation))
            if not file.by_name:
                found.kept[name, "its file computes attention itself"] += 1
            elif "sinks" in dict(module.named_parameters(recurse=False)):
                found.kept[name, "attention sinks: the model's own attention runs"] += 1
            elif unknown := file.arguments - _SERVED:
                found.kept[name, f"attention with {', '.join(sorted(unknown))}: refused if the model uses it"] += 1
            else:
                found.served[name] += 1
    kept = [held for held in configs.values() if held[1] != NAME]
    for config, _ in kept:
        config._attn_implementation_internal = NAME
    return kept, found


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
